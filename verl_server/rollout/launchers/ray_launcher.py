"""`RayLauncher` and `PlacedLauncher`: start the servers of a fleet on a Ray cluster. `discover`: finds those of a job.

A server has one actor on each of its nodes, in a placement group. The actor `verl_server_{i}_{node}` starts the server
on its node, watches it and ends it. Requests and weights do not go through Ray. The actor of the first node
(`verl_server_{i}_0`) gives other jobs the server's address, see `discover`. A server ends with its actor, and an actor
ends with the job that created it.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.server_engine import SECRET_ARGUMENTS
from verl_server.config import AdapterConfig, RemoteServer
from verl_server.errors import BadInputError, ServerError, StartupError, UnsupportedError, from_wire
from verl_server.ranks.placement import machine_id
from verl_server.rollout.modes import ParallelConfig, require_devices
from verl_server.server.environment import VISIBLE_DEVICES
from verl_server.server.process import AbortCheck

try:
    import ray
    from ray.exceptions import ActorDiedError, RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError as error:
    raise UnsupportedError(
        "starting replicas on a Ray cluster requires the package ray: pip install 'verl-server[ray]'"
    ) from error

from verl_server.rollout.launchers.ray_server import (
    ACTOR_OPTIONS,
    ANSWER_TIMEOUT_S,
    POLL_INTERVAL_S,
    RayServer,
    ServerActor,
    call_actors,
    end_actors,
    first_line,
    node_arguments,
)
from verl_server.types import Json
from verl_server.validation import check_arguments

logger = logging.getLogger(__name__)


# -- Ray start --------------------------------------------------------------------------------------
# The start of one server on the nodes of its Ray actors.

FIRST_ANSWER_TIMEOUT_S = 120.0
"""Seconds within which a new actor answers. The link to its node may be cut for a part of them."""


def ask(
    call: Callable[[], list[Future[Any]]], timeout_s: float, check_abort: AbortCheck, problem: str
) -> Iterator[list[Any]]:
    """The results of the futures that `call` returns. It is called again after each list, and after a silence.

    Raises StartupError after `timeout_s` seconds, or the error of `check_abort`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        futures, asked_at = call(), time.monotonic()
        while time.monotonic() - asked_at < ANSWER_TIMEOUT_S:
            if time.monotonic() > deadline:
                raise StartupError(f"{problem} after {timeout_s:g} s")
            if (reason := check_abort()) is not None:
                raise reason
            done, waiting = wait(futures, POLL_INTERVAL_S, FIRST_EXCEPTION)
            for future in done:
                future.result()  # raises the error of the first call that has failed
            if not waiting:
                yield [future.result() for future in futures]
                break


def start_with_actors(
    name: str,
    new_actors: Iterable[Any],
    server_args: Mapping[str, Any],
    config: AdapterConfig,
    envs: Sequence[Mapping[str, str]],
    check_abort: AbortCheck,
    free_resources: Callable[[], None],
) -> tuple[HttpServerEngineAdapter, set[str]]:
    """Start the server `name` with one actor on each node. Returns its adapter and the machine ids of the nodes.

    `envs`: variables to add to the environment of the server, for each node. `free_resources` returns the devices to
    Ray, also if the start fails. Raises StartupError, the error of the first node that has failed, and that of
    `check_abort`.
    """
    actors: list[Any] = []
    try:
        for actor in new_actors:
            actors.append(actor)  # those before an error are ended
        problem = f"an actor of {name} does not answer"
        nodes: list[Json] = next(
            ask(lambda: call_actors(actors, "describe_node"), FIRST_ANSWER_TIMEOUT_S, check_abort, problem)
        )
        head = _start_on_nodes(name, actors, nodes, server_args, config, envs, check_abort)[0]
        adapter = HttpServerEngineAdapter.attach(
            head["base_url"],
            api_key=head["api_key"],
            admin_api_key=head["admin_api_key"],
            config=config,
            process=RayServer(name, actors, free_resources, head["pid"]),
        )
    except BaseException as failure:
        end_actors(actors, free_resources, config.timeouts.stop_s)
        if isinstance(failure, RayError):
            raise StartupError(f"{name} did not start: {first_line(failure)}") from failure
        raise
    return adapter, {node["machine"] for node in nodes}


def _start_on_nodes(
    name: str,
    actors: Sequence[Any],
    nodes: Sequence[Json],
    server_args: Mapping[str, Any],
    config: AdapterConfig,
    envs: Sequence[Mapping[str, str]],
    check_abort: AbortCheck,
) -> list[Json]:
    """Start the server `name` on all of its nodes at the same time, because the nodes wait for each other.

    `nodes`: what `ServerActor.describe_node` returned. Returns what `ServerActor.start` returned.
    """
    keys = {key: server_args.get(key) or secrets.token_urlsafe(32) for key in SECRET_ARGUMENTS}
    arguments = [
        (actor, node_arguments({**server_args, **keys}, node, nodes), config, dict(env))
        for node, (actor, env) in enumerate(zip(actors, envs, strict=True))
    ]
    timeout_s, problem = config.timeouts.start_s + ANSWER_TIMEOUT_S, f"{name} was not ready"
    replies: list[Json]
    for replies in ask(
        lambda: [call_actors([actor], "start", *rest)[0] for actor, *rest in arguments], timeout_s, check_abort, problem
    ):
        for reply in replies:
            if "error" in reply:
                raise from_wire(reply["error"])
        if all(replies):
            return replies
    raise AssertionError("unreachable: `ask` ends with an error")


# -- Ray launcher -----------------------------------------------------------------------------------

NAMESPACE = "verl_server"
ENDING_S = 10.0
"""Seconds within which the actors of a job that has ended are ended by Ray."""


class RayLauncher:
    """Starts servers on any nodes of a Ray cluster, each with its own GPUs, or CPUs on a cluster without GPUs.

    Servers bind the addresses of their nodes, so all nodes can reach them, and their keys travel through Ray. Use it on
    a network that you trust.
    """

    @check_arguments()
    def __init__(self, address: str | None = None, namespace: str = NAMESPACE) -> None:
        """`address`: address of the cluster; None means "auto". Without effect when Ray is initialized already.

        `namespace`: Ray namespace of the actors. Raises ServerError if no cluster is found, and BadInputError for an
        address that is not HOST:PORT.
        """
        self._namespace = namespace
        self._owns_connection = not ray.is_initialized()
        if self._owns_connection:
            _connect(address, namespace)
        self._parallel_config = ParallelConfig()
        self._lock = threading.Lock()
        self._machines: dict[str, set[str]] = {}
        """Machine ids of each replica's nodes."""
        self._is_pinned = False
        """Whether later servers are started on this machine only."""

    @property
    def _device(self) -> str:
        return "GPU" if ray.cluster_resources().get("GPU") else "CPU"

    def reserve(self, parallel_config: ParallelConfig, replicas: int, env: Mapping[str, str]) -> None:
        if VISIBLE_DEVICES in env:
            raise BadInputError(
                f"Ray chooses the GPUs of each replica: leave {VISIBLE_DEVICES} out of env", argument="env"
            )
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if parallel_config.nnodes > len(nodes):
            raise BadInputError(f"one replica takes nnodes={parallel_config.nnodes}; the cluster has {len(nodes)}")
        device = self._device
        largest = max(int(node["Resources"].get(device, 0)) for node in nodes)
        needed = parallel_config.devices_per_node
        if needed > largest:
            raise BadInputError(f"one replica takes {needed} of {device} on a node; the largest node has {largest}")
        require_devices(parallel_config, replicas, int(ray.cluster_resources().get(device, 0)))
        self._parallel_config = parallel_config

    def start_server(
        self,
        name: str,
        server_args: Mapping[str, Any],
        config: AdapterConfig,
        env: Mapping[str, str],
        check_abort: AbortCheck,
    ) -> HttpServerEngineAdapter:
        num_nodes = self._parallel_config.nnodes
        resources = {self._device: float(self._parallel_config.devices_per_node)}
        if self._is_pinned:
            resources[f"node:{ray.util.get_node_ip_address()}"] = 0.001
        group = placement_group([dict(resources) for _ in range(num_nodes)], strategy="STRICT_SPREAD")

        def create_actors() -> Iterator[Any]:
            no_room = f"the cluster has no free resources for {name} ({resources})"
            next(ask(lambda: [group.ready().future()], config.timeouts.start_s, check_abort, no_room))
            for node in range(num_nodes):
                yield self._create_actor(f"{name}_{node}", group, node, resources, config, check_abort)

        adapter, machines = start_with_actors(
            name, create_actors(), server_args, config, [env] * num_nodes, check_abort,
            lambda: remove_placement_group(group),
        )  # fmt: skip
        with self._lock:
            self._machines[name] = machines
        return adapter

    def _create_actor(
        self,
        name: str,
        group: Any,
        node: int,
        resources: Mapping[str, float],
        config: AdapterConfig,
        check_abort: AbortCheck,
    ) -> Any:
        """Create an actor. Waits while an earlier actor of the same name has not ended yet."""
        started = time.monotonic()
        while True:
            try:
                return (
                    ray.remote(ServerActor)
                    .options(
                        name=name,
                        namespace=self._namespace,
                        **ACTOR_OPTIONS,
                        scheduling_strategy=PlacementGroupSchedulingStrategy(group, node),
                        num_cpus=resources.get("CPU", 0),
                        num_gpus=resources.get("GPU", 0),
                    )
                    .remote()
                )
            except ValueError as error:  # an actor has the name already
                waited_s = time.monotonic() - started
                if waited_s > config.timeouts.start_s or (waited_s > ENDING_S and self._answers(name)):
                    raise StartupError(
                        f"another fleet uses the name {name} in the namespace {self._namespace} of this Ray cluster; "
                        "give each fleet a namespace of its own: RayLauncher(namespace=...)"
                    ) from error
                if (reason := check_abort()) is not None:
                    raise reason from error
                time.sleep(POLL_INTERVAL_S)

    def _answers(self, name: str) -> bool:
        """Whether the actor of this name lives."""
        try:
            actor = ray.get_actor(name, namespace=self._namespace)
            call_actors([actor], "remote_server")[0].result(ANSWER_TIMEOUT_S)
        except (RayError, ValueError, TimeoutError):
            return False
        return True

    def forget_replica(self, name: str) -> None:
        with self._lock:
            self._machines.pop(name, None)

    def pin_to_local_machine(self) -> bool:
        with self._lock:
            self._is_pinned = all(machines == {machine_id()} for machines in self._machines.values())
        return self._is_pinned

    @property
    def trainer_host(self) -> str:
        return "127.0.0.1" if self._is_pinned else str(ray.util.get_node_ip_address())

    def close(self) -> None:
        """Disconnect from the cluster, unless Ray was initialized before this launcher was created."""
        if self._owns_connection:
            ray.shutdown()


def discover(address: str | None = None, namespace: str = NAMESPACE) -> dict[str, RemoteServer]:
    """The servers of the fleets in a Ray namespace, by replica name. They belong to the job that started them.

    Connects this process to the cluster at `address` (None: "auto") if it is not connected. It stays connected.
    Raises ServerError if no cluster is found or an actor cannot be reached, and BadInputError for an address that is
    not HOST:PORT.
    """
    if not ray.is_initialized():
        _connect(address, namespace)
    servers = {}
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == namespace and (found := re.fullmatch(r"(verl_server_\d+)_0", entry["name"])):
            try:
                actor = ray.get_actor(entry["name"], namespace=namespace)
                server = ray.get(actor.remote_server.remote(), timeout=ANSWER_TIMEOUT_S)
            except (ActorDiedError, ValueError):  # the actor has just ended
                continue
            except RayError as error:  # its server may serve: the list would be wrong without it
                raise ServerError(f"the actor {entry['name']} does not answer now: {first_line(error)}") from error
            if server is not None:
                servers[found[1]] = RemoteServer(**server)
    return servers


def _connect(address: str | None, namespace: str) -> None:
    try:
        ray.init(address=address or "auto", namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise ServerError(
            f"no Ray cluster is found: {error} Start one on this machine (`ray start --head`), or pass the address of "
            "another machine's cluster as HOST:PORT"
        ) from error
    except ValueError as error:
        raise BadInputError(f"{error}; pass the address as HOST:PORT") from error


# -- Placed launcher --------------------------------------------------------------------------------
# The owner of the fleet chooses the places, for example those of the trainer ranks that share their GPUs with the
# server. No Ray resources are reserved: the actors of the owner have them already.


@dataclass(frozen=True)
class NodePlace:
    """Where the part of a server runs that belongs to one node."""

    node_id: str
    """Ray's id of the node."""
    devices: tuple[str, ...] = ()
    """GPUs as `CUDA_VISIBLE_DEVICES` names them. Empty: the server runs on the CPU."""

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of the server."""
        return {VISIBLE_DEVICES: ",".join(self.devices)} if self.devices else {}


class PlacedLauncher:
    """Starts each server at the place that `assign` has given to its replica.

    A server on one node, which is the node of this process, is a process tree of this process. Other servers have one
    Ray actor on each of their nodes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, Sequence[NodePlace]] = {}
        self._machines: dict[str, set[str]] = {}
        """Machine ids of the nodes of each replica whose server has been started."""
        self._node_id: str = ray.get_runtime_context().get_node_id()

    def assign(self, name: str, places: Sequence[NodePlace]) -> None:
        """Start the servers of the replica `name` at `places`, one for each node of the server."""
        with self._lock:
            self._places[name] = list(places)

    def reserve(self, parallel_config: ParallelConfig, replicas: int, env: Mapping[str, str]) -> None:
        """Does nothing: the places are given by `assign`."""

    def start_server(
        self,
        name: str,
        server_args: Mapping[str, Any],
        config: AdapterConfig,
        env: Mapping[str, str],
        check_abort: AbortCheck,
    ) -> HttpServerEngineAdapter:
        places = self._places[name]
        if [place.node_id for place in places] == [self._node_id]:
            args = {**server_args, "host": server_args.get("host") or self._host()}
            adapter = HttpServerEngineAdapter(
                config=config, env={**env, **places[0].env}, check_abort=check_abort, **args
            )
            machines = {machine_id()}
        else:
            create = ray.remote(ServerActor).options
            actors = [
                create(
                    num_cpus=0,
                    **ACTOR_OPTIONS,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False),
                ).remote()
                for place in places
            ]
            envs = [{**env, **place.env} for place in places]
            adapter, machines = start_with_actors(name, actors, server_args, config, envs, check_abort, lambda: None)
        with self._lock:
            self._machines[name] = machines
        return adapter

    def _host(self) -> str:
        """The loopback address if the cluster has one node; otherwise the address that other nodes reach."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return "127.0.0.1" if len(nodes) == 1 else str(ray.util.get_node_ip_address())

    def forget_replica(self, name: str) -> None:
        with self._lock:
            self._places.pop(name, None)
            self._machines.pop(name, None)

    @property
    def machines(self) -> frozenset[str]:
        """Machine ids of all nodes on which servers were started."""
        with self._lock:
            return frozenset[str]().union(*self._machines.values())

    def pin_to_local_machine(self) -> bool:
        """Whether all servers run on this machine. Their places do not change, so later servers do, too."""
        return self.machines == {machine_id()}

    @property
    def trainer_host(self) -> str:
        return "127.0.0.1" if self.pin_to_local_machine() else str(ray.util.get_node_ip_address())

    def close(self) -> None:
        """Does nothing: the servers belong to their replicas."""
