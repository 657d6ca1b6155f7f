"""A weight update's calls, on all replicas of a fleet at once. Who dies meanwhile is left behind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import AdapterConfig, PauseMode
from verl_server.engine.backend import load_over
from verl_server.errors import DeadlineError, ServerDiedError, ShutDownError, VerlServerError
from verl_server.rollout.fleet import SERVING, UP, Fleet
from verl_server.rollout.health import ReplicaState
from verl_server.rollout.recovery import RecoveryLoop
from verl_server.rollout.replica import Replica
from verl_server.router.targets import RoutingTargets
from verl_server.types import Member
from verl_server.weights.update.servers import ReplayFn

Json = dict[str, Any]

IDLE_POLL_S = 0.02


class FleetUpdates:
    """The part of a `Backend` that an update needs (engine/backend.py)."""

    def __init__(self, fleet: Fleet, keeper: RecoveryLoop, targets: RoutingTargets, config: AdapterConfig) -> None:
        self._fleet, self._recovery_loop, self._targets, self._config = fleet, keeper, targets, config
        self._members: list[tuple[Replica, HttpServerEngineAdapter]] = []
        """Of the update under way, with the servers that they had when it began."""
        self._mode = PauseMode.RETRACT

    @property
    def members(self) -> Sequence[Member]:
        """The replicas that the next attempt at an update goes to."""
        self._members = self._up()
        return [one.member for one, _ in self._members]

    def _each(self, call: Callable[[HttpServerEngineAdapter], Any]) -> None:
        """On all members of the update."""
        self._on(self._members, call)

    def _on(
        self,
        servers: Sequence[tuple[Replica, HttpServerEngineAdapter]],
        call: Callable[[HttpServerEngineAdapter], Any],
        fatal: type[VerlServerError] = DeadlineError,
    ) -> None:
        """On all of them at once; a failure is raised when all are done. Who has died needs no call.

        After a failure that is `fatal` (by default: it answers nobody) a replica is started anew instead.
        """
        calls = [(one, adapter, self._fleet.pool.submit(call, adapter)) for one, adapter in servers]
        errors = [(one, adapter, error) for one, adapter, done in calls if (error := done.exception()) is not None]
        for one, adapter, error in errors:
            if isinstance(error, fatal):
                self._recovery_loop.dead(one, adapter, error)
            elif not isinstance(error, (ServerDiedError, ShutDownError)):
                raise error

    def _every(self, call: Callable[[HttpServerEngineAdapter], Any]) -> None:
        """On all that are up now, outside of an update."""
        self._on(self._up(), call)

    def _up(self) -> list[tuple[Replica, HttpServerEngineAdapter]]:
        """Raises ServerDiedError when there is none; then nobody is kept waiting for the update, either."""
        found = self._fleet.up()
        if not found:
            self._fleet.hold(False)
            raise ServerDiedError("no replica of the fleet is up")
        return found

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started, seconds = time.monotonic(), self._fleet.tally.phase_s
        try:
            yield
        finally:
            seconds[name] = seconds.get(name, 0.0) + time.monotonic() - started

    def pause(self, mode: PauseMode) -> None:
        self._mode = PauseMode.RETRACT if mode is PauseMode.WAIT else mode
        with self._phase("pause"):
            if mode is PauseMode.WAIT:
                try:
                    self._wait_until_idle()
                except BaseException:
                    self._fleet.hold(False)
                    raise
            self._each(lambda adapter: adapter.asynchronous.asleep or adapter.pause_generation(self._mode))

    def _wait_until_idle(self) -> None:
        """Keep new requests out and let those that run end. Raises DeadlineError; then nothing has happened."""
        limit_s = self._config.timeouts.weights_s
        deadline = time.monotonic() + limit_s
        self._fleet.hold(True)
        self._targets.settle()
        while any(self._targets.seen(one.name).requests for one in self._fleet.replicas):
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"requests still run after {limit_s:g} s (timeouts.weights_s); the weights stay as they are",
                    operation="wait",
                    seconds=limit_s,
                )
            time.sleep(IDLE_POLL_S)

    def resume(self) -> None:
        with self._phase("continue"):
            try:
                self._each(lambda adapter: adapter.asynchronous.asleep or adapter.continue_generation())
            finally:
                self._fleet.hold(False)

    def begin_weight_update(self) -> None:
        def begin(adapter: HttpServerEngineAdapter) -> None:
            if not adapter.asynchronous.asleep and not adapter.asynchronous.paused:  # it joins a second attempt
                adapter.pause_generation(self._mode)
            adapter.begin_weight_update()

        with self._phase("begin"):
            self._each(begin)

    def load(self, wires: Sequence[Json], weight_version: str, flush_cache: bool) -> None:
        """Raises as soon as one server fails: a transport may have to tell the others. Who died is left out next."""
        loads: dict[Future[None], tuple[Replica, HttpServerEngineAdapter]] = {}
        self._fleet.loading = True
        with self._phase("load"):
            for (one, adapter), wire in zip(self._members, wires, strict=True):
                load = self._fleet.pool.submit(
                    load_over, adapter, one.member.tp_size, wire, weight_version, flush_cache
                )
                loads[load] = one, adapter
            for load in as_completed(loads):
                error = load.exception()
                if isinstance(error, DeadlineError):
                    self._recovery_loop.dead(*loads[load], error)
                if isinstance(error, (ServerDiedError, ShutDownError)):
                    raise VerlServerError(error.message, **error.details)  # not the death of the fleet
                if error is not None:
                    raise error

    def end_weight_update(self) -> None:
        with self._phase("end"):
            self._each(lambda adapter: adapter.end_weight_update())

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        """See `Backend`. Who served other weights before serves these only if they are whole."""
        fleet = self._fleet
        with fleet.lock:
            fleet.version, fleet.replay = version, replay
            fleet.tally.updates += 1
            loaded = {adapter for _, adapter in self._members}
            for replica in fleet.replicas:
                replica.needs_update = False
                if replica.adapter in loaded and replica.state in (UP if whole else SERVING):
                    replica.version = version
                    if replica.state is ReplicaState.HEALTHY:
                        fleet.tell(replica)
                    else:
                        fleet.turn(replica, ReplicaState.HEALTHY)
                elif replica.state in SERVING:
                    fleet.turn(replica, ReplicaState.STALE)
            fleet.defined(whole)
