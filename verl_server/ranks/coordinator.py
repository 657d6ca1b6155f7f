"""The coordinator of one engine's trainer ranks: a call happens on all ranks, or fails on all with the same error.

The coordinator and its ranks form a star of sockets with rank 0 in the middle. For each call, every rank sends rank 0 a
message when it arrives, with its contribution or its error. When all ranks have arrived, rank 0 runs the call's action
and sends the outcome to all. An error that is not of this library is raised unchanged by rank 0 and as a PeerError by
the other ranks. An interrupt of a rank that waits ends the call on all ranks at once. A rank that dies closes its
connection, and all ranks notice that at once. Ranks whose main threads wait for each other in different calls learn it
at once. A rank that never arrives is named when the deadline passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import queue
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from dataclasses import dataclass, field
from typing import Any

from verl_server.errors import DeadlineError, PeerError, ShutDownError, VerlServerError, from_wire, to_wire
from verl_server.ranks.channel import Channel, connect_ranks, encode_message, wait_until_all_sent
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


# -- Outcome sender ---------------------------------------------------------------------------------
# Rank 0's message about the end of a call, which is sent also when the call fails.


class OutcomeSender:
    """Sends all ranks the outcome of a call when the body ends: `result`, or the error that the body raised."""

    def __init__(self, coordinator: RankCoordinator, call_id: str) -> None:
        self._coordinator, self._call_id = coordinator, call_id
        self.result: Any = None

    def __enter__(self) -> OutcomeSender:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._coordinator.send_outcome(self._call_id, {"error": to_peer_wire(error, self._coordinator.rank)})
        else:
            self._coordinator.send_outcome(self._call_id, {"result": self.result})


# -- Coordinator ------------------------------------------------------------------------------------

OUTCOME_SLACK_S = 5.0
"""Seconds that the other ranks wait for an outcome after rank 0's own deadline."""


class RankCoordinator:
    """The control channel among the trainer ranks of one engine. Created by `connect` on every rank."""

    def __init__(self, rank: int, size: int, channels: dict[int, Channel], arrival_timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._channels, self.arrival_timeout_s = channels, arrival_timeout_s
        self._calls = PendingCalls(size)
        self._sending_lock = threading.Lock()
        self._closed_peers: set[int] = set()
        """Ranks that said that they shut their engine down."""
        self.on_failure: Callable[[VerlServerError], None] = lambda error: None
        """Called once, when `failure` is set."""
        for channel in channels.values():
            channel.listen(self._on_message, self._on_disconnect)

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        broadcast_from_rank_0: Callable[[Any], Any],
        multiple_machines: bool | None,
        arrival_timeout_s: float,
    ) -> RankCoordinator:
        """Connect the ranks within `arrival_timeout_s` seconds. See `connect_ranks` for the arguments and errors."""
        channels = connect_ranks(rank, size, broadcast_from_rank_0, multiple_machines, arrival_timeout_s)
        return cls(rank, size, channels, arrival_timeout_s)

    # -- one call -----------------------------------------------------------------------------------

    def next_call_id(self, operation: str) -> str:
        """The id of this rank's next call of `operation`; equal on all ranks, which make the same calls in order."""
        return self._calls.next_call_id(operation)

    def agree(
        self,
        call_id: str,
        action: Callable[[list[Json]], Any],
        *,
        contribution: Json | None = None,
        error: VerlServerError | None = None,
        action_timeout_s: float | None = None,
    ) -> Any:
        """Run `action` on rank 0 when all ranks have arrived at the call, and return its JSON result on every rank.

        `action` gets the `contribution` of each rank, in the order of ranks. If a rank passes an `error`, the call
        raises it on all ranks. `action_timeout_s` is the number of seconds that the other ranks wait for the action.
        """
        if self.size == 1:
            self._raise_failure_or(error)
            return action([contribution or {}])
        arrival = arrival_message(contribution, error, blocks=threading.current_thread() is threading.main_thread())
        if self.rank != 0:
            outcome = self._arrive(call_id, arrival)
            try:
                is_done = not wait([outcome], self._outcome_timeout_s(action_timeout_s)).not_done
            except BaseException as interrupt:
                self._leave(call_id, interrupt)
                raise
            if not is_done:
                self._on_overdue(call_id, action_timeout_s)
            return result_of(outcome.result())
        contributions = self._collect(call_id, arrival)
        with OutcomeSender(self, call_id) as sender:
            sender.result = action(contributions)
        return sender.result

    async def agree_async(
        self,
        call_id: str,
        action: Callable[[list[Json]], Awaitable[Any]],
        *,
        contribution: Json | None = None,
        error: VerlServerError | None = None,
        action_timeout_s: float | None = None,
    ) -> Any:
        """`agree` for an event loop. Any number of such calls may run at the same time."""
        if self.size == 1:
            self._raise_failure_or(error)
            return await action([contribution or {}])
        arrival = arrival_message(contribution, error, blocks=False)
        if self.rank != 0:
            outcome = asyncio.wrap_future(self._arrive(call_id, arrival))
            try:
                await asyncio.wait([outcome], timeout=self._outcome_timeout_s(action_timeout_s))
                if not outcome.done():
                    self._on_overdue(call_id, action_timeout_s)
                return result_of(await outcome)
            finally:
                outcome.cancel()
        try:
            contributions = await asyncio.to_thread(self._collect, call_id, arrival)
        except asyncio.CancelledError as cancelled:
            self._leave(call_id, cancelled)
            raise
        with OutcomeSender(self, call_id) as sender:
            sender.result = await action(contributions)
        return sender.result

    # -- streams ------------------------------------------------------------------------------------

    def open_stream(self, call_id: str) -> queue.SimpleQueue[Json]:
        """The queue of the events that rank 0 publishes for a call. To be opened before this rank arrives."""
        return self._calls.open_stream(call_id)

    def publish_event(self, call_id: str, event: Json) -> None:
        """Send an event of a stream from rank 0 to the other ranks. `{"end": error or None}` is the last event."""
        self._send_to_all({"call_id": call_id, "event": event})

    def close_stream(self, call_id: str) -> None:
        """Discard the queue of a stream."""
        self._calls.close_stream(call_id)

    # -- failure and shutdown -----------------------------------------------------------------------

    @property
    def failure(self) -> VerlServerError | None:
        """Why the ranks cannot work together any more, or None."""
        return self._calls.failure

    def announce_error(self, call_id: str, error: VerlServerError) -> None:
        """Tell the other ranks that this rank takes no part in the work before the call `call_id` any more.

        This rank arrives at the call with `error`. The other ranks learn of the first such error in `raise_failure`.
        """
        wire = to_wire(error)
        if self._calls.set_first_error(call_id, wire):
            self._send_to_all({"call_id": call_id, "first_error": wire})

    def tell_gathers(self, call_id: str, notice: Json, source: int | None = None) -> None:
        """This rank (or `source`) waits in a collective before the call `call_id`, or takes part in no further one.

        `notice`: the global `rank`, `counts` of its collectives by the ranks of the mesh ("0,1"), and `waits_in`: None,
        or the mesh and the name of the tensor. All ranks get an error if a rank waits for one that has finished.
        """
        if notice["waits_in"] is not None:  # a rank that has finished tells nobody until another one waits
            self._send_to_all({"call_id": call_id, "gathers": notice}, source)
        if (error := self._calls.add_gathers(call_id, notice)) is not None:
            self.announce_error(call_id, error)

    def raise_failure(self, call_id: str | None = None) -> None:
        """Raise `failure` if it is set, or the error that a rank has announced for the call `call_id`.

        A rank calls this while it waits for the other ranks before it arrives itself.
        """
        if self.failure is not None:
            raise copy.copy(self.failure)
        if call_id is not None and (error := self._calls.first_error(call_id)) is not None:
            raise from_wire(error)

    def fail_all(self, error: VerlServerError, source: int | None = None) -> None:
        """Make all pending and later calls of all ranks raise `error`, for example when this node's server has died.

        The other ranks but `source` are told first: the caller of a call that fails may close the connections.
        """
        self._send_to_all({"failure": to_wire(error)}, source)
        self._fail(error)

    def close(self) -> None:
        """Send a closing message and disconnect. Calls of the other ranks then fail with a PeerError.

        Waits for the messages to the other ranks, except those to a rank that reads nothing for `STALL_S` seconds.
        """
        self._send_to_all({"closing": True})
        self._fail(ShutDownError("the engine was shut down on this rank"))  # before other ranks disconnect
        wait_until_all_sent(self._channels.values())
        for channel in self._channels.values():
            channel.close()

    def _fail(self, error: VerlServerError) -> None:
        if self._calls.fail_all(error):
            self.on_failure(error)

    def _raise_failure_or(self, error: VerlServerError | None) -> None:
        """The check before a call of an engine with one rank."""
        if self.failure is not None or error is not None:
            raise copy.copy(self.failure) or error  # type: ignore[misc]

    # -- the parts of a call ------------------------------------------------------------------------

    def _arrive(self, call_id: str, arrival: Json) -> Future[Json]:
        """On ranks other than 0: tell rank 0 that this rank has arrived. Returns a future of the outcome."""
        outcome = self._calls.expect_outcome(call_id)
        if not self._channels[0].send({"call_id": call_id, "arrival": arrival}):
            self._on_disconnect(0)
        return outcome

    def _collect(self, call_id: str, arrival: Json) -> list[Json]:
        """On rank 0: wait for all ranks. Raises the first error that a rank contributed, on all ranks."""
        arrivals = self._calls.add_own_arrival(call_id, arrival)
        try:
            self._check_calls(call_id, 0)
            if wait([arrivals.complete], self.arrival_timeout_s).not_done:
                missing = sorted(set(range(self.size)) - arrivals.by_rank.keys())
                found = {rank: self._calls.waiting_elsewhere(call_id, rank) for rank in missing}
                elsewhere = {rank: call for rank, call in found.items() if call is not None}
                self._fail_call(call_id, not_arrived(list(found), call_id, self.arrival_timeout_s, elsewhere))
            arrivals.complete.result()
        except VerlServerError:
            raise
        except BaseException as interrupt:
            self._leave(call_id, interrupt)
            raise
        finally:
            self._calls.remove_arrivals(call_id)
        for rank in range(self.size):
            if (error := arrivals.by_rank[rank].get("error")) is not None:
                failure = from_wire(error)
                self.send_outcome(call_id, {"error": to_wire(failure)})
                raise failure
        return [arrivals.by_rank[rank]["contribution"] for rank in range(self.size)]

    def _check_calls(self, call_id: str, rank: int) -> None:
        """On rank 0: end the call if this rank and another rank wait for each other in different calls."""
        if (found := self._calls.find_different_calls(call_id, rank)) is not None:
            other_call, error = found
            self._fail_call(call_id, error)
            self._fail_call(other_call, error)

    def _fail_call(self, call_id: str, error: VerlServerError, interrupt: BaseException | None = None) -> bool:
        """On rank 0: end a call on all ranks. Returns False, and does nothing, if all have arrived at it.

        `interrupt`: what rank 0 raises instead of `error`.
        """
        outcome = {"error": to_wire(error)}
        has_failed = self._calls.fail(call_id, outcome, interrupt or copy.copy(error))
        if has_failed:
            self._send_to_all({"call_id": call_id, "outcome": outcome})
        return has_failed

    def send_outcome(self, call_id: str, outcome: Json) -> None:
        """On rank 0: send `{"result": ...}` or `{"error": ...}` of a call to all ranks.

        Raises TypeError for a result that JSON cannot carry. The other ranks then receive this error.
        """
        try:
            self._send_to_all({"call_id": call_id, "outcome": outcome})
        except TypeError as error:
            self._send_to_all({"call_id": call_id, "outcome": {"error": to_peer_wire(error, self.rank)}})
            raise

    def _leave(self, call_id: str, interrupt: BaseException) -> None:
        """`interrupt` ends the wait of this rank in a call: the call fails on all ranks.

        If all ranks have arrived already, the others wait for the outcome of rank 0, which makes none any more.
        """
        wire = to_peer_wire(interrupt, self.rank)
        if self.rank != 0:
            self._channels[0].send({"call_id": call_id, "left": wire})
        else:
            error = from_wire(wire)
            if not self._fail_call(call_id, error, interrupt):
                self._send_to_all({"call_id": call_id, "outcome": {"error": to_wire(error)}})

    def _outcome_timeout_s(self, action_timeout_s: float | None) -> float:
        return self.arrival_timeout_s + (action_timeout_s or 0.0) + OUTCOME_SLACK_S

    def _on_overdue(self, call_id: str, action_timeout_s: float | None) -> None:
        """On ranks other than 0: no outcome was received in time.

        Raises DeadlineError. If the action has no deadline, rank 0 is asked instead to end the call unless it has made
        the call too.
        """
        if action_timeout_s is not None:
            raise not_finished(call_id, self._outcome_timeout_s(action_timeout_s))
        self._channels[0].send({"call_id": call_id, "overdue": True})

    # -- messages -----------------------------------------------------------------------------------

    def _on_message(self, peer: int, message: Json) -> None:
        if "closing" in message:
            self._closed_peers.add(peer)
        elif "failure" in message:
            self.fail_all(from_wire(message["failure"]), source=peer)
        elif "first_error" in message:
            if self._calls.set_first_error(message["call_id"], message["first_error"]):
                self._send_to_all(message, source=peer)
        elif "gathers" in message:
            self.tell_gathers(message["call_id"], message["gathers"], peer)
        elif "left" in message:
            self._fail_call(message["call_id"], from_wire(message["left"]))
        elif "arrival" in message:
            self._calls.add_arrival(message["call_id"], peer, message["arrival"])
            self._check_calls(message["call_id"], peer)
        elif "overdue" in message:
            if not self._calls.is_made(message["call_id"]):
                late = not_arrived([0], message["call_id"], self.arrival_timeout_s, {})
                self._fail_call(message["call_id"], late)
        elif "event" in message:
            self._calls.add_event(message["call_id"], message["event"])
        else:
            self._calls.set_outcome(message["call_id"], message["outcome"])

    def _on_disconnect(self, peer: int) -> None:
        if self.failure is not None:
            return
        how = "has shut its engine down" if peer in self._closed_peers else "died"
        message = f"trainer rank {peer} of this engine {how}; the engine cannot continue without it. "
        self.fail_all(PeerError(message + "Shut the engine down.", ranks=[peer]), source=peer)

    def _send_to_all(self, message: Json, source: int | None = None) -> None:
        """Send a message to all connected ranks but `source`. Only rank 0 is connected to several ranks.

        A rank that ends when it has received an outcome is noticed by another thread. That thread tells the ranks after
        all of them have been sent the outcome.
        """
        channels = [channel for rank, channel in self._channels.items() if rank != source]
        encoded = encode_message(message) if channels else b""
        with self._sending_lock:
            for channel in channels:
                channel.send_encoded(encoded)
