"""Servers all over a Ray cluster: one actor for each node of a replica, in placement groups. Only here is Ray known.

The actor `verl_server_{i}_{node}` starts the server on its node, watches it and ends it; the server's bytes do not go
through Ray. The head's actor (`verl_server_{i}_0`) tells other jobs where it is: see `discover`. A server dies with its
actor, an actor with the job that made it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.sglang.launch import launch_sglang_server
from verl_server.adapter.sglang.server_arguments import SECRET_ARGUMENTS
from verl_server.config import AdapterConfig, RemoteServer
from verl_server.errors import (
    BadInputError,
    ServerDiedError,
    ShutDownError,
    StartupError,
    UnsupportedError,
    VerlServerError,
    from_wire,
    to_wire,
)
from verl_server.rollout.parallel_config import ParallelConfig, require_room
from verl_server.server.exit_status import ExitNotifier, ExitStatus
from verl_server.server.ports import PortReservation, join_host_port
from verl_server.server.process import AbortCheck
from verl_server.weights.transports.group import machine_id

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise UnsupportedError("placing replicas by Ray needs it: pip install 'verl-server[ray]'") from error

logger = logging.getLogger(__name__)

Json = dict[str, Any]

NAMESPACE = "verl_server"
POLL_S = 0.5
ANSWER_S = 30.0
"""An actor whose node lives answers its short calls within this time."""


class ServerHost:
    """The actor. Its methods run in threads, so it answers while one of them waits."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._server: Any = None

    def meet(self) -> Json:
        """Where it runs, and an address there that is free."""
        host = ray.util.get_node_ip_address()
        reservation = PortReservation(host)
        reservation.release()
        return {"host": host, "machine": machine_id(), "free": join_host_port(host, reservation.port)}

    def start(self, server_args: Json, config: AdapterConfig) -> Json:
        """Where the server is, once it is ready; or the error, as it travels."""

        def check_abort() -> VerlServerError | None:
            return ShutDownError("the replica was stopped while it started") if self._stop.is_set() else None

        try:
            # The actor starts one server: a forkserver would only take memory.
            server = launch_sglang_server(server_args, replace(config, use_forkserver=False), {}, check_abort)
        except Exception as error:  # noqa: BLE001 - raised where the replica is started
            return {"error": to_wire(error)}
        with self._lock:
            self._server = server
        if self._stop.is_set():
            self.stop()
        keys = {"api_key": server.api_key, "admin_api_key": server.admin_api_key}
        return {"base_url": server.base_url, "pid": server.process.pid, **keys}

    def remote_server(self) -> Json | None:
        """For other jobs: the fields of a `RemoteServer`, once it is ready."""
        server = self._server
        if server is None or server.process.exit is not None:
            return None
        return {"base_url": server.base_url, "api_key": server.api_key, "admin_api_key": server.admin_api_key}

    def look(self, wait_s: float) -> Json:
        """Its end, if that comes within `wait_s`, and the processor time of its schedulers."""
        ended = self._server.process.wait_exit(wait_s)
        return {
            "exit": None if ended is None else asdict(ended),
            "seconds": 0.0 if ended is not None else self._server.process.scheduler_seconds(),
        }

    def stop(self) -> None:
        self._stop.set()
        with self._lock:
            if self._server is not None:
                self._server.process.stop()


class RayServer(ExitNotifier):
    """A `Supervisor` (adapter/ending.py) of a server that actors look after. Holds their handles."""

    def __init__(self, name: str, hosts: list[Any], give_back: Callable[[], None], pid: int) -> None:
        super().__init__()
        self._name, self._hosts, self._give_back = name, hosts, give_back
        self.pid: int | None = pid
        """On its own machine."""
        self._seconds = 0.0
        threading.Thread(target=self._watch, name=f"verl-server-{name}-watch", daemon=True).start()

    def _watch(self) -> None:
        """Ask all of its actors again and again; the first end is the server's."""
        while self._exit is None:
            try:
                looks = ray.get([host.look.remote(POLL_S) for host in self._hosts], timeout=ANSWER_S)
            except GetTimeoutError:
                continue  # a node that is busy; a dead one raises RayError
            except RayError as error:
                self.note_exit(ExitStatus(f"its Ray actor: {_first_line(error)}", None, ""))
                return
            except Exception as error:  # noqa: BLE001 - Ray itself was shut down
                self.note_exit(ExitStatus(f"Ray: {_first_line(error)}", None, ""))
                return
            self._seconds = sum(one["seconds"] for one in looks)
            for one in looks:
                if one["exit"] is not None:
                    self.note_exit(ExitStatus(**one["exit"]))

    def died(self, url: str) -> ServerDiedError:
        assert self._exit is not None
        return ServerDiedError(
            f"the server of {self._name} at {url} ended ({self._exit.describe()}) while it was needed",
            exit_code=self._exit.code,
            log_tail=self._exit.log_tail,
            url=url,
        )

    def scheduler_seconds(self) -> float:
        return self._seconds

    def stop(self, deadline_s: float = 10.0) -> None:
        _end(self._hosts, deadline_s)
        self.note_exit(ExitStatus("stop", None, ""))
        with contextlib.suppress(Exception):  # Ray may be gone, and with it what it lent
            self._give_back()


class RayLauncher:
    """Servers on any nodes of a Ray cluster, each with the devices that it needs (GPUs; CPUs where there is none).

    `address`: of the cluster, unless Ray is initialized already. Replicas are given addresses of their nodes, so they
    can be reached from all of them; keys travel by Ray: both belong on a network that you trust.
    """

    def __init__(self, address: str | None = None, namespace: str = NAMESPACE) -> None:
        self._namespace = namespace
        self._mine = not ray.is_initialized()
        if self._mine:
            ray.init(address=address or "auto", namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
        self._shape = ParallelConfig()
        self._lock = threading.Lock()
        self._machines: dict[str, set[str]] = {}
        self._stays_near = False

    @property
    def _device(self) -> str:
        return "GPU" if ray.cluster_resources().get("GPU") else "CPU"

    def admit(self, shape: ParallelConfig, replicas: int) -> None:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if shape.nnodes > len(nodes):
            raise BadInputError(f"one replica takes nnodes={shape.nnodes}; the cluster has {len(nodes)}")
        device = self._device
        largest = max(int(node["Resources"].get(device, 0)) for node in nodes)
        if shape.devices_per_node > largest:
            raise BadInputError(
                f"one replica takes {shape.devices_per_node} of {device} on a node; the largest node has {largest}"
            )
        require_room(shape, replicas, int(ray.cluster_resources().get(device, 0)))
        self._shape = shape

    def start(
        self, name: str, server_args: Mapping[str, Any], config: AdapterConfig, check_abort: AbortCheck
    ) -> HttpServerEngineAdapter:
        need = {self._device: float(self._shape.devices_per_node)}
        if self._stays_near:
            need[f"node:{ray.util.get_node_ip_address()}"] = 0.001
        group = placement_group([dict(need) for _ in range(self._shape.nnodes)], strategy="STRICT_SPREAD")
        hosts: list[Any] = []
        try:
            _wait(group.ready(), config.timeouts.start_s, check_abort, f"the cluster has no room for {name} ({need})")
            for node in range(self._shape.nnodes):
                hosts.append(self._host(f"{name.rsplit('_', 1)[0]}_{node}", group, node, need, config, check_abort))
            met = [
                _wait(one.meet.remote(), ANSWER_S, check_abort, f"an actor of {name} does not answer") for one in hosts
            ]
            keys = {name: server_args.get(name) or secrets.token_urlsafe(32) for name in SECRET_ARGUMENTS}
            calls = [
                one.start.remote(_args_of({**server_args, **keys}, node, met), config) for node, one in enumerate(hosts)
            ]  # at the same time: they wait for each other
            replies = [
                _wait(call, config.timeouts.start_s + ANSWER_S, check_abort, f"{name} was not ready in time")
                for call in calls
            ]
            _require_started(replies)
        except BaseException as failure:
            _end(hosts, config.timeouts.stop_s)
            remove_placement_group(group)
            if isinstance(failure, RayError):
                raise StartupError(f"{name} did not start: {_first_line(failure)}") from failure
            raise
        head = replies[0]
        with self._lock:
            self._machines[name] = {one["machine"] for one in met}
        server = RayServer(name, hosts, lambda: remove_placement_group(group), head["pid"])
        return HttpServerEngineAdapter.attach(
            head["base_url"],
            api_key=head["api_key"],
            admin_api_key=head["admin_api_key"],
            config=config,
            process=server,
        )

    def _host(
        self,
        name: str,
        group: Any,
        node: int,
        need: Mapping[str, float],
        config: AdapterConfig,
        check_abort: AbortCheck,
    ) -> Any:
        """A new actor; the one that had this name before may still be on its way out."""
        resources = {"num_cpus": need.get("CPU", 0), "num_gpus": need.get("GPU", 0)}
        deadline = time.monotonic() + config.timeouts.start_s
        while True:
            try:
                return (
                    ray.remote(ServerHost)
                    .options(
                        name=name,
                        namespace=self._namespace,
                        max_concurrency=8,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(group, node),
                        **resources,
                    )
                    .remote()
                )
            except ValueError as error:  # the name is taken
                if time.monotonic() > deadline:
                    raise StartupError(
                        f"an actor is called {name} already in the namespace {self._namespace}"
                    ) from error
                if (reason := check_abort()) is not None:
                    raise reason from error
                time.sleep(POLL_S)

    def leave(self, name: str) -> None:
        with self._lock:
            self._machines.pop(name, None)

    @property
    def is_near(self) -> bool:
        """Once that was true, replicas start only here: somebody relies on it."""
        self._stays_near = all(machines == {machine_id()} for machines in self._machines.values())
        return self._stays_near

    @property
    def trainer_host(self) -> str:
        return "127.0.0.1" if self._stays_near else str(ray.util.get_node_ip_address())

    def close(self) -> None:
        if self._mine:
            ray.shutdown()


def discover(address: str | None = None, namespace: str = NAMESPACE) -> dict[str, RemoteServer]:
    """The replicas of a fleet that another job of the cluster has, by name. They stay that job's.

    Connects this process to the cluster if it is not; it stays connected.
    """
    if not ray.is_initialized():
        ray.init(address=address or "auto", namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
    found = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == namespace and re.fullmatch(r"verl_server_\d+_0", entry["name"]):
            with contextlib.suppress(RayError, ValueError):  # it has just gone
                handle = ray.get_actor(entry["name"], namespace=namespace)
                server = ray.get(handle.remote_server.remote(), timeout=ANSWER_S)
                if server is not None:
                    found[entry["name"]] = RemoteServer(**server)
    return found


def _args_of(server_args: Mapping[str, Any], node: int, met: list[Json]) -> Json:
    """The arguments of one node's server."""
    args = {**server_args, "host": server_args.get("host") or met[node]["host"]}
    if len(met) > 1:
        args.update(nnodes=len(met), node_rank=node, dist_init_addr=met[0]["free"])
    return args


def _require_started(replies: list[Json]) -> None:
    for reply in replies:
        if "error" in reply:
            raise from_wire(reply["error"])


def _wait(reference: Any, limit_s: float, check_abort: AbortCheck, otherwise: str) -> Any:
    """The value, or StartupError after `limit_s`, or what `check_abort` returns."""
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(GetTimeoutError):
            return ray.get(reference, timeout=POLL_S)
        if (reason := check_abort()) is not None:
            raise reason
        if time.monotonic() > deadline:
            raise StartupError(f"{otherwise} after {limit_s:g} s")


def _end(hosts: list[Any], deadline_s: float) -> None:
    """Their servers, then the actors."""
    stops = [host.stop.remote() for host in hosts]
    with contextlib.suppress(Exception):  # dead already, or too slow: its server goes with it
        ray.get(stops, timeout=deadline_s)
    for host in hosts:
        with contextlib.suppress(Exception):
            ray.kill(host)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
