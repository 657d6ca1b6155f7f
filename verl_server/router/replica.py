"""`RoutedReplica`: one replica as a router knows it: its server, its state and its load. `Slot`: a request on it."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import aiohttp

from verl_server.router.replica_status import ReplicaSnapshot, ReplicaStats

logger = logging.getLogger(__name__)


# -- Error history ----------------------------------------------------------------------------------
# `ErrorHistory`: when a replica that answers with errors stops receiving requests, and when it is probed again.

MAX_ERRORS_IN_A_ROW = 2
"""Maximum number of errors in a row of a replica that is trusted. One more error makes the replica suspect."""
FIRST_PROBE_DELAY_S = 0.5
"""Seconds before the first probe of a suspect replica. The delay doubles with each probe that fails."""
MAX_PROBE_DELAY_S = 60.0


class Trust(enum.Enum):
    """Whether a replica receives requests, as far as its errors decide it."""

    TRUSTED = enum.auto()
    """It receives requests."""
    SUSPECT = enum.auto()
    """It receives requests only when no other replica can."""
    PROBED = enum.auto()
    """It receives one request, the probe."""


class ErrorHistory:
    """The errors of one replica in a row. Pure: the caller starts the probe after the delay that it is told.

    A replica that fails at once always has the fewest tokens in flight. Without this history every request would go to
    it first.
    """

    def __init__(self) -> None:
        self.trust = Trust.TRUSTED
        self.has_probe = False
        """Whether the probe is running."""
        self.period = 0
        """Number of changes to SUSPECT and to PROBED. The outcome of a request that began in an earlier period does not
        count: 256 requests that fail together are one reason for suspicion."""
        self._errors_in_a_row = 0
        self._failed_probes = 0

    def start_request(self) -> int:
        """A request starts on the replica; returns the period, for the outcome of the request."""
        self.has_probe = self.has_probe or self.trust is Trust.PROBED
        return self.period

    def record_error(self, period: int) -> float | None:
        """A request of `period` has failed. Returns seconds until `begin_probe` when the replica becomes suspect."""
        if period != self.period or self.trust is Trust.SUSPECT:
            return None
        self._errors_in_a_row += 1
        if self._errors_in_a_row <= MAX_ERRORS_IN_A_ROW:
            return None
        delay_s: float = min(FIRST_PROBE_DELAY_S * 2.0**self._failed_probes, MAX_PROBE_DELAY_S)
        self._failed_probes += 1
        self._change(Trust.SUSPECT)
        return delay_s

    def begin_probe(self, period: int) -> None:
        """The delay of a replica that became suspect in `period` is over: the next request is the probe."""
        if period == self.period and self.trust is Trust.SUSPECT:
            self._change(Trust.PROBED)

    def record_progress(self, period: int) -> None:
        """A request of `period` has returned a token. The first token of the probe makes the replica trusted.

        The errors are still counted: until a request has finished, the next error makes the replica suspect again.
        """
        if period == self.period and self.trust is Trust.PROBED:
            self.trust, self.has_probe = Trust.TRUSTED, False

    def record_finish(self, period: int) -> None:
        """A request of `period` has finished."""
        if period == self.period:
            self.trust, self.has_probe = Trust.TRUSTED, False
            self._errors_in_a_row = self._failed_probes = 0

    def end_request(self, period: int) -> None:
        """A request of `period` has ended, also without an outcome. A probe without an outcome is repeated."""
        if period == self.period and self.trust is Trust.PROBED:
            self.has_probe = False

    def _change(self, trust: Trust) -> None:
        self.trust, self.has_probe = trust, False
        self.period += 1


# -- Routed replica ---------------------------------------------------------------------------------

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


# -- Running limit ----------------------------------------------------------------------------------
# `RunningLimit`: how many requests of a router run, and whether another one may start.

OPEN_FILES_RETRY_S = 10.0
"""Seconds after which a limit of running requests is raised that a lack of open files has set."""


class RunningLimit:
    """The number of running requests on all replicas together, with a limit while open files lack or requests wait."""

    def __init__(self, has_waiting: Callable[[], bool], serve: Callable[[], None]) -> None:
        """`has_waiting`: whether requests wait. `serve`: places them; it is called after the limit has risen."""
        self._has_waiting, self._serve = has_waiting, serve
        self._maximum: int | None = None
        """Maximum number of running requests. None: no limit."""
        self.running = 0
        """Number of running requests."""
        self.is_held = False
        """Whether no further request may start."""

    @property
    def is_limited(self) -> bool:
        """Whether the end of any request may let another one start."""
        return self._maximum is not None

    @property
    def is_reached(self) -> bool:
        """Whether a further request has to wait."""
        return self.is_held or (self._maximum is not None and self.running >= self._maximum)

    def lower(self, maximum: int) -> None:
        """Run at most `maximum` requests, because this process cannot open more connections.

        Every `OPEN_FILES_RETRY_S` seconds the limit is raised by an eighth, because files may have been closed
        meanwhile, and it is lifted when no request waits.
        """
        if self._maximum is not None and maximum >= self._maximum:
            return
        if self._maximum is None:
            asyncio.get_running_loop().call_later(OPEN_FILES_RETRY_S, self._raise)
        self._maximum = maximum
        logger.warning(
            "this process cannot open more files, so it runs at most %d requests at the same time; raise the limit of "
            "open files (ulimit -n) before it starts",
            maximum,
        )

    def _raise(self) -> None:
        """Run a few requests more, to see whether files were closed. No limit when no request waits."""
        if not self._has_waiting() or self._maximum is None:
            self._maximum = None
            return
        self._maximum += max(1, self._maximum // 8)
        asyncio.get_running_loop().call_later(OPEN_FILES_RETRY_S, self._raise)
        self._serve()
