"""Keeps a fleet's replicas alive: sees who is dead or wedged, starts it again, brings it to the current weights."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import RecoveryConfig
from verl_server.errors import DeadlineError, ServerDiedError, ShutDownError, StartupError, VerlServerError
from verl_server.rollout.fleet import SERVING, UP, Fleet
from verl_server.rollout.health import ReplicaState, judged, restart_after
from verl_server.rollout.replica import OneReplica, Replica, StartPreempted
from verl_server.router.targets import RoutingTargets

logger = logging.getLogger(__name__)

WATCH_S = 0.25

Prepare = Callable[[HttpServerEngineAdapter, Callable[[], None]], None]


class RecoveryLoop:
    """Works in threads of its own from `start` to `join`, which comes when the fleet is closed."""

    def __init__(self, fleet: Fleet, targets: RoutingTargets, recovery: RecoveryConfig, prepare: Prepare) -> None:
        """`prepare(server, begin)` gives a new server what the others have been given, then calls `begin`."""
        self._fleet, self._targets, self._recovery, self._prepare = fleet, targets, recovery, prepare
        self._replaying = threading.Lock()
        """One replica catches up at a time."""
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._run(self._watch, "verl-server-fleet-watch")

    def join(self) -> None:
        for thread in self._threads:
            thread.join()  # every start asks whether it is to be given up

    def _run(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()

    def serve(self, replica: Replica, adapter: HttpServerEngineAdapter) -> None:
        """A server of the replica is ready: use it, and see to it from now on."""
        self._prepare(adapter, lambda: self._fleet.begin(replica, adapter))
        process = adapter.asynchronous.process
        assert process is not None
        process.on_exit(lambda _: self._on_exit(replica, adapter))

    def _on_exit(self, replica: Replica, adapter: HttpServerEngineAdapter) -> None:
        if replica.adapter is adapter and not self._fleet.closed.is_set():
            self.dead(replica, adapter, replica.died("has lost its server"))

    def dead(self, replica: Replica, adapter: HttpServerEngineAdapter | None, error: VerlServerError) -> None:
        """Reap a replica's server and start it again."""
        with self._fleet.lock:
            if not self._fleet.has(replica) or replica.adapter is not adapter:
                return
            if replica.state in (ReplicaState.DEAD, ReplicaState.RESTARTING):
                return
            self._fleet.tally.deaths += 1
            replica.deaths.append(time.monotonic())
            self._fleet.turn(replica, ReplicaState.DEAD, error)
            self._run(lambda: self._restart(replica), f"verl-server-{replica.name}")

    def _restart(self, replica: Replica) -> None:
        """Until it serves again, is given up, or the fleet ends. In a thread of its own."""
        error, fleet = replica.error, self._fleet
        while not fleet.closed.is_set():
            replica.end()
            wait_s = restart_after(replica.deaths, time.monotonic(), self._recovery)
            with fleet.lock:
                if not fleet.has(replica):
                    return
                if wait_s is None:
                    fleet.tally.given_up += 1
                    fleet.turn(replica, ReplicaState.FAILED, _given_up(replica, error))
                    return
                fleet.turn(replica, ReplicaState.RESTARTING, error)
            if fleet.closed.wait(wait_s):
                return
            replica.give_way(False)
            while fleet.asleep:  # its memory is the trainer's now
                if fleet.closed.wait(WATCH_S):
                    return
            try:
                replica.start(self.serve)
            except ShutDownError:
                return
            except StartPreempted:
                continue
            except Exception as failure:  # noqa: BLE001 - whatever it is, it counts as a death
                own = isinstance(failure, VerlServerError)
                error = failure if own else StartupError(f"{type(failure).__name__}: {failure}")  # type: ignore[assignment]
                replica.deaths.append(time.monotonic())
                continue
            fleet.tally.restarts += 1
            self.bring_up_to_date(replica)
            return

    def bring_up_to_date(self, replica: Replica) -> None:
        """Load what is published into a replica that has just started; else the next update takes it along."""
        fleet = self._fleet
        with self._replaying:
            with fleet.lock:
                replay, version, adapter = fleet.replay, fleet.version, replica.adapter
            if replay is None or adapter is None or replica.needs_update:
                return

            def may() -> bool:
                """Asked when no update can be under way."""
                stale = replica.state is ReplicaState.STALE and replica.adapter is adapter
                return stale and fleet.replay is replay and not fleet.asleep

            try:
                if not may():
                    return
                replay(OneReplica(replica.member, adapter, may))
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not be tried again and again
                logger.info("replica %s waits for the next update: %s", replica.name, error)
                if isinstance(error, DeadlineError):
                    self.dead(replica, adapter, error)
                with fleet.lock:
                    if replica.state is ReplicaState.STALE and fleet.replay is replay:
                        replica.needs_update = True
                        fleet.tell(replica)
                return
            with fleet.lock:
                if may():
                    replica.version = version
                    fleet.turn(replica, ReplicaState.HEALTHY)

    def _watch(self) -> None:
        """Look at every replica again and again."""
        while not self._fleet.closed.wait(WATCH_S):
            for replica in self._fleet.replicas:
                try:
                    self._look_at(replica)
                except Exception:  # a replica that cannot be looked at must not end the watch of the others
                    logger.exception("watching replica %s", replica.name)

    def _look_at(self, replica: Replica) -> None:
        fleet, adapter = self._fleet, replica.adapter
        if adapter is None or replica.state not in UP:
            return
        if replica.state is ReplicaState.STALE:
            if fleet.replay is not None and not self._replaying.locked():
                fleet.pool.submit(self.bring_up_to_date, replica)
            return
        seen = self._targets.seen(replica.name)
        state = judged(replica.observe(seen.requests, seen.progress_at), self._recovery)
        if state in SERVING and not seen.admitted and fleet.is_open:
            with fleet.lock:
                if replica.state in SERVING:
                    fleet.tell(replica)  # which lost a connection to it
        if state is ReplicaState.DEAD:
            self.dead(replica, adapter, replica.died("made no progress: it is wedged"))
        elif state is not replica.state:
            with fleet.lock:
                if replica.state in SERVING:
                    fleet.turn(replica, state)


def _given_up(replica: Replica, error: VerlServerError | None) -> ServerDiedError:
    words = "" if error is None else f" The last time: {error.message}"
    return ServerDiedError(
        f"replica {replica.name} was given up: it died {len(replica.deaths)} times.{words}",
        log_tail=None if error is None else error.details.get("log_tail"),
    )
