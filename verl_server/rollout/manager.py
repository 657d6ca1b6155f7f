"""`RolloutManager`: a fleet of servers with a router and automatic recovery."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.blocking import EventLoopThread
from verl_server.adapter.engine import get_engine
from verl_server.adapter.server_engine import ServerEngine
from verl_server.config import AdapterConfig, RecoveryConfig, RolloutMode, RouterConfig
from verl_server.errors import BadInputError, NotReadyError, VerlServerError
from verl_server.rollout.fleet import Event, Fleet, Replica, ReplicaState, fleet_metrics
from verl_server.rollout.launchers.local import Launcher, LocalLauncher
from verl_server.rollout.modes import capabilities_of, parse_mode, parse_parallel_config, server_args_for_mode
from verl_server.rollout.recovery import RecoveryLoop
from verl_server.rollout.updates import FleetCalls, FleetLoras, FleetMemory, ManagedBackend
from verl_server.router.dispatcher import Dispatcher, RolloutRouter
from verl_server.router.http import router_metrics
from verl_server.router.process.supervisor import RouterSupervisor
from verl_server.router.replica_status import RouterCounters
from verl_server.router.targets import InProcessTarget, RoutingTargets, SglangRouterTarget
from verl_server.server.process import ServerPids
from verl_server.types import Json, parse_weight_version
from verl_server.validation import check_arguments, require_whole_number

DRAIN_POLL_INTERVAL_S = 0.02


class RolloutManager:
    """A fleet: servers with the same arguments, which behave as one engine. Servers that end are started again.

    Use it alone, through `generate` or `router`, or give it to a `VerlEngine(fleet=...)`, which pushes weights into all
    replicas. Use it as a context manager, or call `shutdown`. Thread-safe. The constructor returns when all servers are
    ready; they start at the same time.

    Args:
        replicas: Number of servers. 0: `add_replica` starts them.
        mode: What the fleet shares with the trainer, see `RolloutMode`. None: `HYBRID`.
        launcher: Starts the servers. None: a `LocalLauncher`, which starts them on this machine.
        config: Settings of each server's adapter. With `router_ip` and `router_port`, the replicas are also
            registered with that `sglang-router`.
        recovery: When a replica counts as stalled, and how often its server is started again.
        router: How requests are distributed over the replicas.
        router_process: Also serve the router over HTTP, in a process of its own, at `router_url`. It listens at the
            server argument `host`, or at the address at which the servers reach this machine. Its key is the server
            argument `api_key`, or random.
        on_event: Called with each change of a replica's state, from a thread of the manager. An event is a dict
            with `time` (seconds since the epoch), `replica`, `before`, `after`, `version` and `error`.
        env: Environment variables to add to the environment of each server. With `CUDA_VISIBLE_DEVICES`, replicas on
            this machine share these GPUs; otherwise they share those that this process sees.
        server_args: Arguments of the engine's server, the same for all servers. `model_path` is required.

    Raises BadInputError, UnsupportedError, StartupError or DeadlineError. All servers are ended then.
    """

    @check_arguments()
    def __init__(
        self,
        replicas: int,
        *,
        mode: RolloutMode | str | None = RolloutMode.HYBRID,
        launcher: Launcher | None = None,
        config: AdapterConfig | None = None,
        recovery: RecoveryConfig | None = None,
        router: RouterConfig | None = None,
        router_process: bool = False,
        on_event: Callable[[Event], None] = lambda event: None,
        env: Mapping[str, str] | None = None,
        **server_args: Any,
    ) -> None:
        require_whole_number("replicas", replicas, minimum=0)
        self.mode = parse_mode(mode)
        config = config or AdapterConfig()
        engine = get_engine(config.engine_kind)
        args = _server_args(self.mode, engine, server_args)
        parallel_config = parse_parallel_config(args)
        args = engine.add_fleet_defaults(args, config.router_ip is not None)
        if capabilities_of(self.mode).takes_weights:
            engine.require_pushable(args, env or {})
        self._launcher = launcher = launcher or LocalLauncher()
        launcher.reserve(parallel_config, replicas, env or {})
        server_config = dataclasses.replace(config, router_ip=None, router_port=None)

        self._loop = EventLoopThread()
        self._dispatcher = self._loop.run(_make_dispatcher(router))
        self.router = RolloutRouter(self._dispatcher, self._loop)
        """The router in this process. Its `generate` can be called from any thread and any event loop."""
        self._router_process: RouterSupervisor | None = None
        self._targets = targets = RoutingTargets([InProcessTarget(self._dispatcher, self._loop)])
        self._fleet = fleet = Fleet(
            lambda name: Replica(name, launcher, args, server_config, env or {}),
            parse_weight_version(args.get("weight_version")),
            targets,
            on_event,
        )
        loras = FleetLoras(args.get("lora_paths"))
        self._recovery = recovering = RecoveryLoop(fleet, targets, recovery or RecoveryConfig(), loras.prepare_server)
        calls = FleetCalls(fleet, self._recovery)
        self._memory = FleetMemory(fleet, calls, targets, self.mode, str(args["model_path"]), recovering.replay_lock)
        self._backend = ManagedBackend(
            fleet, recovering, calls, targets, config.timeouts.weights_s,
            self._memory, loras, self._dispatcher, self._loop, launcher, self.mode,
        )  # fmt: skip
        try:
            if router_process:
                host = args.get("host") or launcher.trainer_host
                self._start_router_process(router or RouterConfig(), config.log_dir, host, args.get("api_key"))
            if config.router_ip is not None:
                targets.add(SglangRouterTarget(config))
            for start in [fleet.executor.submit(self._start_replica, fleet.create_replica()) for _ in range(replicas)]:
                start.result()
        except BaseException:
            self.shutdown()
            raise
        self._recovery.start()

    def _start_router_process(
        self, config: RouterConfig, log_dir: Path | str | None, host: str, api_key: str | None
    ) -> None:
        def metrics() -> str:
            return fleet_metrics(self._fleet).decode()

        self._router_process = RouterSupervisor(config, log_dir, metrics, host, api_key)
        self._targets.add(self._router_process)

    def _start_replica(self, replica: Replica) -> None:
        replica.start(self._recovery.add_server)

    # -- state ----------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[ReplicaView]:
        """Views of the replicas: name, state, weight version, URL, process ids, restarts and adapter."""
        return [ReplicaView(replica) for replica in self._fleet.replicas]

    @property
    def weight_version(self) -> int:
        """Version of the weights that were published last."""
        return self._fleet.weight_version

    @property
    def router_url(self) -> str:
        """URL of the router process, for `RouterClient`. Raises BadInputError without a router process."""
        return self._require_router_process().url

    @property
    def router_key(self) -> str:
        """API key of the router process. Raises BadInputError without a router process."""
        return self._require_router_process().api_key

    def _require_router_process(self) -> RouterSupervisor:
        if self._router_process is None:
            raise BadInputError("this fleet has no router process: create it with router_process=True")
        return self._router_process

    @property
    def backend(self) -> ManagedBackend:
        """The fleet as `VerlEngine` uses it. Not meant for other callers."""
        return self._backend

    def status(self) -> FleetStatus:
        """The present state of the replicas, of the router in this process and of the router process."""
        return fleet_status(self._fleet, self._dispatcher, self._targets, self._router_process)

    def metrics(self) -> bytes:
        """Metrics of the router in this process and of the fleet, in the text format of Prometheus."""
        return router_metrics(self._dispatcher) + fleet_metrics(self._fleet)

    # -- generation -----------------------------------------------------------------------------------

    def generate(self, **request: Any) -> Any:
        """Generate for one prompt (returns a dict) or many prompts (returns a list of dicts), distributed over the
        replicas. `request` holds the arguments of `HttpServerEngineAdapter.generate`. Blocks; see also `router`.
        """
        return self._loop.run(self._backend.route(request))

    def flush_cache(self) -> None:
        """Remove the prefix caches of all replicas. Raises ServerBusyError while requests run."""
        self._backend.flush_cache()

    # -- replicas -------------------------------------------------------------------------------------

    def add_replica(self, name: str | None = None) -> str:
        """Start one more replica and return its name when it serves requests, or waits for the next weight update.

        `name`: name of the replica, for a launcher that places replicas by their names. None: a new name.
        Raises NotReadyError while memory is released, StartupError, BadInputError.
        """
        if self._fleet.released_memory:
            raise NotReadyError("the memory of this fleet is released: call resume_memory_occupation first")
        replica = self._fleet.create_replica(name)
        try:
            self._start_replica(replica)
        except BaseException:
            self._fleet.drop_replica(replica)
            raise
        self._recovery.load_published_weights(replica)
        return replica.name

    def restart_failed(self) -> list[str]:
        """Start the servers of all replicas in the state `FAILED` again, for example when the cause was corrected.

        Returns the names of these replicas at once. Each of them has `RecoveryConfig.max_restarts` restarts again;
        `status` and `on_event` tell when they serve.
        """
        return self._recovery.restart_failed()

    def remove_replica(self, name: str, drain_s: float = 60.0) -> None:
        """Remove a replica. It gets no new requests and has `drain_s` seconds to finish its running requests.

        Requests that are not finished then continue on other replicas. Raises BadInputError for an unknown name and for
        the last replica.
        """
        fleet = self._fleet
        with fleet.lock:
            replica = fleet.get(name)
            if all(other is replica or other.state is ReplicaState.DRAINING for other in fleet.replicas):
                raise BadInputError(f"{name} is the last replica of this fleet: shut the fleet down instead")
            fleet.change_state(replica, ReplicaState.DRAINING)
        self._targets.wait_until_applied()
        deadline = time.monotonic() + drain_s
        while time.monotonic() < deadline and self._targets.replica_stats(name).running_requests:
            time.sleep(DRAIN_POLL_INTERVAL_S)
        fleet.drop_replica(replica)

    # -- memory ---------------------------------------------------------------------------------------

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Release memory of all replicas. `tags`: values of `MemoryTag`; None: all.

        Raises BadInputError for a standalone fleet, ServerBusyError while requests run.
        """
        self._memory.release(tags)

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take released memory back. None: all of it. Weights are undefined afterwards and must be pushed.

        A colocated fleet, which takes no pushed weights, loads its checkpoint again.
        """
        self._memory.resume(tags)

    # -- end ------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End all servers, the router process and the launcher. Safe to call twice."""
        if self._fleet.closed.is_set():
            return
        self._fleet.closed.set()
        with contextlib.ExitStack() as steps:  # the last callback runs first
            steps.callback(self._loop.close)
            steps.callback(self._fleet.close)
            steps.callback(self._launcher.close)
            steps.callback(lambda: self._fleet.executor.shutdown(wait=True, cancel_futures=True))
            steps.callback(self._recovery.join)
            steps.callback(_call_for_all, self._fleet.stop_replica, self._fleet.replicas)
            steps.callback(self._targets.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _call_for_all(call: Callable[[Replica], None], replicas: Sequence[Replica]) -> None:
    """Call `call` for all replicas at the same time."""
    threads = [threading.Thread(target=call, args=[replica]) for replica in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def _make_dispatcher(config: RouterConfig | None) -> Dispatcher:
    """A dispatcher that belongs to the running event loop."""
    return Dispatcher(config)


def _server_args(mode: RolloutMode, engine: ServerEngine, server_args: Mapping[str, Any]) -> Json:
    """The engine's arguments of each server of a fleet. Raises BadInputError."""
    return {**server_args_for_mode(mode, engine.validate_fleet_args(server_args)), "port": None}


# -- Status -----------------------------------------------------------------------------------------
# The public state of a fleet: `ReplicaView`, a live view of one replica, and `FleetStatus`, a frozen copy.


class ReplicaView:
    """One replica of a fleet, read-only. Its properties show the present state."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def __repr__(self) -> str:
        return f"<replica {self.name}: {self.state}, weight version {self.weight_version}>"

    @property
    def name(self) -> str:
        """Name, which stays when the server is replaced."""
        return self._replica.name

    @property
    def state(self) -> ReplicaState:
        return self._replica.state

    @property
    def weight_version(self) -> int:
        """Version of the weights that its server has."""
        return self._replica.weight_version

    @property
    def restarts(self) -> int:
        """Number of times that a new server replaced an ended server."""
        return self._replica.restarts

    @property
    def error(self) -> VerlServerError | None:
        """The reason of the states DEAD, RESTARTING and FAILED."""
        return self._replica.error

    @property
    def last_loss(self) -> str | None:
        """When and why its last server was lost, with the URL and the log of that server. It stays after a restart."""
        return self._replica.last_loss

    @property
    def adapter(self) -> HttpServerEngineAdapter | None:
        """Adapter of its server, with every endpoint. None while it has no running server."""
        return self._replica.adapter

    @property
    def base_url(self) -> str | None:
        """URL of its server. None while it has no running server."""
        adapter = self._replica.adapter
        return None if adapter is None else adapter.base_url

    @property
    def pids(self) -> ServerPids | None:
        """Process ids of its server, on the server's machine. None while it has no running server."""
        adapter = self._replica.adapter
        return None if adapter is None else adapter.pids


@dataclass(frozen=True)
class ReplicaInfo:
    """State of one replica at one moment."""

    name: str
    state: ReplicaState
    weight_version: int
    """Version of the weights that its server has."""
    base_url: str | None
    """URL of its server. None without a running server."""
    pids: ServerPids | None
    """Process ids of its server. None without a running server."""
    restarts: int
    """Number of times that a new server replaced an ended server."""
    admitted: bool
    """Whether the router of this process sends requests to it."""
    running_requests: int
    """Number of requests that run on it, from all routers."""
    tokens_in_flight: int
    """Number of tokens of the requests from the router of this process: prompts and received output."""
    last_loss: str | None = None
    """When and why its last server was lost, with the URL and the log of that server. It stays after a restart."""


@dataclass(frozen=True)
class RouterProcessInfo:
    """State of the fleet's router process at one moment."""

    url: str
    pid: int
    restarts: int
    """Number of times that the router process was lost and started again."""


@dataclass(frozen=True)
class FleetStatus:
    """State of a fleet at one moment."""

    replicas: tuple[ReplicaInfo, ...]
    weight_version: int
    """Version of the weights that were published last."""
    released_memory: frozenset[str]
    """Memory tags that are released."""
    queued_requests: int
    """Number of requests that wait for a replica in the router of this process."""
    router_counters: RouterCounters
    """Counters of the router of this process."""
    router_process: RouterProcessInfo | None
    """The router process. None for a fleet without one."""

    def replica(self, name: str) -> ReplicaInfo:
        """The replica of that name. Raises KeyError."""
        for replica in self.replicas:
            if replica.name == name:
                return replica
        raise KeyError(name)


def fleet_status(
    fleet: Fleet, dispatcher: Dispatcher, targets: RoutingTargets, router_process: RouterSupervisor | None
) -> FleetStatus:
    """Collect the state of a fleet from its parts."""
    snapshot = dispatcher.snapshot()
    replicas = []
    for view in map(ReplicaView, fleet.replicas):
        routed = snapshot.replica(view.name)
        replicas.append(
            ReplicaInfo(
                name=view.name,
                state=view.state,
                weight_version=view.weight_version,
                base_url=view.base_url,
                pids=view.pids,
                restarts=view.restarts,
                admitted=routed is not None and routed.admitted,
                running_requests=targets.replica_stats(view.name).running_requests,
                tokens_in_flight=0 if routed is None else routed.tokens_in_flight,
                last_loss=view.last_loss,
            )
        )
    process = None
    if router_process is not None:
        process = RouterProcessInfo(router_process.url, router_process.pid, router_process.restarts)
    return FleetStatus(
        replicas=tuple(replicas),
        weight_version=fleet.weight_version,
        released_memory=fleet.released_memory,
        queued_requests=snapshot.queued_requests,
        router_counters=snapshot.counters,
        router_process=process,
    )
