"""State of the calls that one trainer rank takes part in. Thread-safe; no sockets."""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from verl_server.errors import DeadlineError, PeerError, VerlServerError, from_wire, to_wire
from verl_server.types import Json

# -- Call messages ----------------------------------------------------------------------------------
# The parts of the messages about one call of all trainer ranks: arrival, outcome and missing ranks.


def arrival_message(contribution: Json | None, error: VerlServerError | None, *, blocks: bool) -> Json:
    """What a rank sends when it arrives at a call. `blocks`: its main thread waits in the call."""
    arrival = {"contribution": contribution or {}} if error is None else {"error": to_wire(error)}
    return {**arrival, "blocks": blocks}


def result_of(outcome: Json) -> Any:
    """The result of a call. Raises the call's error."""
    if "error" in outcome:
        raise from_wire(outcome["error"])
    return outcome["result"]


def operation_of(call_id: str) -> str:
    """The name of the operation that a call id counts."""
    return call_id.partition("#")[0]


def call_number(call_id: str) -> int:
    """Which call of its operation a call id names, from 1. An update has further ids, for example `NAME#1/load`."""
    return int(call_id.partition("#")[2].partition("/")[0])


SAME_CALLS = "all ranks of an engine must make the same calls in the same order"


def not_arrived(missing: Sequence[int], call_id: str, timeout_s: float, elsewhere: Mapping[int, str]) -> PeerError:
    """The error about the ranks that are `missing` at a call. `elsewhere`: the calls in which some of them wait."""
    waits = "".join(f"; rank {rank} waits in {operation_of(call)}" for rank, call in elsewhere.items())
    return PeerError(
        f"rank(s) {list(missing)} did not arrive at {operation_of(call_id)} within {timeout_s:g} s{waits}; "
        f"{SAME_CALLS}",
        ranks=list(missing),
        operation=call_id,
    )


def different_calls(calls: Mapping[int, str]) -> PeerError:
    """The error about ranks that wait for each other in different calls. `calls`: the call of each of them."""
    waits = " and ".join(f"rank {rank} waits in {operation_of(call)}" for rank, call in sorted(calls.items()))
    return PeerError(f"{waits}: {SAME_CALLS}", ranks=sorted(calls))


def left_alone(waiting: int, name: str, done: int, count: int) -> PeerError:
    """The error about a rank that gathers the tensor `name` with a rank that has gathered its `count` tensors."""
    return PeerError(
        f"trainer rank {waiting} gathers {name!r} with rank {done}, but named_tensors of rank {done} ended before it, "
        f"after {count} gathered tensors: all ranks must push the same DTensors in the same order. A collective was "
        "left, and the trainer's process group cannot be used any more",
        ranks=[done],
    )


def not_finished(call_id: str, timeout_s: float) -> DeadlineError:
    """The error about a call whose outcome rank 0 did not send in time."""
    return DeadlineError(
        f"the other ranks did not finish {operation_of(call_id)} within {timeout_s:g} s",
        operation=call_id,
        seconds=timeout_s,
    )


# -- Pending calls ----------------------------------------------------------------------------------

MAX_REMEMBERED_CALLS = 100_000
"""Maximum number of ended calls that rank 0 remembers by their ids. Messages about a call that are still on their way
when it ends are ignored; thousands of calls can end at the same moment."""


@dataclass
class Arrivals:
    """The ranks that have arrived at one call. Exists on rank 0 only."""

    by_rank: dict[int, Json] = field(default_factory=dict)
    """What each rank sent when it arrived: its contribution, or its error."""
    complete: Future[None] = field(default_factory=Future)
    """Done when all ranks have arrived, or when the engine's ranks cannot work together any more."""


class PendingCalls:
    """Arrivals, outcomes and event streams of the calls that have not ended."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._call_counts: dict[str, int] = defaultdict(int)
        self._arrivals: dict[str, Arrivals] = {}
        self._outcomes: dict[str, Future[Json]] = {}
        self._first_errors: dict[str, Json] = {}
        self._settled: dict[str, None] = {}
        """On rank 0: calls at which all ranks have arrived, or that have failed."""
        self._early_errors: dict[str, Json] = {}
        """Outcomes of failed calls that this rank has not made yet, until it makes them."""
        self._gathers: tuple[str, list[Json]] = "", []
        """The last call before which ranks gather tensors, and what they have told about it."""
        self._streams: dict[str, queue.SimpleQueue[Json]] = {}
        self.failure: VerlServerError | None = None
        """Why no call can succeed any more, or None. Calls raise copies: a raised error refers to their frames."""

    def next_call_id(self, operation: str) -> str:
        """The id of this rank's next call of `operation`. All ranks count alike, so their ids are equal."""
        with self._lock:
            self._call_counts[operation] += 1
            return f"{operation}#{self._call_counts[operation]}"

    # -- rank 0 -------------------------------------------------------------------------------------

    def add_own_arrival(self, call_id: str, arrival: Json) -> Arrivals:
        """Record that rank 0 has arrived. Raises `failure` if it is set, and the call's error if rank 0 is too late.

        Raises CancelledError for a call that rank 0 itself has cancelled before its thread arrived.
        """
        with self._lock:
            self._require_open(call_id)
            if call_id in self._settled:
                raise CancelledError(f"{call_id} was cancelled")
            return self._add(call_id, 0, arrival)

    def _require_open(self, call_id: str) -> None:
        """Raise the error with which the call has ended already, or `failure`. A rank may have shut down after both."""
        if (outcome := self._early_errors.pop(call_id, None)) is not None:
            raise from_wire(outcome["error"])
        if self.failure is not None:
            raise copy.copy(self.failure)

    def add_arrival(self, call_id: str, rank: int, arrival: Json) -> None:
        """Record that another rank has arrived. The outcome of a call that has failed already is on its way to it."""
        with self._lock:
            if call_id not in self._settled:
                self._add(call_id, rank, arrival)

    def _add(self, call_id: str, rank: int, arrival: Json) -> Arrivals:
        arrivals = self._arrivals.setdefault(call_id, Arrivals())
        arrivals.by_rank[rank] = arrival
        if len(arrivals.by_rank) == self._num_ranks:
            self._settle(call_id)
            with contextlib.suppress(InvalidStateError):  # rank 0 does not wait any more
                arrivals.complete.set_result(None)
        return arrivals

    def waiting_elsewhere(self, call_id: str, rank: int) -> str | None:
        """The call, other than `call_id`, in which the main thread of `rank` waits."""
        with self._lock:
            return self._waiting_elsewhere(call_id, rank)

    def _waiting_elsewhere(self, call_id: str, rank: int) -> str | None:
        calls = (call for call, arrivals in self._arrivals.items() if arrivals.by_rank.get(rank, {}).get("blocks"))
        return next((call for call in calls if call != call_id), None)

    def find_different_calls(self, call_id: str, rank: int) -> tuple[str, VerlServerError] | None:
        """Another call whose main thread waits for `rank`, which waits in `call_id` for that rank; and the error."""
        with self._lock:
            arrivals = self._arrivals.get(call_id)
            if arrivals is None or not arrivals.by_rank.get(rank, {}).get("blocks"):
                return None
            for other in set(range(self._num_ranks)) - arrivals.by_rank.keys():
                other_call = self._waiting_elsewhere(call_id, other)
                if other_call is not None and rank not in self._arrivals[other_call].by_rank:
                    return other_call, different_calls({rank: call_id, other: other_call})
        return None

    def remove_arrivals(self, call_id: str) -> None:
        """Forget who has arrived at a call."""
        with self._lock:
            self._arrivals.pop(call_id, None)

    def fail(self, call_id: str, outcome: Json, error: BaseException) -> bool:
        """End a call with an outcome, on rank 0 with `error`, unless all ranks have arrived or it has ended already."""
        with self._lock:
            if call_id in self._settled:
                return False
            self._settle(call_id)
            arrivals = self._arrivals.pop(call_id, None)
            if isinstance(error, VerlServerError) and (arrivals is None or 0 not in arrivals.by_rank):
                self._early_errors[call_id] = outcome
        if arrivals is not None:
            with contextlib.suppress(InvalidStateError):  # rank 0 does not wait any more
                arrivals.complete.set_exception(error)
        return True

    def is_made(self, call_id: str) -> bool:
        """Whether rank 0 itself has made a call."""
        with self._lock:
            return self._call_counts[operation_of(call_id)] >= call_number(call_id)

    def _settle(self, call_id: str) -> None:
        self._settled[call_id] = None
        if len(self._settled) > MAX_REMEMBERED_CALLS:
            self._settled.pop(next(iter(self._settled)))

    # -- all ranks ----------------------------------------------------------------------------------

    def set_first_error(self, call_id: str, error: Json) -> bool:
        """Record the error that a rank announced for a call. Returns False if there was one before."""
        with self._lock:
            if call_id in self._first_errors:
                return False
            self._first_errors[call_id] = error
            if len(self._first_errors) > MAX_REMEMBERED_CALLS:
                self._first_errors.pop(next(iter(self._first_errors)))
            return True

    def first_error(self, call_id: str) -> Json | None:
        """The first error that a rank has announced for a call, or None."""
        with self._lock:
            return self._first_errors.get(call_id)

    def add_gathers(self, call_id: str, notice: Json) -> VerlServerError | None:
        """Record what a rank has told about its gathering before a call, see `RankCoordinator.tell_gathers`.

        Returns the error about a rank that waits in a collective for this rank, which has finished.
        """
        with self._lock:
            notices = self._gathers[1] if self._gathers[0] == call_id else []
            self._gathers = call_id, [*notices, notice]
            for done in (one for one in self._gathers[1] if one["waits_in"] is None):
                for waiting in (one for one in self._gathers[1] if one["waits_in"] is not None):
                    mesh, name = waiting["waits_in"]
                    count = done["counts"].get(mesh, 0)
                    if str(done["rank"]) in mesh.split(",") and count < waiting["counts"][mesh]:
                        return left_alone(waiting["rank"], name, done["rank"], count)
        return None

    # -- other ranks --------------------------------------------------------------------------------

    def expect_outcome(self, call_id: str) -> Future[Json]:
        """A future of the outcome that rank 0 will send. Raises `failure` if it is set."""
        outcome: Future[Json] = Future()
        with self._lock:
            self._require_open(call_id)
            self._outcomes[call_id] = outcome
        return outcome

    def set_outcome(self, call_id: str, outcome: Json) -> None:
        """Record the outcome that rank 0 sent."""
        with self._lock:
            future = self._outcomes.pop(call_id, None)
            if future is None and "error" in outcome:  # this rank has not arrived yet
                self._early_errors[call_id] = outcome
        if future is not None:
            with contextlib.suppress(InvalidStateError):  # the event loop may cancel the call at any time
                future.set_result(outcome)

    # -- streams ------------------------------------------------------------------------------------

    def open_stream(self, call_id: str) -> queue.SimpleQueue[Json]:
        """A queue that receives the events of a call."""
        events: queue.SimpleQueue[Json] = queue.SimpleQueue()
        with self._lock:
            self._streams[call_id] = events
        return events

    def add_event(self, call_id: str, event: Json) -> None:
        """Put an event into the queue of its call, if the stream is open."""
        with self._lock:
            events = self._streams.get(call_id)
        if events is not None:
            events.put(event)

    def close_stream(self, call_id: str) -> None:
        """Discard the queue of a call."""
        with self._lock:
            self._streams.pop(call_id, None)

    # -- failure ------------------------------------------------------------------------------------

    def fail_all(self, error: VerlServerError) -> bool:
        """Make every pending and every later call raise `error`. Returns False if a failure was recorded before."""
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = error
            waiting: list[Future[Any]] = [*self._outcomes.values(), *(a.complete for a in self._arrivals.values())]
            streams = list(self._streams.values())
            self._outcomes.clear()
        for future in waiting:
            with contextlib.suppress(Exception):  # the future was completed in the meantime
                future.set_exception(copy.copy(error))
        for events in streams:
            events.put({"end": to_wire(error)})
        return True


# -- Peer errors ------------------------------------------------------------------------------------
# The error that the other trainer ranks raise when one rank fails.


def to_peer_wire(error: BaseException, rank: int) -> dict[str, Any]:
    """Convert an exception of trainer rank `rank` to plain JSON values for the other ranks.

    The other ranks raise the same type with the same message. An exception that is not of this library becomes a
    `PeerError` that names the rank and the exception's type; the rank itself raises the original exception.
    """
    if isinstance(error, VerlServerError):
        return to_wire(error)
    return to_wire(PeerError(f"trainer rank {rank} failed: {type(error).__name__}: {error}", ranks=[rank]))
