"""Who carries requests to the replicas, and what they must know of them.

The manager says how it stands with a replica; each plane keeps to that: the router in this process, a router process,
or an `sglang-router`. What a plane sees of a replica's requests comes back, for the judgement of its health.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.adapter.event_loop_thread import EventLoopThread
from verl_server.adapter.router_registration import RouterRegistration
from verl_server.config import AdapterConfig
from verl_server.errors import ShutDownError, VerlServerError
from verl_server.router.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

RETRY_S = 1.0


@dataclass(frozen=True)
class ReplicaStatus:
    """How it stands with a replica."""

    name: str
    engine: AsyncHttpServerEngineAdapter | None
    """Of its server, if it has one."""
    version: int
    """Of its weights."""
    admitted: bool
    """It may be given requests."""
    suspect: bool
    """Others are preferred."""
    expected: bool
    """It will be admitted (again) by itself."""
    gone: bool
    """For good."""


@dataclass(frozen=True)
class ReplicaStats:
    """A replica's requests, as one plane or all of them see them."""

    requests: int
    progress_at: float
    """When one of them last made progress (`time.monotonic`); 0 without requests."""
    admitted: bool
    """False though its standing says otherwise: the connection to it broke."""


class RoutingTarget(Protocol):
    def tell(self, standing: ReplicaStatus) -> None:
        """Never waits for long."""

    def seen(self, name: str) -> ReplicaStats | None:
        """None: it does not know the replica, or does not tell."""

    def settle(self) -> None:
        """Wait a moment until what was told is kept to."""

    def close(self) -> None: ...


class RoutingTargets:
    """All of them."""

    def __init__(self, targets: Sequence[RoutingTarget]) -> None:
        self._targets = list(targets)

    def add(self, plane: RoutingTarget) -> None:
        """Before there is anything to tell."""
        self._targets.append(plane)

    def tell(self, standing: ReplicaStatus) -> None:
        for plane in self._targets:
            plane.tell(standing)

    def seen(self, name: str) -> ReplicaStats:
        return merged([plane.seen(name) for plane in self._targets])

    def settle(self) -> None:
        """Until all keep to what they were told; `seen` is true from then on."""
        for plane in self._targets:
            plane.settle()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for plane in self._targets:
                stack.callback(plane.close)


def merged(views: Sequence[ReplicaStats | None]) -> ReplicaStats:
    """What all planes together see of a replica: progress anywhere is its progress. Pure."""
    known = [seen for seen in views if seen is not None]
    working = [seen for seen in known if seen.requests]
    return ReplicaStats(
        requests=sum(seen.requests for seen in working),
        progress_at=max((seen.progress_at for seen in working), default=0.0),
        admitted=all(seen.admitted for seen in known),
    )


class InProcessRouter:
    """The router in this process."""

    def __init__(self, core: Dispatcher, loop: EventLoopThread) -> None:
        self._core, self._loop = core, loop

    def tell(self, standing: ReplicaStatus) -> None:
        async def tell() -> None:
            apply(self._core, standing)

        with contextlib.suppress(ShutDownError):
            self._loop.run(tell())

    def seen(self, name: str) -> ReplicaStats | None:
        known = self._core.replicas.get(name)
        if known is None:
            return None
        return ReplicaStats(len(known.tokens), known.progress_at if known.tokens else 0.0, known.load.admitted)

    def settle(self) -> None:
        """`tell` has waited already."""

    def close(self) -> None:
        with contextlib.suppress(ShutDownError):
            self._loop.run(self._core.close())


def apply(core: Dispatcher, standing: ReplicaStatus) -> None:
    """In the core's loop."""
    known = core.replicas.get(standing.name)
    if standing.gone:
        core.drop(standing.name)
    elif known is None or (standing.engine is not None and known.engine is not standing.engine):
        if standing.engine is not None:
            core.put(standing.name, standing.engine, standing.version, admitted=standing.admitted)
        else:
            core.announce(standing.name, coming=standing.expected)
    else:
        core.update(
            standing.name,
            version=standing.version,
            admitted=standing.admitted,
            suspect=standing.suspect,
            expected=standing.expected,
        )


class StatusQueue:
    """The latest standing of each replica that has not been taken yet. News are numbered."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: dict[str, ReplicaStatus] = {}
        self._all: dict[str, ReplicaStatus] = {}
        self._closed = False
        self.number = 0
        """Of the last news."""

    def put(self, standing: ReplicaStatus) -> None:
        with self._condition:
            self.number += 1
            self._waiting[standing.name] = self._all[standing.name] = standing
            if standing.gone:
                del self._all[standing.name]
            self._condition.notify_all()

    def again(self) -> None:
        """All that stands, for a reader who knows nothing."""
        with self._condition:
            self.number += 1
            self._waiting = {**self._waiting, **self._all}
            self._condition.notify_all()

    def latest(self, name: str) -> ReplicaStatus | None:
        return self._all.get(name)

    def take(self, limit_s: float | None = None) -> tuple[int, list[ReplicaStatus]] | None:
        """Wait for news; the number of the last of them, and all; none after `limit_s` seconds. None when closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self._closed, limit_s)
            if self._closed:
                return None
            taken, self._waiting = list(self._waiting.values()), {}
            return self.number, taken

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()


class SglangRouterTarget:
    """An `sglang-router` that runs already: it gets the replicas that are admitted, and only these.

    It knows neither ids nor versions: a sample that loses its replica there is the caller's to ask again. Start it
    with `--disable-retries` (else it samples again) and `--disable-health-check` (else a paused replica is dropped).
    """

    def __init__(self, config: AdapterConfig) -> None:
        self._config = config
        self._status_queue = StatusQueue()
        self._entries: dict[str, RouterRegistration] = {}
        self._thread = threading.Thread(target=self._keep, name="verl-server-sglang-router", daemon=True)
        self._thread.start()

    def tell(self, standing: ReplicaStatus) -> None:
        self._status_queue.put(standing)

    def seen(self, name: str) -> ReplicaStats | None:
        return None

    def settle(self) -> None:
        """It does not tell what it does."""

    def _keep(self) -> None:
        while (news := self._status_queue.take()) is not None:
            for standing in news[1]:
                try:
                    self._set(standing)
                except VerlServerError as error:
                    logger.warning("replica %s cannot be registered: %s", standing.name, error.message)
                    time.sleep(RETRY_S)
                    if self._status_queue.latest(standing.name) is standing:
                        self._status_queue.put(standing)
        for entry in self._entries.values():
            entry.stop()

    def _set(self, standing: ReplicaStatus) -> None:
        engine, entry = standing.engine, self._entries.get(standing.name)
        if entry is not None and not (standing.admitted and engine is not None and entry.worker == engine.base_url):
            self._entries.pop(standing.name).stop()
            entry = None
        if standing.admitted and engine is not None and entry is None:
            self._entries[standing.name] = RouterRegistration.start(self._config, engine.base_url, engine.api_key)

    def close(self) -> None:
        self._status_queue.close()
        self._thread.join()
