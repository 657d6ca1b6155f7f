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
import copy
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any

from verl_server.errors import PeerError, ShutDownError, VerlServerError, from_wire, to_wire
from verl_server.ranks.channel import Channel, connect_ranks, encode_message, wait_until_all_sent
from verl_server.ranks.pending_calls import (
    PendingCalls,
    arrival_message,
    not_arrived,
    not_finished,
    result_of,
    to_peer_wire,
)
from verl_server.types import Json

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
        """Connect the ranks.

        `broadcast_from_rank_0(x)` returns rank 0's `x` on every rank; it is called once. With `multiple_machines`,
        rank 0 listens on an address that other machines can reach; None: not known. Raises PeerError with the ranks
        that did not connect within `arrival_timeout_s` seconds, and BadInputError without such an address.
        """
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
