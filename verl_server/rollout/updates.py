"""Weight updates of a fleet: each step runs on all replicas at the same time. A replica that dies is left out."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, as_completed, wait

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import PauseMode
from verl_server.engine.servers import load_weights
from verl_server.errors import DeadlineError, ServerDiedError, ShutDownError, VerlServerError
from verl_server.rollout.calls import FleetCalls
from verl_server.rollout.fleet import RUNNING, SERVING, Fleet, Server
from verl_server.rollout.health import KEEPS_NO_WEIGHTS, ReplicaState
from verl_server.rollout.recovery import RecoveryLoop
from verl_server.rollout.replica import Replica
from verl_server.router.targets import RoutingTargets
from verl_server.types import Json, ServerInfo
from verl_server.weights.update.servers import ReplayFn

logger = logging.getLogger(__name__)

STARTING_AGAIN = (ReplicaState.DEAD, ReplicaState.RESTARTING)
"""States of a replica whose server is started again, now or when memory is resumed."""
IDLE_POLL_INTERVAL_S = 0.02
OTHERS_FAIL_S = 1.0
"""Seconds within which the other servers fail, too, if a failure is the fault of the update."""


class FleetUpdates:
    """The replicas of a fleet as the servers of weight updates (`UpdatableServers`)."""

    can_leave_out = True

    def __init__(
        self,
        fleet: Fleet,
        recovery: RecoveryLoop,
        calls: FleetCalls,
        targets: RoutingTargets,
        weights_timeout_s: float,
    ) -> None:
        """`weights_timeout_s`: seconds that a pause with mode `wait` waits for running requests."""
        self._fleet, self._recovery, self._calls, self._targets = fleet, recovery, calls, targets
        self._weights_timeout_s = weights_timeout_s
        self._servers: dict[str, Server] = {}
        """Servers of the update in progress by their names as members, as they were when the attempt began."""
        self._mode = PauseMode.RETRACT
        self._is_paused = False
        """Whether `pause` was called and `resume` was not."""

    @property
    def members(self) -> Sequence[ServerInfo]:
        """See `UpdatableServers.members`. Empty while all servers are started again: they get the weights by replay."""
        with self._fleet.lock:
            members = [(replica.member, (replica, adapter)) for replica, adapter in self.running_servers()]
        self._servers = {member.name: server for member, server in members}
        return [member for member, _ in members]

    def running_servers(self) -> list[Server]:
        """The replicas with a running server. Empty only while servers are started again; else raises ServerDiedError.

        Without a server, new requests do not wait for an update: they wait for a server.
        """
        with self._fleet.lock:  # a server that starts meanwhile has left the states STARTING_AGAIN
            servers = self._fleet.servers()
            if not servers:
                self._fleet.set_admission_paused(False)
                if not any(replica.state in STARTING_AGAIN for replica in self._fleet.replicas):
                    raise ServerDiedError("no replica of the fleet has a running server")
            return servers

    def _call_members(self, call: Callable[[HttpServerEngineAdapter], object]) -> None:
        self._calls.call_all(list(self._servers.values()), call)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of the body to the fleet's counters."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._fleet.add_phase_seconds(phase, time.monotonic() - started)

    def pause(self, mode: PauseMode) -> None:
        self._mode = PauseMode.RETRACT if mode is PauseMode.WAIT else mode
        with self._timed("pause"):
            if mode is PauseMode.WAIT:
                try:
                    self._wait_until_idle()
                except BaseException:
                    self._fleet.set_admission_paused(False)
                    raise
            self._is_paused = True
            self._call_members(lambda adapter: adapter.released_memory or adapter.pause_generation(self._mode))

    def _wait_until_idle(self) -> None:
        """Hold new requests in the routers until no request runs. Raises DeadlineError; nothing was changed then."""
        timeout_s = self._weights_timeout_s
        deadline = time.monotonic() + timeout_s
        self._fleet.set_admission_paused(True)
        self._targets.wait_until_applied()
        while any(self._targets.replica_stats(replica.name).running_requests for replica in self._fleet.replicas):
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"requests still run after {timeout_s:g} s (timeouts.weights_s); the weights were not changed",
                    operation="wait",
                    seconds=timeout_s,
                )
            time.sleep(IDLE_POLL_INTERVAL_S)

    def resume(self) -> None:
        with self._timed("continue"):
            try:
                self._call_members(lambda adapter: adapter.end_update_pause())
                self._is_paused = False
            finally:
                self._fleet.set_admission_paused(False)

    def begin_weight_update(self) -> None:
        def begin(adapter: HttpServerEngineAdapter) -> None:
            if not adapter.released_memory and not adapter.paused:  # a server that takes part since the second attempt
                adapter.pause_generation(self._mode)
            adapter.begin_weight_update()

        with self._timed("begin"):
            self._call_members(begin)

    def load(self, messages: Sequence[Json], weight_version: int | None, flush_cache: bool) -> None:
        """See `UpdatableServers.load`.

        Raises at most `OTHERS_FAIL_S` seconds after the first server has failed, because a transport may have to stop
        the others. A replica whose server has died, is being ended or does not answer is left out of the next attempt.
        """
        loads: dict[Future[None], str] = {}
        if ended := [name for name, server in self._servers.items() if not self._fleet.is_used(server)]:
            raise VerlServerError(f"the servers {ended} are started again")  # the next attempt is without them
        if weight_version is not None:
            self._fleet.begin_load()
        with self._timed("load"):
            for (name, (replica, adapter)), message in zip(self._servers.items(), messages, strict=True):
                tp_size = replica.member.tp_size
                load = self._fleet.executor.submit(load_weights, adapter, tp_size, message, weight_version, flush_cache)
                loads[load] = name
            for load in as_completed(loads):
                error = load.exception()
                if isinstance(error, (DeadlineError, ServerDiedError)):
                    self._recovery.recover(*self._servers[loads[load]], error)
                if isinstance(error, (ServerDiedError, ShutDownError)):
                    # Only one replica has died. ServerDiedError would mean that no server is left.
                    raise VerlServerError(error.message, **error.details)
                if isinstance(error, VerlServerError):
                    wait(loads, timeout=OTHERS_FAIL_S)
                    error.details["servers"] = [
                        name for other, name in loads.items() if other.done() and _is_refusal(other.exception())
                    ]
                if error is not None:
                    raise error

    def leave_out(self, failed: Collection[str], error: VerlServerError) -> bool:
        return self._calls.leave_out_failed(self._servers, failed, error)

    def end_weight_update(self) -> None:
        with self._timed("end"):
            self._call_members(lambda adapter: adapter.end_weight_update())

    def published(self, version: int, whole: bool, replay: ReplayFn | None) -> None:
        """See `UpdatableServers.published`. Stale replicas become current only with `whole`, or later by `replay`.

        Raises ServerDiedError if no server has the new weights and the trainer does not keep them.
        """
        fleet = self._fleet
        with fleet.lock:
            if replay is None and not any(
                replica.state in (RUNNING if whole else SERVING) for replica in self._loaded()
            ):
                raise ServerDiedError(
                    "no server of the fleet has all weights, and the trainer does not keep the weights for later: "
                    "push all weights"
                )
            fleet.weight_version, fleet.replay = version, replay
            fleet.counters.updates += 1
            loaded = self._loaded()
            states: dict[Replica, ReplicaState] = {}
            for replica in fleet.replicas:
                replica.forget_failed_replays()
                if replica in loaded:
                    replica.failed_updates = 0
                if replica in loaded and replica.state in (RUNNING if whole else SERVING):
                    replica.weight_version = version
                    states[replica] = ReplicaState.HEALTHY
                elif replica.state in SERVING:
                    states[replica] = ReplicaState.STALE
                if replica.state is ReplicaState.STALE and replica not in states and replay is None:
                    logger.warning(
                        "replica %s stays without requests after the update: it has its checkpoint, and %s",
                        replica.name,
                        KEEPS_NO_WEIGHTS,
                    )
            fleet.change_states(states)
            fleet.finish_update(whole)

    def _loaded(self) -> list[Replica]:
        """The replicas whose servers have taken part in the update and are still in use."""
        return [replica for replica, adapter in self._servers.values() if replica.adapter is adapter]

    def detach(self) -> None:
        """End the trainer's use of the fleet.

        Generation continues. When the weights are torn, it waits for a whole update.
        """
        is_torn = self._fleet.abandon_update()
        self._recovery.wait_for_replay()
        if self._is_paused and not is_torn:
            self._calls.call_all(  # a server that does not continue is started again
                self._fleet.servers(),
                lambda adapter: not adapter.paused or adapter.end_update_pause(),
                restart_on=VerlServerError,
            )
            self._is_paused = False


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a server has answered with an error. A server that has died did not."""
    return isinstance(error, VerlServerError) and not isinstance(error, (ServerDiedError, ShutDownError))
