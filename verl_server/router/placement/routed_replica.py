"""`RoutedReplica`: one replica as a router knows it: its server, its state and its load. `Slot`: a request on it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import aiohttp

from verl_server.router.placement.error_history import ErrorHistory, Trust
from verl_server.router.replica_status import ReplicaStats
from verl_server.router.snapshot import ReplicaSnapshot

T = TypeVar("T")
Load = tuple[int, int, str]
"""Tokens in flight, running requests, and the name. The replica with the smallest load receives the next request."""


class GenerationServer(Protocol):
    """The part of `AsyncHttpServerEngineAdapter` that a router needs."""

    base_url: str
    api_key: str | None

    async def generate(self, **request: Any) -> Any: ...
    def generate_stream(self, **request: Any) -> Any: ...


@dataclass(eq=False)
class RoutedReplica:
    """One replica of a router: its server, its state and its load."""

    name: str
    server: GenerationServer
    """Adapter of the replica's server."""
    weight_version: int
    """Version of the weights that the replica serves."""
    max_running_requests: int
    """Maximum number of requests that run on the replica at the same time."""
    admitted: bool = True
    """Whether the replica may receive requests."""
    is_stalled: bool = False
    """Whether the fleet reports that the replica made no progress for a long time."""
    will_serve: bool = True
    """Whether the replica serves requests, or will serve them again without an action of the user."""
    problem: str = ""
    """Why the replica receives no requests, for the callers. Empty if nobody has said so."""
    errors: ErrorHistory = field(default_factory=ErrorHistory)
    """Errors of the replica in a row."""
    running_requests: int = 0
    """Number of requests that run on the replica."""
    tokens_in_flight: int = 0
    """Number of tokens of these requests: prompts and received output."""
    started_requests: int = 0
    """Number of requests that have started on the replica."""
    waiting_callers: int = 0
    """Number of these requests whose callers have not read what has arrived for them."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the replica has no server any more. If its machine was lost, its connections might never be closed."""
    is_removed: bool = False
    """Whether the fleet has removed the replica. Its server then ends, whatever runs there."""
    runs_isolated: bool = False
    """Whether an isolated request runs on the replica, see `RoutingRequest`, and has not returned a token."""
    last_progress_at: float = field(default_factory=time.monotonic)
    """Time of the last new token, or of the first request after an idle period (`time.monotonic`)."""

    @property
    def load(self) -> Load:
        return self.tokens_in_flight, self.running_requests, self.name

    @property
    def is_suspect(self) -> bool:
        """Whether the replica receives requests only when no other replica can."""
        return self.is_stalled or self.errors.trust is Trust.SUSPECT

    @property
    def is_full(self) -> bool:
        """Whether the replica takes no further request now."""
        return self.running_requests >= self.max_running_requests or self.errors.has_probe

    def stats(self) -> ReplicaStats:
        """What the router observes of the replica's requests. Any thread may call this."""
        running, progress_at = self.running_requests, self.last_progress_at
        if self.waiting_callers >= running:
            progress_at = time.monotonic() if running else 0.0  # no request waits for the replica
        return ReplicaStats(running, progress_at, self.admitted)

    def snapshot(self) -> ReplicaSnapshot:
        """A frozen copy of the replica's state. Any thread may call this."""
        return ReplicaSnapshot(
            self.name,
            self.admitted,
            self.is_suspect,
            self.weight_version,
            self.running_requests,
            self.tokens_in_flight,
        )


class Slot:
    """One request on a replica, from its placement to its end. `ReplicaPool` creates and releases it."""

    __slots__ = ("_number", "_was_idle", "is_isolated", "is_probe", "is_released", "period", "replica", "tokens")

    def __init__(self, replica: RoutedReplica, prompt_tokens: int, is_isolated: bool = False) -> None:
        self.replica = replica
        self.is_isolated = is_isolated
        """Whether the request is isolated and has not returned a token."""
        replica.runs_isolated = replica.runs_isolated or is_isolated
        self.tokens = prompt_tokens
        """Number of tokens of the request: prompt and received output."""
        self.is_probe = replica.errors.trust is Trust.PROBED
        """Whether the request shows if a replica that failed several times in a row works again."""
        self.period = replica.errors.start_request()
        """Period of the replica's errors in which the request began."""
        self.is_released = False
        """Whether the request no longer runs."""
        self._was_idle = not replica.running_requests
        if self._was_idle:
            replica.last_progress_at = time.monotonic()
        replica.running_requests += 1
        replica.started_requests += 1
        replica.tokens_in_flight += prompt_tokens
        self._number = replica.started_requests

    @property
    def has_run_alone(self) -> bool:
        """Whether no other request ran on the replica since this one was placed."""
        return self._was_idle and self.replica.started_requests == self._number

    @contextlib.contextmanager
    def waits_for_caller(self) -> Iterator[None]:
        """While the body of the `with` statement runs, the request waits for its caller to read.

        The replica does not count as stalled because of this request.
        """
        self.replica.waiting_callers += 1
        try:
            yield
        finally:
            self.replica.waiting_callers -= 1
            self.replica.last_progress_at = time.monotonic()

    def set_tokens(self, tokens: int) -> int:
        """Record the number of tokens of the request; returns the change."""
        added, self.tokens = tokens - self.tokens, tokens
        self.replica.tokens_in_flight += added
        self.replica.last_progress_at = time.monotonic()
        return added

    def end_isolation(self) -> bool:
        """The replica may run another isolated request. Returns whether this one was isolated."""
        was_isolated, self.is_isolated = self.is_isolated, False
        if was_isolated:
            self.replica.runs_isolated = False
        return was_isolated

    def release(self) -> None:
        """Record that the request no longer runs."""
        self.is_released = True
        self.replica.running_requests -= 1
        self.replica.tokens_in_flight -= self.tokens
        self.replica.errors.end_request(self.period)


async def unless_lost(lost: asyncio.Future[Any], sending: Coroutine[Any, Any, T]) -> T:
    """The result of `sending`. Raises aiohttp's ServerDisconnectedError as soon as `lost` is done."""
    call = asyncio.ensure_future(sending)
    try:
        await asyncio.wait((call, lost), return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise aiohttp.ServerDisconnectedError("the replica has lost its server")
        return call.result()
    finally:
        call.cancel()
