"""`RolloutManager`: N replicas that behave as one engine, and stay so when their servers die.

It is a `Backend` (engine/backend.py), so a `VerlEngine(fleet=manager)` pushes weights into all replicas in one
update: what cannot take part is left behind and catches up from what is still staged.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.event_loop_thread import EventLoopThread
from verl_server.adapter.sglang import memory_tags
from verl_server.adapter.sglang.server_arguments import validate_server_args
from verl_server.config import AdapterConfig, MemoryTag, RecoveryConfig, RolloutMode, RouterConfig
from verl_server.errors import BadInputError, NotReadyError, ServerBusyError, ServerDiedError, VerlServerError
from verl_server.rollout.fleet import Event, Fleet
from verl_server.rollout.health import ReplicaState
from verl_server.rollout.launcher import Launcher, LocalLauncher
from verl_server.rollout.metrics import fleet_exposition
from verl_server.rollout.modes import capabilities_of, mode_of, server_args_for
from verl_server.rollout.parallel_config import parallel_config_of
from verl_server.rollout.recovery import RecoveryLoop
from verl_server.rollout.replica import Replica
from verl_server.rollout.updates import FleetUpdates
from verl_server.router.dispatcher import Dispatcher, together
from verl_server.router.metrics import router_metrics
from verl_server.router.process import RouterProcess
from verl_server.router.resumable_generation import one_by_one
from verl_server.router.router import RolloutRouter
from verl_server.router.targets import InProcessRouter, RoutingTargets, SglangRouterTarget

Json = dict[str, Any]


class RolloutManager(FleetUpdates):
    """A fleet of `replicas` servers with the same arguments (SGLang's, passed on verbatim).

    Starts them in parallel and returns when all are ready. `mode` says what the fleet shares with the trainer, `place`
    where its servers run (None: on this machine). `on_event` is called with every change of a state, from a thread of
    the manager's. `router_process=True` also serves the router over HTTP (`fleet.router_url`). A `config` that names
    an `sglang-router` keeps that one told, too.
    """

    def __init__(
        self,
        replicas: int,
        *,
        mode: RolloutMode | str = RolloutMode.HYBRID,
        launcher: Launcher | None = None,
        config: AdapterConfig | None = None,
        recovery: RecoveryConfig | None = None,
        router: RouterConfig | None = None,
        router_process: bool = False,
        on_event: Callable[[Event], None] = lambda event: None,
        **server_args: Any,
    ) -> None:
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
            raise BadInputError(f"a fleet has 1 or more replicas, got {replicas!r}")
        self.mode = mode_of(mode)
        args = {**server_args_for(self.mode, validate_server_args(server_args)), "port": None}
        self._model_path = str(args["model_path"])
        shape = parallel_config_of(args, takes_weights=capabilities_of(self.mode).takes_weights)
        self._launcher = launcher or LocalLauncher()
        self._launcher.admit(shape, replicas)
        config = config or AdapterConfig()
        alone = AdapterConfig(config.timeouts, config.log_dir, config.start_attempts, config.repeats)

        self._loop = EventLoopThread()
        self._core = self._loop.run(_made(lambda: Dispatcher(router)))
        self.router = RolloutRouter(self._core, self._loop)
        self._fatal: VerlServerError | None = None
        self._loras: dict[str, tuple[dict[str, Any], Json]] = {}
        """Adapters that all servers have: tensors and config."""
        self._loras_lock = threading.RLock()
        self._router_process: RouterProcess | None = None
        targets = RoutingTargets([InProcessRouter(self._core, self._loop)])
        fleet = Fleet(
            lambda name: Replica(name, self._launcher, args, alone),
            int(str(args.get("weight_version", "0"))),
            targets,
            on_event,
        )
        super().__init__(
            fleet, RecoveryLoop(fleet, targets, recovery or RecoveryConfig(), self._prepare), targets, alone
        )
        try:
            if router_process:
                self._router_process = RouterProcess(
                    router or RouterConfig(), config.log_dir, lambda: fleet_exposition(fleet).decode()
                )
                targets.add(self._router_process)
            if config.router_ip is not None:
                targets.add(SglangRouterTarget(config))
            for started in [fleet.pool.submit(self._start, fleet.new()) for _ in range(replicas)]:
                started.result()
        except BaseException:
            self.shutdown()
            raise
        self._recovery_loop.start()

    def _start(self, replica: Replica) -> None:
        replica.start(self._recovery_loop.serve)

    @property
    def replicas(self) -> list[Replica]:
        return self._fleet.replicas

    @property
    def router_url(self) -> str:
        """Of the router's process."""
        return self._process.url

    @property
    def router_key(self) -> str:
        """The key that it asks for."""
        return self._process.api_key

    @property
    def router_restarts(self) -> int:
        """How often the router's process was lost and started again."""
        return self._process.restarts

    @property
    def _process(self) -> RouterProcess:
        if self._router_process is None:
            raise BadInputError("this fleet has no router process: make it with router_process=True")
        return self._router_process

    def metrics(self) -> bytes:
        """Of the router in this process and of the fleet, in Prometheus' text format."""
        return router_metrics(self._core) + fleet_exposition(self._fleet)

    def add_replica(self) -> str:
        """Start one more; returns its name when it serves (or waits for the next update).

        Raises NotReadyError while memory is released.
        """
        if self._fleet.asleep:
            raise NotReadyError("the memory of this fleet is lent: resume_memory_occupation first")
        replica = self._fleet.new()
        try:
            self._start(replica)
        except BaseException:
            self._fleet.forget(replica)
            replica.stop()
            raise
        self._recovery_loop.bring_up_to_date(replica)
        return replica.name

    def remove_replica(self, name: str, drain_s: float = 60.0) -> None:
        """Give it no more requests, let it finish for up to `drain_s` seconds, and end it; the rest goes elsewhere."""
        fleet = self._fleet
        with fleet.lock:
            replica = fleet.named(name)
            if len(fleet.replicas) == 1:
                raise BadInputError(f"{name} is the last replica of this fleet: shut the fleet down instead")
            fleet.turn(replica, ReplicaState.DRAINING)
        self._targets.settle()
        deadline = time.monotonic() + drain_s
        while time.monotonic() < deadline and self._targets.seen(name).requests:
            time.sleep(0.02)
        with fleet.lock:
            fleet.forget(replica)
            fleet.turn(replica, ReplicaState.REMOVED)
        replica.stop()

    # -- a backend of VerlEngine --------------------------------------------------------------------

    @property
    def nearest_transport(self) -> str:
        """Raises BadInputError for a fleet that takes no weights."""
        capabilities = capabilities_of(self.mode)
        if not capabilities.takes_weights:
            raise BadInputError(
                f"a {self.mode} fleet keeps the weights of its checkpoint: use it by itself, not through VerlEngine"
            )
        return capabilities.transport or ("shared_memory" if self._launcher.is_near else "distributed")

    @property
    def trainer_host(self) -> str:
        return self._launcher.trainer_host

    @property
    def adapter(self) -> HttpServerEngineAdapter:
        """Of a replica that serves."""
        for adapter in self._fleet.serving():
            return adapter
        raise self._fatal or ServerDiedError("no replica of the fleet is up")

    def generate(self, **request: Any) -> Any:
        bodies = one_by_one(request)
        if bodies is None:
            return self._loop.run(self._core.generate(request))
        return self._loop.run(_all(self._core, bodies))

    async def async_generate(self, **request: Any) -> Any:
        return await asyncio.to_thread(self.generate, **request)

    def generate_stream(self, **request: Any) -> Iterator[Json]:
        return self.adapter.generate_stream(**request)

    def async_generate_stream(self, **request: Any) -> AsyncIterator[Json]:
        return self.adapter.asynchronous.generate_stream(**request)

    def flush_cache(self) -> None:
        self._every(lambda adapter: adapter.flush_cache())

    def load_lora(self, name: str, tensors: Mapping[str, Any], config: Json) -> None:
        """Into all servers, and into those that start later."""
        with self._loras_lock:
            self._every(lambda adapter: adapter.load_lora_adapter_from_tensors(name, tensors, config))
            self._loras[name] = dict(tensors), config

    def unload_lora(self, name: str) -> None:
        with self._loras_lock:
            self._loras.pop(name, None)
            self._every(lambda adapter: adapter.unload_lora_adapter(name))

    def _prepare(self, adapter: HttpServerEngineAdapter, begin: Callable[[], None]) -> None:
        """Give a new server the adapters that the others have, then let it begin."""
        with self._loras_lock:
            for name, (tensors, config) in self._loras.items():
                adapter.load_lora_adapter_from_tensors(name, tensors, config)
            begin()

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Lend the memory of all replicas (SGLang's tags; None: all of it).

        Raises BadInputError for a fleet that has its devices for itself, ServerBusyError while requests run.
        """
        if not capabilities_of(self.mode).lends_memory:
            raise BadInputError(f"a {self.mode} fleet has its devices for itself: there is nobody to lend memory to")
        fleet, wanted = self._fleet, frozenset(memory_tags(tags))
        if again := sorted(fleet.asleep & wanted):
            raise BadInputError(f"{again} is released already")
        before, undefined = fleet.asleep, fleet.undefined
        fleet.hold(True)  # no new requests
        try:
            self._targets.settle()
            if busy := sum(self._targets.seen(one.name).requests for one in self.replicas):
                raise ServerBusyError(f"{busy} requests run in the fleet: wait for them or abort them, then release")
            fleet.sleep(before | wanted)  # and no new servers
            try:
                self._release(wanted)
            except BaseException:
                fleet.undefined = undefined
                fleet.sleep(before)
                raise
        finally:
            fleet.hold(False)

    def _release(self, wanted: frozenset[str]) -> None:
        for one in self.replicas:
            if one.adapter is None:
                one.give_way(True)  # a start that is under way
        servers = self._fleet.up()
        try:
            self._on(servers, lambda adapter: adapter.release_memory_occupation(sorted(wanted)))
        except VerlServerError as error:  # all of them or none
            for one, adapter in servers:
                if adapter.asynchronous.asleep & wanted:  # what it had is lost
                    self._recovery_loop.dead(one, adapter, error)
            raise

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take it back. Weights come back undefined: push them. A colocated fleet loads its checkpoint again."""
        fleet = self._fleet
        wanted = fleet.asleep if tags is None else frozenset(memory_tags(tags))
        if not wanted or wanted - fleet.asleep:
            raise BadInputError(f"{sorted(wanted - fleet.asleep) or 'nothing'} is released; released: {fleet.asleep}")
        servers = fleet.up()  # who died asleep is started when all are awake
        if capabilities_of(self.mode).takes_weights:
            self._on(servers, lambda adapter: _wake(adapter, wanted, None))
        else:  # weights that came back but were not loaded must never be served
            self._on(servers, lambda adapter: _wake(adapter, wanted, self._model_path), fatal=VerlServerError)
            if MemoryTag.WEIGHTS in wanted:
                fleet.defined(whole=True)
        fleet.sleep(fleet.asleep - wanted)

    @property
    def asleep(self) -> frozenset[str]:
        return self._fleet.asleep

    def fail(self, error: VerlServerError) -> None:
        self._fatal = self._fatal or error
        for one in self.replicas:
            if one.adapter is not None:
                one.adapter.asynchronous.fail(error)

    # -- the end ------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End all servers. Safe to call twice."""
        if self._fleet.closed.is_set():
            return
        self._fleet.closed.set()
        with contextlib.ExitStack() as steps:  # last in, first out
            steps.callback(self._loop.close)
            steps.callback(self._fleet.close)
            steps.callback(self._launcher.close)
            steps.callback(lambda: self._fleet.pool.shutdown(wait=True, cancel_futures=True))
            steps.callback(self._recovery_loop.join)
            steps.callback(_all_at_once, [one.stop for one in self.replicas])
            steps.callback(self._targets.close)

    def __enter__(self) -> RolloutManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _wake(adapter: HttpServerEngineAdapter, tags: frozenset[str], model: str | None) -> None:
    """Resume those of `tags` that this server has released; weights from `model`, before anything goes on."""
    mine = tags & adapter.asynchronous.asleep
    if not mine:
        return
    if model is None or MemoryTag.WEIGHTS not in mine:
        adapter.resume_memory_occupation(sorted(mine))
        return
    goes_on = mine == adapter.asynchronous.asleep and not adapter.asynchronous.paused
    if goes_on:
        adapter.pause_generation()
    adapter.resume_memory_occupation(sorted(mine))
    adapter.update_weights_from_disk(model)
    if goes_on:
        adapter.continue_generation()


def _all_at_once(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def _made(make: Callable[[], Dispatcher]) -> Dispatcher:
    return make()


async def _all(core: Dispatcher, bodies: Sequence[Json]) -> list[Json]:
    return await together(core.generate(body) for body in bodies)
