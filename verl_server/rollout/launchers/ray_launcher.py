"""`RayLauncher`: starts the servers of a fleet on a Ray cluster. `discover`: finds the servers of another job.

A server has one actor on each of its nodes, in a placement group. The actor `verl_server_{i}_{node}` starts the server
on its node, watches it and ends it. Requests and weights do not go through Ray. The actor of the first node
(`verl_server_{i}_0`) gives other jobs the server's address, see `discover`. A server ends with its actor, and an actor
ends with the job that created it.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import AdapterConfig, RemoteServer
from verl_server.errors import BadInputError, ServerError, StartupError, UnsupportedError
from verl_server.ranks.placement import machine_id
from verl_server.rollout.modes import ParallelConfig, require_devices
from verl_server.server.environment import VISIBLE_DEVICES
from verl_server.server.process import AbortCheck

try:
    import ray
    from ray.exceptions import ActorDiedError, RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise UnsupportedError(
        "starting replicas on a Ray cluster requires the package ray: pip install 'verl-server[ray]'"
    ) from error

from verl_server.rollout.launchers.ray_placed_launcher import ask, attach_head, describe_nodes, start_on_nodes
from verl_server.rollout.launchers.ray_server import (
    ACTOR_OPTIONS,
    ANSWER_TIMEOUT_S,
    POLL_INTERVAL_S,
    ServerActor,
    end_actors,
    first_line,
)
from verl_server.validation import check_arguments

logger = logging.getLogger(__name__)


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
        actors: list[Any] = []
        try:
            no_room = f"the cluster has no free resources for {name} ({resources})"
            next(ask(group.ready, config.timeouts.start_s, check_abort, no_room))
            for node in range(num_nodes):
                actor_name = f"{name}_{node}"
                actors.append(self._create_actor(actor_name, group, node, resources, config, check_abort))
            nodes = describe_nodes(name, actors, check_abort)
            replies = start_on_nodes(name, actors, nodes, server_args, config, [env] * num_nodes, check_abort)
            adapter = attach_head(name, actors, replies[0], config, lambda: remove_placement_group(group))
        except BaseException as failure:
            end_actors(actors, config.timeouts.stop_s)
            remove_placement_group(group)
            if isinstance(failure, RayError):
                raise StartupError(f"{name} did not start: {first_line(failure)}") from failure
            raise
        with self._lock:
            self._machines[name] = {node["machine"] for node in nodes}
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
            ray.get(ray.get_actor(name, namespace=self._namespace).remote_server.remote(), timeout=ANSWER_TIMEOUT_S)
        except (RayError, ValueError):
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
