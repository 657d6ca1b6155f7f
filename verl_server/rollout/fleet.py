"""`Fleet`: the replicas of a fleet, their states, and the notification of routers and listeners about changes."""

from __future__ import annotations

import enum
import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.sglang.replies import num_data_parallel_ranks
from verl_server.config import AdapterConfig, EngineKind, MemoryTag, RecoveryConfig
from verl_server.errors import BadInputError, NotReadyError, ServerDiedError, ShutDownError, VerlServerError, to_wire
from verl_server.rollout.launchers.local import Launcher
from verl_server.router.http import metrics_text
from verl_server.router.replica_status import ReplicaStatus
from verl_server.router.targets import RoutingTargets
from verl_server.server.process import SchedulerCpu
from verl_server.types import Json, ServerInfo
from verl_server.weights.update.options import ReplayFn

logger = logging.getLogger(__name__)


# -- Health -----------------------------------------------------------------------------------------
# Decides when a replica is unhealthy and when its server is started again. Pure functions.
#
# The end of a server is reported by its process. A stall is detected by missing progress: the replica has running
# requests, has produced no token for a long time, and there was no sign of life of its schedulers either
# (`fleet.py`). One slow answer is no sign of a stall, because a server does not answer during a long prefill.

MAX_LOOK_INTERVAL_S = 5.0


class ReplicaState(enum.StrEnum):
    """State of a replica. The usual cycle: `HEALTHY -> SUSPECT -> DEAD -> RESTARTING -> STALE -> HEALTHY`."""

    STARTING = "starting"
    """Its first server is starting."""
    HEALTHY = "healthy"
    """It serves the current weights."""
    SUSPECT = "suspect"
    """It made no progress for half of the stall timeout. Other replicas are preferred."""
    DEAD = "dead"
    """Its server has ended or counts as stalled."""
    RESTARTING = "restarting"
    """A new server is starting."""
    STALE = "stale"
    """Its server runs with other weights than the current ones. It receives no requests."""
    DRAINING = "draining"
    """It is being removed and finishes its running requests."""
    FAILED = "failed"
    """Its server has ended too often and is not started again."""
    REMOVED = "removed"
    """It has left the fleet."""


@dataclass(frozen=True)
class Observation:
    """What is observed of a replica at one moment."""

    is_alive: bool
    """Whether all processes of its server run."""
    running_requests: int
    """Number of requests that run on it."""
    no_progress_s: float
    """Seconds since the last new token, or since its requests began. 0 without requests."""
    no_sign_s: float
    """Seconds since the last sign of life of its schedulers, at most `no_progress_s`."""
    is_paused: bool = False
    """Whether generation is paused or memory is released."""


def classify_health(observation: Observation, config: RecoveryConfig) -> ReplicaState:
    """HEALTHY, SUSPECT or DEAD. A stalled replica is DEAD."""
    if not observation.is_alive:
        return ReplicaState.DEAD
    if observation.is_paused or observation.running_requests == 0:
        return ReplicaState.HEALTHY
    stalled_s = min(observation.no_progress_s, observation.no_sign_s)
    if stalled_s >= config.stall_timeout_s or observation.no_progress_s >= config.hard_stall_timeout_s:
        return ReplicaState.DEAD
    if stalled_s >= config.stall_timeout_s / 2 or observation.no_progress_s >= config.hard_stall_timeout_s / 2:
        return ReplicaState.SUSPECT
    return ReplicaState.HEALTHY


def look_interval_s(config: RecoveryConfig) -> float:
    """Seconds between two looks for signs of life of a replica that makes no progress."""
    return min(MAX_LOOK_INTERVAL_S, config.stall_timeout_s / 8)


def restart_delay_s(
    deaths: Sequence[float], now: float, config: RecoveryConfig, failed_starts: int = 0
) -> float | None:
    """Seconds to wait before the next restart. None: no further restart.

    `deaths` are the times at which the replica's servers ended, on the clock of `now`. `failed_starts`: number of
    starts in a row that have failed. They count however long they took.
    """
    recent = [death for death in deaths if now - death < config.restart_window_s]
    if max(len(recent), failed_starts) > config.max_restarts:
        return None
    if len(recent) <= 1:
        return 0.0
    return float(min(config.backoff_s * 2.0 ** (len(recent) - 2), config.max_backoff_s))


KEEPS_NO_WEIGHTS = "it waits for an update of all weights: the trainer does not keep the published ones"


def unavailable_reason(
    state: ReplicaState, released_memory: Collection[str], weights_undefined: bool, waits_for_update: bool
) -> str:
    """Why a replica in this state does not serve until the user acts. Empty when it serves or will serve."""
    if state is ReplicaState.FAILED:
        return "has failed: correct the cause, then call restart_failed() of the fleet"
    if state is ReplicaState.DRAINING:
        return "is being removed"
    if released_memory:
        return f"has released its memory ({', '.join(sorted(released_memory))}): call resume_memory_occupation"
    if weights_undefined:
        return "has no whole weights: send an update of all weights"
    return "has old weights: send an update of all weights" if waits_for_update else ""


# -- Signs of life ----------------------------------------------------------------------------------
# `SignsOfLife`: signs that the schedulers of one server work, although no token arrives.


class SignsOfLife:
    """Looks for signs of life of one server. It never waits for the server.

    A sign is an answer of the schedulers to a question, which they give between two steps, and CPU time of the programs
    that they have started, for example compilers of kernels. Without an accelerator, CPU time of the schedulers is a
    sign, too: one step can take minutes. With an accelerator it is none, because a scheduler that waits for a hung
    kernel may use a whole core.
    """

    def __init__(self, adapter: HttpServerEngineAdapter) -> None:
        """`adapter`: the adapter of a server that is ready. It is asked at once what device it has."""
        self._adapter = adapter
        self._answer: Future[Json] | None = adapter.ask_schedulers()
        self._has_accelerator = False
        self._cpu: SchedulerCpu | None = None
        self._next_look = 0.0
        self._last_sign_at = time.monotonic()

    def last_sign_at(self, now: float, interval_s: float) -> float:
        """Time of the last sign (`time.monotonic`). Looks for signs, at most once in `interval_s` seconds."""
        if now >= self._next_look:
            self._next_look = now + interval_s
            has_answered, has_computed = self._take_answer(), self._take_cpu_time()
            if has_answered or has_computed:
                self._last_sign_at = now
        return self._last_sign_at

    def _take_answer(self) -> bool:
        """Whether the last question was answered. Asks the next question when none is open."""
        answered = False
        if self._answer is not None and self._answer.done():
            if not self._answer.cancelled() and self._answer.exception() is None:
                answered = True
                self._has_accelerator = self._answer.result().get("device", "cpu") != "cpu"
            self._answer = None
        if self._answer is None:
            try:
                self._answer = self._adapter.ask_schedulers()
            except ShutDownError:  # the server is being ended
                self._answer = None
        return answered

    def _take_cpu_time(self) -> bool:
        """Whether CPU time was used, since the last look, that is a sign of life."""
        process = self._adapter.process
        assert process is not None
        before, self._cpu = self._cpu, process.scheduler_cpu()
        if before is None:
            return False
        return self._cpu.helpers_s != before.helpers_s or (
            not self._has_accelerator and self._cpu.own_s != before.own_s
        )


# -- Replica ----------------------------------------------------------------------------------------
# `Replica`: one member of a fleet. Its server is replaced when it ends; the replica and its name stay.


class StartPreempted(NotReadyError):
    """The start of a server was ended because the fleet released its memory."""


class Replica:
    """One server of a fleet, its state and its history.

    The public attributes are written under the fleet's lock only.
    """

    def __init__(
        self,
        name: str,
        launcher: Launcher,
        server_args: Mapping[str, Any],
        config: AdapterConfig,
        env: Mapping[str, str],
    ) -> None:
        self.name, self._launcher, self._server_args, self._config = name, launcher, dict(server_args), config
        self._env = dict(env)
        self.state = ReplicaState.STARTING
        self.weight_version = 0
        """Version of the weights that its server has."""
        self.adapter: HttpServerEngineAdapter | None = None
        """Adapter of its running server. None without a server."""
        self.deaths: list[float] = []
        """Times at which its servers ended (`time.monotonic`)."""
        self.failed_starts = 0
        """Number of starts in a row after which the replica did not become healthy."""
        self.num_servers = 0
        """Number of servers that were taken into use."""
        self.failed_updates = 0
        """Number of attempts at weight updates that its server has failed since the last published update."""
        self.restarts = 0
        """Number of times that a new server replaced an ended server."""
        self.last_loss: str | None = None
        """When and why its last server was lost, with the URL and the log of that server."""
        self.error: VerlServerError | None = None
        """The reason of the states DEAD, RESTARTING and FAILED, and of STALE if it waits for the next update."""
        self.failed_replays = 0
        """Number of attempts at loading the published weights that its server has failed since they were published."""
        self.replay_after = 0.0
        """Time before which the next attempt does not begin (`time.monotonic`)."""
        self.needs_update = False
        """Whether the published weights cannot be loaded into its server, so that it waits for the next update."""
        self._stopped = threading.Event()
        self._preempted = threading.Event()
        self.end_lock = threading.Lock()
        """Held while a server is being ended."""
        self._start_lock = threading.Lock()
        """Held while a server is being started."""
        self._fused_modules: tuple[tuple[str, ...], ...] | None = None
        """See `ServerInfo.fused_modules`."""
        self._signs: SignsOfLife | None = None
        """Signs of life of its server."""
        self._last_idle_at = 0.0
        """Time at which it last had no requests or was paused."""
        self._observed_at = time.monotonic()

    def use_server(self, adapter: HttpServerEngineAdapter) -> None:
        """Take a new server into use."""
        self.adapter, self.failed_updates = adapter, 0
        self.num_servers += 1
        self.forget_failed_replays()

    def forget_failed_replays(self) -> None:
        """The replica has a new server, or other weights were published."""
        self.failed_replays, self.replay_after, self.needs_update = 0, 0.0, False

    @property
    def member(self) -> ServerInfo:
        """Its server as a member of weight updates. The name changes when a new server takes over."""
        tp_size = int(self._server_args.get("tp_size") or 1)
        is_current = self.state is not ReplicaState.STALE
        return ServerInfo(f"{self.name}/{self.num_servers}", tp_size, self._fused_modules, is_current)

    @property
    def dp_size(self) -> int:
        """Number of data parallel ranks of its server."""
        return num_data_parallel_ranks(self._server_args)

    def start(self, on_ready: Callable[[Replica, HttpServerEngineAdapter], None]) -> None:
        """Start a new server and call `on_ready` when the server is ready. The server is ended when `on_ready` fails.

        Raises StartupError, StartPreempted, and ShutDownError when the replica was stopped meanwhile.
        """
        with self._start_lock:
            if (error := self._check_abort()) is not None:
                raise error
            adapter = self._launcher.start_server(
                self.name, self._server_args, self._config, self._env, self._check_abort
            )
            try:
                self._signs = SignsOfLife(adapter)
                if self._config.engine_kind == EngineKind.VLLM:
                    self._fused_modules = adapter.fused_modules()
                on_ready(self, adapter)
            except BaseException:
                adapter.shutdown()
                raise

    def _check_abort(self) -> VerlServerError | None:
        """The reason to end a start that is in progress, or None."""
        if self._stopped.is_set():
            return ShutDownError(f"replica {self.name} was stopped while its server started")
        if self._preempted.is_set():
            return StartPreempted(f"the fleet released its memory while the server of {self.name} started")
        return None

    def preempt_start(self) -> None:
        """End a start that is in progress, and refuse further starts. Returns when no start is in progress."""
        self._preempted.set()
        with self._start_lock:
            pass

    def allow_start(self) -> None:
        """Allow starts again after `preempt_start`."""
        self._preempted.clear()

    def observe(self, running_requests: int, last_progress_at: float, look_interval_s: float) -> Observation:
        """Observe the server now. The routers provide the number of requests and the time of the last new token.

        Signs of life are looked for, every `look_interval_s` seconds, only while no token arrives.
        """
        now = time.monotonic()
        adapter = self.adapter
        process = None if adapter is None else adapter.process
        if process is None or process.wait_exit(0.0) is not None:
            return Observation(is_alive=False, running_requests=running_requests, no_progress_s=0.0, no_sign_s=0.0)
        assert adapter is not None
        assert self._signs is not None
        is_paused = adapter.paused or bool(adapter.released_memory)
        was_suspended = (
            now - self._observed_at > 4 * look_interval_s
        )  # this process itself: nobody has looked meanwhile
        self._observed_at = now
        if is_paused or not running_requests or was_suspended:
            self._last_idle_at = now
        last_sign_at = quiet_since = max(last_progress_at, self._last_idle_at)
        if now - quiet_since >= look_interval_s:
            last_sign_at = max(quiet_since, self._signs.last_sign_at(now, look_interval_s))
        return Observation(
            is_alive=True,
            running_requests=running_requests,
            no_progress_s=now - quiet_since,
            no_sign_s=now - last_sign_at,
            is_paused=is_paused,
        )

    def death_error(self, reason: str) -> VerlServerError:
        """The error that describes the end of its server; `reason` describes a server that still runs."""
        adapter = self.adapter
        process = None if adapter is None else adapter.process
        if adapter is not None and process is not None and process.wait_exit(0.0) is not None:
            return process.died(adapter.base_url)
        return ServerDiedError(f"replica {self.name} {reason}", replica=self.name)

    def refuse_starts(self) -> None:
        """Refuse further starts permanently, and end a start that is in progress."""
        self._stopped.set()

    def free_devices(self) -> None:
        """Give the devices back to the launcher. The replica starts no more servers."""
        self._launcher.forget_replica(self.name)


# -- Metrics ----------------------------------------------------------------------------------------
# What a fleet counts, and its metrics in the text format of Prometheus.


@dataclass
class FleetCounters:
    """What a fleet has counted since its start."""

    deaths: int = 0
    """Number of servers that ended or counted as stalled."""
    restarts: int = 0
    """Number of servers that were started again."""
    given_up: int = 0
    """Number of times that a replica was given up because its servers ended too often."""
    updates: int = 0
    """Number of weight updates that were published."""
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds spent in weight updates, by phase."""


class _FleetCollector(Collector):
    """Reads the metrics of a fleet whenever they are requested."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        counters = self._fleet.counters
        for name, text, value in (
            ("deaths", "Servers that ended or counted as stalled", counters.deaths),
            ("restarts", "Servers that were started again", counters.restarts),
            (
                "given_up",
                "Replicas that are not started again because their servers ended too often",
                counters.given_up,
            ),
            ("updates", "Weight updates that were published", counters.updates),
        ):
            yield CounterMetricFamily(f"verl_fleet_{name}", text, value=value)
        seconds = CounterMetricFamily("verl_fleet_sync_seconds", "Seconds spent in weight updates", labels=["phase"])
        for phase, spent_s in sorted(counters.phase_s.items()):
            seconds.add_metric([phase], spent_s)
        yield seconds
        yield GaugeMetricFamily(
            "verl_fleet_weight_version",
            "Version of the weights that were published last",
            value=self._fleet.weight_version,
        )
        states = GaugeMetricFamily("verl_fleet_replicas", "Number of replicas by state", labels=["state"])
        for state, count in sorted(Counter(replica.state.value for replica in self._fleet.replicas).items()):
            states.add_metric([state], count)
        yield states


def fleet_metrics(fleet: Fleet) -> bytes:
    """The metrics of a fleet, without those of its routers."""
    return metrics_text(_FleetCollector(fleet))


# -- Fleet ------------------------------------------------------------------------------------------

Event = dict[str, Any]
Server = tuple[Replica, HttpServerEngineAdapter]
"""A replica and the adapter of the server that it had at that moment."""

LISTENER_TIMEOUT_S = 10.0
"""Seconds that a listener has for the last events when the fleet ends."""
MAX_THREADS = 2**20
"""No limit: a broadcast of weights begins when all servers load, so no call may wait for the end of another one."""

SERVING = frozenset({ReplicaState.HEALTHY, ReplicaState.SUSPECT})
RUNNING = SERVING | {ReplicaState.STALE}
"""States of a replica whose server runs and takes part in weight updates."""
ENDING = frozenset({ReplicaState.DEAD, ReplicaState.RESTARTING})


class Fleet:
    """The replicas by name, and the state that they share. Attributes are written under `lock` only."""

    def __init__(
        self,
        make_replica: Callable[[str], Replica],
        checkpoint_version: int,
        targets: RoutingTargets,
        on_event: Callable[[Event], None],
    ) -> None:
        self._make_replica, self._on_event, self._targets = make_replica, on_event, targets
        self.checkpoint_version = self.weight_version = checkpoint_version
        """Version of the weights of a new server, and version of the weights that were published last."""
        self.replay: ReplayFn | None = None
        """Loads the published weights into other servers. None when the trainer does not keep them."""
        self.released_memory: frozenset[str] = frozenset()
        """Memory tags that are released."""
        self.admission_paused = False
        """Whether new requests wait in the routers, for an update or a release of memory."""
        self.update_incomplete = False
        """Whether an update has begun to load and was not published: it is in progress, or the weights are torn."""
        self.weights_undefined = False
        """Whether the servers' weights are torn, or were released and not pushed since."""
        self.lock = threading.RLock()
        self.closed = threading.Event()
        self.counters = FleetCounters()
        self.executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="verl-server-fleet")
        self._numbers = itertools.count()
        self._replicas: dict[str, Replica] = {}
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._deliver_events, name="verl-server-fleet-events", daemon=True)
        self._listener.start()

    # -- replicas -------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[Replica]:
        with self.lock:
            return list(self._replicas.values())

    def has(self, replica: Replica) -> bool:
        return self._replicas.get(replica.name) is replica

    def get(self, name: str) -> Replica:
        """The replica of that name. Raises BadInputError."""
        replica = self._replicas.get(name)
        if replica is None:
            raise BadInputError(f"there is no replica {name!r}; the replicas are {sorted(self._replicas)}")
        return replica

    def servers(self) -> list[Server]:
        """The replicas with a running server."""
        with self.lock:
            return [
                (replica, replica.adapter)
                for replica in self.replicas
                if replica.adapter is not None and replica.state in RUNNING
            ]

    def is_used(self, server: Server) -> bool:
        """Whether the server has not been replaced and is not being ended."""
        replica, adapter = server
        return replica.adapter is adapter and replica.state not in ENDING

    def require_servers(self) -> list[Server]:
        """`servers()`. Raises ServerDiedError when there is none; new requests then do not wait for an update."""
        servers = self.servers()
        if not servers:
            self.set_admission_paused(False)
            raise ServerDiedError("no replica of the fleet has a running server")
        return servers

    def serving_adapters(self) -> list[HttpServerEngineAdapter]:
        """The adapters of the replicas that serve requests."""
        with self.lock:
            adapters = [replica.adapter for replica in self.replicas if replica.state in SERVING]
        return [adapter for adapter in adapters if adapter is not None]

    def create_replica(self, name: str | None = None) -> Replica:
        """Add a replica that has no server yet. Raises BadInputError if there is a replica of that `name`."""
        with self.lock:
            if name in self._replicas:
                raise BadInputError(f"there is a replica {name!r} already; choose another name")
            replica = self._make_replica(name or f"verl_server_{next(self._numbers)}")
            replica.weight_version = self.checkpoint_version
            return self._replicas.setdefault(replica.name, replica)

    def drop_replica(self, replica: Replica) -> None:
        """Remove a replica, tell it to the routers, and end its server."""
        with self.lock:
            self._replicas.pop(replica.name, None)
            self.change_state(replica, ReplicaState.REMOVED)
        try:
            self._targets.wait_until_applied()  # no router takes the end of the server for the work of a request
        finally:
            self.stop_replica(replica)

    def add_server(self, replica: Replica, adapter: HttpServerEngineAdapter) -> None:
        """A new server of the replica is ready. It has the weights of its checkpoint."""
        with self.lock:
            if self.closed.is_set() or not self.has(replica):
                raise ShutDownError("the fleet was shut down")
            if self.released_memory:
                raise StartPreempted(f"the fleet released its memory while the server of {replica.name} started")
            replica.use_server(adapter)
            is_current = self.weight_version == self.checkpoint_version and self.replay is None
            replica.weight_version = self.checkpoint_version
            error = None if is_current or self.replay is not None else NotReadyError(KEEPS_NO_WEIGHTS)
            self.change_state(replica, ReplicaState.HEALTHY if is_current else ReplicaState.STALE, error)

    def end_server(self, replica: Replica) -> None:
        """End the process tree of the replica's server, if the replica has a server. Waits for an end in progress."""
        with replica.end_lock:
            with self.lock:
                adapter, replica.adapter = replica.adapter, None
            if adapter is not None:
                try:
                    adapter.shutdown()
                except Exception:  # the replica continues without this server, whatever the error is
                    logger.exception("the server of %s did not shut down cleanly", replica.name)

    def stop_replica(self, replica: Replica) -> None:
        """End the replica's server permanently, also a server that is starting."""
        replica.refuse_starts()
        self.end_server(replica)
        replica.free_devices()

    def record_death(self, replica: Replica) -> None:
        """Record that a server of the replica ended or could not start."""
        with self.lock:
            replica.deaths.append(time.monotonic())

    def record_restart(self, replica: Replica) -> None:
        """Record that a new server replaced an ended server of the replica."""
        with self.lock:
            self.counters.restarts, replica.restarts = self.counters.restarts + 1, replica.restarts + 1

    # -- state of the whole fleet -----------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether its replicas may receive requests."""
        return not self.released_memory and not self.admission_paused and not self.weights_undefined

    def set_released_memory(self, tags: frozenset[str]) -> None:
        """Record the memory tags that are released now.

        Replicas receive no requests while memory is released, nor before released weights were pushed again.
        """
        with self.lock:
            loses_weights = MemoryTag.WEIGHTS.value in tags - self.released_memory
            self.weights_undefined = self.weights_undefined or self.update_incomplete or loses_weights
            self.released_memory = tags
            self.notify(*self.replicas)

    def undo_release(self, released_memory: frozenset[str], weights_undefined: bool) -> None:
        """Restore the state before a release of memory that failed."""
        with self.lock:
            self.weights_undefined = weights_undefined
            self.set_released_memory(released_memory)

    def begin_load(self) -> None:
        """An update begins to load. Until `finish_update` the weights count as incomplete."""
        with self.lock:
            self.update_incomplete = True

    def add_phase_seconds(self, phase: str, seconds: float) -> None:
        """Count time that a weight update spent in `phase`."""
        with self.lock:
            self.counters.phase_s[phase] = self.counters.phase_s.get(phase, 0.0) + seconds

    def finish_update(self, whole: bool) -> None:
        """An update was published, or all weights were loaded again. `whole`: it had every parameter."""
        with self.lock:
            self.update_incomplete, becomes_defined = False, self.weights_undefined and whole
            if becomes_defined:
                self.weights_undefined = False
                self.notify(*self.replicas)

    def abandon_update(self) -> bool:
        """Forget the weights that the trainer keeps, at the end of its use. Returns whether an update loaded in part.

        The weights are then undefined, and replicas receive no requests until a whole update. Replicas that start again
        wait for the next update, because the trainer no longer keeps the published weights.
        """
        with self.lock:
            self.replay = None
            self.admission_paused = False
            self.weights_undefined = self.weights_undefined or self.update_incomplete
            self.notify(*self.replicas)
            return self.update_incomplete

    def set_admission_paused(self, paused: bool) -> None:
        """Set whether new requests wait in the routers."""
        with self.lock:
            if self.admission_paused != paused:
                self.admission_paused = paused
                self.notify(*self.replicas)

    # -- notification -----------------------------------------------------------------------------------

    def change_state(self, replica: Replica, state: ReplicaState, error: VerlServerError | None = None) -> None:
        """Change the state of a replica; notify the routers and the listener. Must be called under the lock."""
        self._set_state(replica, state, error)
        self.notify(replica)

    def change_states(self, states: Mapping[Replica, ReplicaState]) -> None:
        """`change_state` for several replicas. The listener is notified of those that differ from before."""
        for replica in [replica for replica, state in states.items() if replica.state is not state]:
            self._set_state(replica, states[replica], None)
        self.notify(*states)

    def _set_state(self, replica: Replica, state: ReplicaState, error: VerlServerError | None) -> None:
        before, replica.state, replica.error = replica.state, state, error
        replica.failed_starts *= state is not ReplicaState.HEALTHY
        event = {
            "time": time.time(),
            "replica": replica.name,
            "before": before.value,
            "after": state.value,
            "version": replica.weight_version,
            "error": None if error is None else error.message,
        }
        self._events.put(event)
        waits = state is ReplicaState.STALE and error is not None  # it serves nothing until the trainer does something
        level = logging.WARNING if waits else logging.INFO
        logger.log(level, "replica %s: %s -> %s%s", replica.name, before, state, f" ({error.message})" if error else "")

    def notify(self, *replicas: Replica) -> None:
        """Report the statuses of replicas to the routers, all together: the first would get all waiting requests."""
        self._targets.update_statuses([self._status(replica) for replica in replicas])

    def _status(self, replica: Replica) -> ReplicaStatus:
        state = replica.state
        waits_for_update = state is ReplicaState.STALE and (self.replay is None or replica.needs_update)
        stays_in_use = state is not ReplicaState.DRAINING and not waits_for_update
        return ReplicaStatus(
            name=replica.name,
            adapter=None if replica.adapter is None else replica.adapter.asynchronous,
            weight_version=replica.weight_version,
            admitted=state in SERVING and self.is_open,
            suspect=state is ReplicaState.SUSPECT,
            will_serve=stays_in_use and not self.released_memory and not self.weights_undefined,
            removed=state is ReplicaState.REMOVED,
            reason=unavailable_reason(state, self.released_memory, self.weights_undefined, waits_for_update),
            failure=to_wire(replica.error) if state is ReplicaState.FAILED and replica.error else None,
            dp_size=replica.dp_size,
        )

    def _deliver_events(self) -> None:
        """Call the listener, in a separate thread: the listener may call methods of the fleet, also `shutdown`."""
        while (event := self._events.get()) is not None:
            try:
                self._on_event(event)
            except Exception:  # an error of the listener must not end a recovery
                logger.exception("on_event failed")

    def close(self) -> None:
        """Deliver the last events. Call it when no state changes any more."""
        self._events.put(None)
        if threading.current_thread() is not self._listener:
            self._listener.join(LISTENER_TIMEOUT_S)
