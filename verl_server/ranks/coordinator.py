"""The ranks of one engine agree: every call happens on all of them, or fails on all with the same error.

A star: rank 0 is the hub. For each call every rank says that it has arrived (and what it brings, or what
failed); when all have, the hub acts; then all get the outcome. No collective of the trainer's process group
is used after the start, so none can be left half-entered; a rank that dies closes its connection, which
all notice at once; a rank that never comes is named when the deadline passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from verl_server.errors import DeadlineError, PeerError, ShutDownError, VerlServerError, from_wire, to_wire
from verl_server.ranks.channel import Channel, Json
from verl_server.ranks.rendezvous import connect

#: How long after the hub's own deadline a spoke still waits for the hub to say so.
OUTCOME_SLACK_S = 5.0
FORGET_AFTER = 1000


@dataclass
class _Arrivals:
    """Who has arrived at one call (hub only)."""

    brought: dict[int, Json] = field(default_factory=dict)
    complete: Future[None] = field(default_factory=Future)


class RankCoordinator:
    """The control channel of one engine's ranks. Made by `form`, on all of them."""

    def __init__(self, rank: int, size: int, channels: dict[int, Channel], ranks_s: float) -> None:
        self.rank, self.size = rank, size
        self._channels, self._ranks_s = channels, ranks_s
        self._lock = threading.Lock()
        self._counts: dict[str, int] = defaultdict(int)
        self._arrivals: dict[str, _Arrivals] = {}
        self._outcomes: dict[str, Future[Json]] = {}
        self._given_up: dict[str, Json] = {}
        self._streams: dict[str, queue.SimpleQueue[Json]] = {}
        self._broken: VerlServerError | None = None
        self._farewells: set[int] = set()
        self.on_broken: Callable[[VerlServerError], None] = lambda error: None
        for channel in channels.values():
            channel.listen(self._on_message, self._on_end)

    @classmethod
    def form(
        cls, rank: int, size: int, share: Callable[[Any], Any], reachable: bool, ranks_s: float
    ) -> RankCoordinator:
        """Connect the ranks. `share(x)` gives rank 0's `x` to all (one broadcast of the trainer's group).

        `reachable`: ranks may be on other machines, so the hub listens on an address that they can reach.
        Raises DeadlineError naming the ranks that did not come within `ranks_s` seconds.
        """
        return cls(rank, size, connect(rank, size, share, reachable, ranks_s), ranks_s)

    # -- one call -----------------------------------------------------------------------------------

    def next_call(self, operation: str) -> str:
        """The name of this rank's next call of `operation`; equal on all ranks, as their order is."""
        with self._lock:
            self._counts[operation] += 1
            return f"{operation}#{self._counts[operation]}"

    def agree(
        self,
        call: str,
        action: Callable[[list[Json]], Any],
        *,
        bring: Json | None = None,
        error: VerlServerError | None = None,
        action_s: float | None = None,
    ) -> Any:
        """Arrive at `call`; when all ranks have, rank 0 runs `action` and all return its JSON result.

        `bring` is what this rank contributes (`action` gets all, by rank); with `error` the call fails on
        all ranks with it. `action_s` bounds the action as the other ranks see it.
        """
        if self.size == 1:
            self._check_alone(error)
            return action([bring or {}])
        mine = _entry(bring, error)
        if self.rank != 0:
            outcome = self._arrive(call, mine)
            limit = None if action_s is None else self._ranks_s + action_s + OUTCOME_SLACK_S
            return _result(self._wait(outcome, call, limit))
        brought = self._gather(call, mine)
        with self._reporting(call) as report:
            report.result = action(brought)
        return report.result

    async def agree_async(
        self, call: str, action: Callable[[list[Json]], Awaitable[Any]], *, error: VerlServerError | None = None
    ) -> Any:
        """`agree` for an event loop; many such calls may be under way at once."""
        if self.size == 1:
            self._check_alone(error)
            return await action([{}])
        mine = _entry(None, error)
        if self.rank != 0:
            return _result(await asyncio.wrap_future(self._arrive(call, mine)))
        brought = await asyncio.to_thread(self._gather, call, mine)
        with self._reporting(call) as report:
            report.result = await action(brought)
        return report.result

    # -- streams ------------------------------------------------------------------------------------

    def open_stream(self, call: str) -> queue.SimpleQueue[Json]:
        """On ranks other than 0, before arriving: what rank 0 publishes for `call` comes here."""
        events: queue.SimpleQueue[Json] = queue.SimpleQueue()
        with self._lock:
            self._streams[call] = events
        return events

    def publish(self, call: str, event: Json) -> None:
        """On rank 0: hand an event of a stream to the others; `{"end": ...}` is the last."""
        for channel in self._channels.values():
            channel.send({"call": call, "event": event})

    def close_stream(self, call: str) -> None:
        with self._lock:
            self._streams.pop(call, None)

    # -- faults and the end -------------------------------------------------------------------------

    def fault(self, error: VerlServerError) -> None:
        """This rank cannot go on (its node's server died, say): every rank's calls fail with `error` now."""
        for channel in self._channels.values():
            channel.send({"fault": to_wire(error)})
        self._break(error)

    def close(self) -> None:
        """Say farewell and close. Other ranks that still call will be told that this one has gone."""
        for channel in self._channels.values():
            channel.send({"farewell": True})
            channel.close()
        self._break(ShutDownError("the engine was shut down on this rank"))

    @property
    def broken(self) -> VerlServerError | None:
        """Why this group cannot be used any more, or None."""
        return self._broken

    # -- inside -------------------------------------------------------------------------------------

    def _check_alone(self, error: VerlServerError | None) -> None:
        """A group of one agrees with itself."""
        if self._broken is not None or error is not None:
            raise self._broken or error  # type: ignore[misc]

    def _arrive(self, call: str, mine: Json) -> Future[Json]:
        outcome: Future[Json] = Future()
        with self._lock:
            if self._broken is not None:
                raise self._broken
            self._outcomes[call] = outcome
        if not self._channels[0].send({"call": call, "enter": mine}):
            self._on_end(0)
        return outcome

    def _gather(self, call: str, mine: Json) -> list[Json]:
        """Rank 0: wait for all; raise the first error that any rank brought, after telling all."""
        with self._lock:
            if self._broken is not None:
                raise self._broken
            arrivals = self._arrivals.setdefault(call, _Arrivals())
            arrivals.brought[0] = mine
            if len(arrivals.brought) == self.size:
                arrivals.complete.set_result(None)
        with self._reporting(call, only_failure=True):
            try:
                self._wait(arrivals.complete, call, self._ranks_s)
            except DeadlineError:
                missing = sorted(set(range(self.size)) - arrivals.brought.keys())
                raise PeerError(
                    f"rank(s) {missing} did not arrive at {call.partition('#')[0]} within {self._ranks_s:g} s; "
                    "all ranks of an engine must make the same calls in the same order",
                    ranks=missing,
                    operation=call,
                ) from None
            finally:
                with self._lock:
                    self._arrivals.pop(call, None)
            for rank in range(self.size):
                wire = arrivals.brought[rank].get("error")
                if wire is not None:
                    raise from_wire(wire)
            return [arrivals.brought[rank]["bring"] for rank in range(self.size)]

    def _reporting(self, call: str, only_failure: bool = False) -> _Report:
        return _Report(self, call, only_failure)

    def _tell(self, call: str, outcome: Json, missing_ok: bool) -> None:
        if "error" in outcome and missing_ok:
            with self._lock:
                self._given_up[call] = outcome
                if len(self._given_up) > FORGET_AFTER:
                    self._given_up.pop(next(iter(self._given_up)))
        for channel in self._channels.values():
            channel.send({"call": call, "outcome": outcome})

    def _wait(self, future: Future[Any], call: str, limit_s: float | None) -> Any:
        try:
            return future.result(limit_s)
        except FutureTimeout:
            raise DeadlineError(
                f"{call.partition('#')[0]} was not finished by the other ranks after {limit_s:g} s",
                operation=call,
                seconds=limit_s,
            ) from None

    def _on_message(self, peer: int, message: Json) -> None:
        if "farewell" in message:
            self._farewells.add(peer)
        elif "fault" in message:
            error = from_wire(message["fault"])
            for rank, channel in self._channels.items():
                if rank != peer:
                    channel.send(message)
            self._break(error)
        elif "enter" in message:
            self._on_enter(peer, message["call"], message["enter"])
        elif "event" in message:
            with self._lock:
                events = self._streams.get(message["call"])
            if events is not None:
                events.put(message["event"])
        else:
            with self._lock:
                outcome = self._outcomes.pop(message["call"], None)
            if outcome is not None and not outcome.done():
                outcome.set_result(message["outcome"])

    def _on_enter(self, peer: int, call: str, entry: Json) -> None:
        with self._lock:
            late = self._given_up.get(call)
            if late is None:
                arrivals = self._arrivals.setdefault(call, _Arrivals())
                arrivals.brought[peer] = entry
                if len(arrivals.brought) == self.size:
                    arrivals.complete.set_result(None)
        if late is not None:
            self._channels[peer].send({"call": call, "outcome": late})

    def _on_end(self, peer: int) -> None:
        if self._broken is None:
            how = "has shut its engine down" if peer in self._farewells else "died"
            error = PeerError(
                f"trainer rank {peer} of this engine {how}; the engine cannot go on without it. Shut it down.",
                ranks=[peer],
            )
            for rank, channel in self._channels.items():
                if rank != peer:
                    channel.send({"fault": to_wire(error)})
            self._break(error)

    def _break(self, error: VerlServerError) -> None:
        with self._lock:
            if self._broken is not None:
                return
            self._broken = error
            waiting: list[Future[Any]] = [*self._outcomes.values(), *(a.complete for a in self._arrivals.values())]
            streams = list(self._streams.values())
            self._outcomes.clear()
        for future in waiting:
            with contextlib.suppress(Exception):  # it was just done: then there is nothing to tell
                future.set_exception(error)
        for events in streams:
            events.put({"end": to_wire(error)})
        self.on_broken(error)


class _Report:
    """Tells all ranks how a call ended, whatever ended it; `result` is the call's result."""

    def __init__(self, group: RankCoordinator, call: str, only_failure: bool) -> None:
        self._group, self._call, self._only_failure = group, call, only_failure
        self.result: Any = None

    def __enter__(self) -> _Report:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._group._tell(self._call, {"error": to_wire(error)}, missing_ok=self._only_failure)
        elif not self._only_failure:
            self._group._tell(self._call, {"result": self.result}, missing_ok=False)


def _entry(bring: Json | None, error: VerlServerError | None) -> Json:
    return {"bring": bring} if error is None else {"error": to_wire(error)}


def _result(outcome: Json) -> Any:
    if "error" in outcome:
        raise from_wire(outcome["error"])
    return outcome["result"]
