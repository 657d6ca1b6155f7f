"""`RecoveryLoop`: detects replicas that are dead or stalled, starts their servers again, loads the current weights."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import PauseMode, RecoveryConfig
from verl_server.engine.servers import HttpServers
from verl_server.errors import (
    DeadlineError,
    NotReadyError,
    ServerDiedError,
    ShutDownError,
    StartupError,
    VerlServerError,
)
from verl_server.rollout.fleet import (
    ENDING,
    RUNNING,
    SERVING,
    Fleet,
    Replica,
    ReplicaState,
    StartPreempted,
    classify_health,
    look_interval_s,
    restart_delay_s,
)
from verl_server.router.targets import RoutingTargets
from verl_server.types import ServerInfo

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.25
MAX_FAILED_REPLAYS = 3
"""Number of attempts at loading the published weights into one server, after which it waits for the next update."""
REPLAY_DELAY_S = 5.0
"""Seconds between these attempts, for example while the trainer stages the next update."""

PrepareServer = Callable[[HttpServerEngineAdapter, Callable[[], None]], None]
"""`prepare(adapter, begin)`: give a new server what the other servers have, then call `begin`."""


class RecoveryLoop:
    """Watches the replicas of a fleet and recovers them, in its own threads, from `start` to `join`.

    `join` must be called after the fleet was closed.
    """

    def __init__(
        self, fleet: Fleet, targets: RoutingTargets, config: RecoveryConfig, prepare_server: PrepareServer
    ) -> None:
        self._fleet, self._targets, self._config, self._prepare_server = fleet, targets, config, prepare_server
        self.replay_lock = threading.Lock()
        """Held while published weights are loaded into a new server, one server at a time. Also held while memory is
        released: both pause the server, and none of them would continue it."""
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._run_in_thread(self._watch, "verl-server-fleet-watch")

    def join(self) -> None:
        for thread in self._threads:
            thread.join()  # a start that is in progress sees that the fleet is closed, and ends

    def _run_in_thread(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads = [*(running for running in self._threads if running.is_alive()), thread]
        thread.start()

    def add_server(self, replica: Replica, adapter: HttpServerEngineAdapter) -> None:
        """Take a new server of the replica into use, and watch for its end from now on."""
        self._prepare_server(adapter, lambda: self._fleet.add_server(replica, adapter))
        process = adapter.process
        assert process is not None
        process.on_exit(lambda _: self._on_exit(replica, adapter))

    def _on_exit(self, replica: Replica, adapter: HttpServerEngineAdapter) -> None:
        if replica.adapter is adapter and not self._fleet.closed.is_set():
            self.recover(replica, adapter, replica.death_error("has lost its server"))

    def recover(self, replica: Replica, adapter: HttpServerEngineAdapter | None, error: VerlServerError) -> None:
        """End the server of a replica and start a new one. Does nothing when `adapter` is not its server any more."""
        with self._fleet.lock:
            if not self._fleet.has(replica) or replica.adapter is not adapter:
                return
            if replica.state in ENDING:
                return
            if replica.state is ReplicaState.DRAINING:  # its requests continue elsewhere; no server is started again
                self._run_in_thread(lambda: self._end_draining(replica), f"verl-server-{replica.name}")
                return
            if adapter is not None and adapter.process is not None:
                adapter.process.keep_log()
                lost_at = datetime.now(UTC).isoformat(timespec="seconds")
                log = adapter.log_path or "in the log folder of its node"
                replica.last_loss = f"{lost_at}: {error.message} ({adapter.base_url}, its log: {log})"
                logger.warning("replica %s has lost its server, %s", replica.name, replica.last_loss)
            replica.failed_starts += replica.state is ReplicaState.STALE  # it has never had the published weights
            self._fleet.counters.deaths += 1
            self._fleet.record_death(replica)
            self._fleet.change_state(replica, ReplicaState.DEAD, error)
            self._run_in_thread(lambda: self._restart(replica), f"verl-server-{replica.name}")

    def _end_draining(self, replica: Replica) -> None:
        self._fleet.end_server(replica)
        with self._fleet.lock:
            if self._fleet.has(replica):
                self._fleet.change_state(replica, ReplicaState.DRAINING)  # the routers learn that it has no server

    def restart_failed(self) -> list[str]:
        """Start the servers of all replicas in the state FAILED again, in threads. Returns their names."""
        with self._fleet.lock:
            if self._fleet.closed.is_set():
                raise ShutDownError("the fleet was shut down")
            failed = [replica for replica in self._fleet.replicas if replica.state is ReplicaState.FAILED]
            for replica in failed:
                replica.deaths.clear()
                replica.failed_starts = 0
                self._fleet.change_state(replica, ReplicaState.RESTARTING)
                self._run_in_thread(functools.partial(self._restart, replica), f"verl-server-{replica.name}")
        return [replica.name for replica in failed]

    def _restart(self, replica: Replica) -> None:
        """Start servers until one is ready, the replica has failed too often, or the fleet ends."""
        error, fleet = replica.error, self._fleet
        while not fleet.closed.is_set():
            fleet.end_server(replica)
            delay_s = restart_delay_s(replica.deaths, time.monotonic(), self._config, replica.failed_starts)
            with fleet.lock:
                if not fleet.has(replica):
                    return
                if delay_s is None:
                    fleet.counters.given_up += 1
                    fleet.change_state(replica, ReplicaState.FAILED, _failed_error(replica, error))
                    return
                fleet.change_state(replica, ReplicaState.RESTARTING, error)
            if fleet.closed.wait(delay_s):
                return
            replica.allow_start()
            while fleet.released_memory:  # the trainer uses the memory now
                if fleet.closed.wait(WATCH_INTERVAL_S):
                    return
            try:
                replica.start(self.add_server)
            except ShutDownError:
                return
            except StartPreempted:
                continue
            except VerlServerError as failure:
                error = failure
            except Exception as failure:  # noqa: BLE001 - every failure of a start counts as a death
                error = StartupError(f"{type(failure).__name__}: {failure}")
            else:
                fleet.record_restart(replica)
                self.load_published_weights(replica)
                return
            replica.failed_starts += 1
            fleet.record_death(replica)

    def load_published_weights(self, replica: Replica) -> None:
        """Load the published weights into a replica that has just started.

        When that fails several times, the replica stays STALE and takes part in the next update.
        """
        fleet = self._fleet
        with self.replay_lock:
            with fleet.lock:
                replay, version, adapter = fleet.replay, fleet.weight_version, replica.adapter
            if replay is None or adapter is None or replica.needs_update or time.monotonic() < replica.replay_after:
                return

            def is_needed() -> bool:
                is_stale = replica.state is ReplicaState.STALE and replica.adapter is adapter
                return is_stale and fleet.replay is replay and not fleet.released_memory

            def check_needed() -> None:
                """Called when no update can be in progress."""
                if not is_needed():
                    raise VerlServerError(f"replica {replica.name} does not need the published weights any more")

            try:
                if not is_needed():
                    return
                replay(_NewServer(replica, adapter, check_needed))
            except Exception as error:  # noqa: BLE001 - whatever the error is, the server has no weights
                if isinstance(error, DeadlineError):
                    self.recover(replica, adapter, error)
                with fleet.lock:
                    if is_needed():
                        self._count_failed_replay(replica, error)
                return
            with fleet.lock:
                if is_needed():
                    replica.weight_version = version
                    fleet.change_state(replica, ReplicaState.HEALTHY)

    def _count_failed_replay(self, replica: Replica, error: Exception) -> None:
        """Called under the lock of the fleet."""
        replica.failed_replays += 1
        replica.replay_after = time.monotonic() + REPLAY_DELAY_S
        logger.warning("the published weights could not be loaded into replica %s: %s", replica.name, error)
        if replica.failed_replays >= MAX_FAILED_REPLAYS:
            replica.needs_update = True
            waits = NotReadyError(f"it waits for the next update of all weights; the last error: {error}")
            self._fleet.change_state(replica, ReplicaState.STALE, waits)

    def wait_for_replay(self) -> None:
        """Return when no server is loading published weights. The trainer's staging memory is then unused."""
        with self.replay_lock:
            pass

    def _watch(self) -> None:
        """Observe all replicas until the fleet is closed."""
        while not self._fleet.closed.wait(WATCH_INTERVAL_S):
            for replica in self._fleet.replicas:
                try:
                    self._check_replica(replica)
                except Exception:  # an error with one replica must not end the observation of the others
                    logger.exception("cannot observe replica %s", replica.name)

    def _check_replica(self, replica: Replica) -> None:
        fleet, adapter = self._fleet, replica.adapter
        if adapter is None or replica.state not in RUNNING:
            return
        if replica.state is ReplicaState.STALE:
            if fleet.replay is not None and not self.replay_lock.locked():
                fleet.executor.submit(self.load_published_weights, replica)
            return
        stats = self._targets.replica_stats(replica.name)
        interval_s = look_interval_s(self._config)
        observation = replica.observe(stats.running_requests, stats.last_progress_at, interval_s)
        state = classify_health(observation, self._config)
        if state in SERVING and not stats.admitted and fleet.is_open:
            with fleet.lock:
                if replica.state in SERVING:
                    fleet.notify(replica)  # a router has lost a connection to the replica and does not use it
        if state is ReplicaState.DEAD:
            quiet = f"no token for {observation.no_progress_s:.0f} s, no sign of life for {observation.no_sign_s:.0f} s"
            self.recover(replica, adapter, replica.death_error(f"made no progress: it is stalled ({quiet})"))
        elif state is not replica.state:
            with fleet.lock:
                if replica.state in SERVING:
                    fleet.change_state(replica, state)


class _NewServer(HttpServers):
    """A server that has just started and receives the published weights.

    `check_needed` is called before each attempt to load them. Its error ends the load.
    """

    def __init__(self, replica: Replica, adapter: HttpServerEngineAdapter, check_needed: Callable[[], None]) -> None:
        super().__init__([adapter], [replica.member])
        self._check_needed = check_needed

    @property
    def members(self) -> Sequence[ServerInfo]:
        self._check_needed()
        return super().members

    def pause(self, mode: PauseMode) -> None:
        """Pause with RETRACT. The server has no requests yet, so the pause mode of the update does not matter."""
        super().pause(PauseMode.RETRACT)


def _failed_error(replica: Replica, error: VerlServerError | None) -> ServerDiedError:
    last = "" if error is None else f" The last error: {error.message}"
    return ServerDiedError(
        f"replica {replica.name} is not started again: its servers ended {len(replica.deaths)} times. "
        f"Correct the cause, then call restart_failed() of the fleet.{last}",
        log_tail=None if error is None else error.details.get("log_tail"),
    )
