"""Who receives the replica statuses of a fleet: the router in this process, a router process, an `sglang-router`.

The fleet knows only the protocol `RoutingTarget`. Observations of a replica's requests come back through
`replica_stats`; the fleet uses them to detect stalled replicas. The target for a router process is in `process/`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import requests

from verl_server.adapter.blocking import EventLoopThread
from verl_server.adapter.router_registration import RouterWorkers
from verl_server.config import AdapterConfig
from verl_server.errors import ServerError, ShutDownError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.replica_status import ReplicaStats, ReplicaStatus, merge_stats

if TYPE_CHECKING:
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter

logger = logging.getLogger(__name__)

ATTEMPT_INTERVAL_S = 0.5
"""Seconds between two attempts while an `sglang-router` has other workers than the admitted replicas."""
CHECK_INTERVAL_S = 10.0
"""Seconds between two looks at the workers of an `sglang-router` while nothing changes."""


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

    One thread brings the router's list of workers to the replicas that are admitted at that time, with short attempts:
    it never waits for one replica. It also reads the list when nothing has changed, because the router may have been
    started again.

    The router supports neither request ids nor weight versions: when it loses a replica, the caller must send the
    request again. Start it with `--disable-retries` (otherwise it generates a request twice) and
    `--disable-health-check` (otherwise it removes a paused replica).
    """

    def __init__(self, config: AdapterConfig) -> None:
        workers = RouterWorkers.from_config(config)
        assert workers is not None, "router_ip and router_port are required"
        self._workers = workers
        self._accept_s = config.timeouts.control_s
        self._condition = threading.Condition()
        """Protects the three attributes that follow."""
        self._admitted: dict[str, AsyncHttpServerEngineAdapter] = {}
        """Adapters of the admitted replicas, by name of the replica."""
        self._has_changed = self._is_closed = False
        self._warning = ""
        """The last logged warning. Empty: the last attempt was successful."""
        self._thread = threading.Thread(target=self._update_workers, name="verl-server-sglang-router", daemon=True)
        self._thread.start()

    def update_statuses(self, statuses: Sequence[ReplicaStatus]) -> None:
        with self._condition:
            for status in statuses:
                if status.admitted and not status.removed and status.adapter is not None:
                    self._admitted[status.name] = status.adapter
                else:
                    self._admitted.pop(status.name, None)
            self._has_changed = True
            self._condition.notify_all()

    def replica_stats(self, name: str) -> ReplicaStats | None:
        """None: an `sglang-router` does not report the requests of its workers."""
        return None

    def wait_until_applied(self) -> None:
        """Does nothing: an `sglang-router` does not report when it has applied a change."""

    def _update_workers(self) -> None:
        pause_s = 0.0
        while (wanted := self._wait_for_change(pause_s)) is not None:
            pause_s = ATTEMPT_INTERVAL_S
            try:
                if self._workers.bring_to(wanted):
                    pause_s = CHECK_INTERVAL_S
                self._warn(self._explain_missing())
            except requests.RequestException as error:
                self._warn(f"the router {self._workers.router_url} cannot be reached ({type(error).__name__})")
            except ServerError as error:
                self._warn(error.message)
        self._workers.remove_all()

    def _wait_for_change(self, timeout_s: float) -> dict[str, str | None] | None:
        """Wait for a change, for `timeout_s` at most. The workers that the router should have; None after `close`."""
        with self._condition:
            self._condition.wait_for(lambda: self._has_changed or self._is_closed, timeout_s)
            self._has_changed = False
            return None if self._is_closed else {each.base_url: each.api_key for each in self._admitted.values()}

    def _explain_missing(self) -> str:
        missing = self._workers.missing_for(self._accept_s)
        if not missing:
            return ""
        return (
            f"the router {self._workers.router_url} has not accepted {len(missing)} replicas within "
            f"{self._accept_s:g} s, for example {missing[0]}: the router must be able to reach this address"
        )

    def _warn(self, warning: str) -> None:
        """Log a warning, once while it does not change."""
        if warning and warning != self._warning:
            logger.warning("%s", warning)
        self._warning = warning

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join()
