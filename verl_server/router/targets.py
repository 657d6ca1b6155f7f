"""Who receives the replica statuses of a fleet: the router in this process, a router process, an `sglang-router`.

The fleet knows only the protocol `RoutingTarget`. Observations of a replica's requests come back through
`replica_stats`; the fleet uses them to detect stalled replicas. The target for a router process is in `process/`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

from verl_server.adapter.event_loop_thread import EventLoopThread
from verl_server.adapter.router_registration import RouterRegistration
from verl_server.config import AdapterConfig
from verl_server.errors import ServerError, ShutDownError, VerlServerError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.replica_status import ReplicaStats, ReplicaStatus, StatusQueue, merge_stats

logger = logging.getLogger(__name__)

REGISTRATION_RETRY_S = 1.0
"""Seconds before a failed registration or removal is repeated."""
MAX_PARALLEL_STATUSES = 64
"""Number of replicas that are registered at the same time: the router checks each of them."""
MAX_REMOVALS = 3
"""Number of times that the removal of a worker is tried at the end of a fleet."""


class RoutingTarget(Protocol):
    """A router that distributes requests according to the statuses that a fleet reports."""

    def update_statuses(self, statuses: Sequence[ReplicaStatus]) -> None:
        """Report new statuses of replicas, which take effect together. Does not block for long."""

    def replica_stats(self, name: str) -> ReplicaStats | None:
        """What this router observes of a replica. None when it does not know the replica or observes nothing."""

    def wait_until_applied(self) -> None:
        """Wait, for a short time at most, until the router acts according to all reported statuses."""

    def close(self) -> None:
        """Stop using the router."""


class RoutingTargets:
    """All routing targets of a fleet. Statuses go to every target; observations of all targets are merged."""

    def __init__(self, targets: Sequence[RoutingTarget]) -> None:
        self._targets = list(targets)

    def add(self, target: RoutingTarget) -> None:
        """Add a target. Must be called before the first `update_statuses`."""
        self._targets.append(target)

    def update_statuses(self, statuses: Sequence[ReplicaStatus]) -> None:
        """Report new statuses of replicas to all targets."""
        for target in self._targets:
            target.update_statuses(statuses)

    def replica_stats(self, name: str) -> ReplicaStats:
        """What all targets together observe of a replica."""
        return merge_stats([target.replica_stats(name) for target in self._targets])

    def wait_until_applied(self) -> None:
        """Wait until all targets have applied the reported statuses; then `replica_stats` reflects them."""
        for target in self._targets:
            target.wait_until_applied()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for target in self._targets:
                stack.callback(target.close)


class InProcessTarget:
    """A `RoutingTarget`: the dispatcher in this process, which runs in the event loop of a thread of its own."""

    def __init__(self, dispatcher: Dispatcher, loop: EventLoopThread) -> None:
        self._dispatcher, self._loop = dispatcher, loop

    def update_statuses(self, statuses: Sequence[ReplicaStatus]) -> None:
        async def apply() -> None:
            self._dispatcher.pool.apply_statuses(statuses)

        with contextlib.suppress(ShutDownError):
            self._loop.run(apply())

    def replica_stats(self, name: str) -> ReplicaStats | None:
        replica = self._dispatcher.pool.replicas.get(name)
        return None if replica is None else replica.stats()

    def wait_until_applied(self) -> None:
        """`update_statuses` has already waited."""

    def close(self) -> None:
        with contextlib.suppress(ShutDownError):
            self._loop.run(self._dispatcher.close())


class SglangRouterTarget:
    """A `RoutingTarget`: a running `sglang-router`. It has exactly the admitted replicas as its workers.

    It supports neither request ids nor weight versions: when it loses a replica, the caller must send the request
    again. Start it with `--disable-retries` (otherwise it generates a request twice) and `--disable-health-check`
    (otherwise it removes a paused replica).
    """

    def __init__(self, config: AdapterConfig) -> None:
        self._config = config
        self._status_queue = StatusQueue()
        self._registrations: dict[str, RouterRegistration] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._apply_statuses, name="verl-server-sglang-router", daemon=True)
        self._thread.start()

    def update_statuses(self, statuses: Sequence[ReplicaStatus]) -> None:
        self._status_queue.put(*statuses)

    def replica_stats(self, name: str) -> ReplicaStats | None:
        """None: an `sglang-router` does not report the requests of its workers."""
        return None

    def wait_until_applied(self) -> None:
        """Does nothing: an `sglang-router` does not report when it has applied a change."""

    def _apply_statuses(self) -> None:
        running: dict[str, Future[None]] = {}
        with ThreadPoolExecutor(MAX_PARALLEL_STATUSES, thread_name_prefix="verl-server-registration") as pool:
            while (taken := self._status_queue.take()) is not None:
                for status in taken[1]:
                    running[status.name] = pool.submit(self._apply_after, running.get(status.name), status)
        with ThreadPoolExecutor(MAX_PARALLEL_STATUSES, thread_name_prefix="verl-server-registration") as pool:
            list(pool.map(_remove, self._registrations.values()))

    def _apply_after(self, previous: Future[None] | None, status: ReplicaStatus) -> None:
        """Apply a status when the previous status of the same replica is applied, and again if that fails."""
        if previous is not None:
            wait([previous])
        try:
            if self._is_latest(status):
                self._apply(status)
        except ShutDownError:
            return  # the replica has a newer status, or the router is closed
        except VerlServerError as error:
            logger.warning("the router has another status of replica %s: %s", status.name, error.message)
            self._closing.wait(REGISTRATION_RETRY_S)
            if self._is_latest(status):
                self._status_queue.put(status)

    def _is_latest(self, status: ReplicaStatus) -> bool:
        latest = self._status_queue.latest(status.name)
        return latest is status or (latest is None and status.removed)

    def _apply(self, status: ReplicaStatus) -> None:
        """Register an admitted replica; remove the registration of a replica that is not admitted or has moved."""
        adapter, registration = status.adapter, self._registrations.get(status.name)
        if not status.admitted:
            adapter = None
        if registration is not None and (adapter is None or registration.worker_url != adapter.base_url):
            if not registration.stop():
                raise ServerError(f"the router did not remove {registration.worker_url}")
            del self._registrations[status.name]
            registration = None
        if adapter is not None:
            if registration is None:  # kept from now on, also after an error: it may have an entry to be removed
                registration = RouterRegistration(self._config, adapter.base_url, adapter.api_key)
                self._registrations[status.name] = registration
            registration.wait_until_accepted(
                self._config.timeouts.control_s, lambda: self._closing.is_set() or not self._is_latest(status)
            )

    def close(self) -> None:
        self._closing.set()
        self._status_queue.close()
        self._thread.join()


def _remove(registration: RouterRegistration) -> None:
    for number in range(1, MAX_REMOVALS + 1):
        if registration.stop() or number == MAX_REMOVALS:
            return
        time.sleep(REGISTRATION_RETRY_S)
