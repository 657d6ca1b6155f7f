"""`PlacedLauncher`: starts the servers of a fleet on given nodes and GPUs of a Ray cluster.

The owner of the fleet chooses the places, for example those of the trainer ranks that share their GPUs with the server.
No Ray resources are reserved: the actors of the owner have them already.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.server_engine import SECRET_ARGUMENTS
from verl_server.config import AdapterConfig
from verl_server.errors import StartupError, from_wire
from verl_server.ranks.placement import machine_id
from verl_server.rollout.launchers.ray_server import (
    ACTOR_OPTIONS,
    ANSWER_TIMEOUT_S,
    POLL_INTERVAL_S,
    RayServer,
    ServerActor,
    end_actors,
    first_line,
    node_arguments,
)
from verl_server.rollout.modes import ParallelConfig
from verl_server.server.environment import VISIBLE_DEVICES
from verl_server.server.process import AbortCheck
from verl_server.types import Json

# -- Ray start --------------------------------------------------------------------------------------
# The start of one server on the nodes of its Ray actors.

FIRST_ANSWER_TIMEOUT_S = 120.0
"""Seconds within which a new actor answers. The link to its node may be cut for a part of them."""


def ask(call: Callable[[], Any], timeout_s: float, check_abort: AbortCheck, problem: str) -> Iterator[Any]:
    """The values of the Ray references that `call` returns. It is called again after each value, and after a silence.

    Raises StartupError after `timeout_s` seconds, or the error of `check_abort`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        references, asked_at = call(), time.monotonic()
        while time.monotonic() - asked_at < ANSWER_TIMEOUT_S:
            if time.monotonic() > deadline:
                raise StartupError(f"{problem} after {timeout_s:g} s")
            if (reason := check_abort()) is not None:
                raise reason
            with contextlib.suppress(GetTimeoutError):
                yield ray.get(references, timeout=POLL_INTERVAL_S)
                break


def describe_nodes(name: str, actors: Sequence[Any], check_abort: AbortCheck) -> list[Json]:
    """What `ServerActor.describe_node` returns on the nodes of the server `name`."""
    problem = f"an actor of {name} does not answer"
    replies: list[Json] = next(
        ask(lambda: [actor.describe_node.remote() for actor in actors], FIRST_ANSWER_TIMEOUT_S, check_abort, problem)
    )
    return replies


def start_on_nodes(
    name: str,
    actors: Sequence[Any],
    nodes: Sequence[Json],
    server_args: Mapping[str, Any],
    config: AdapterConfig,
    envs: Sequence[Mapping[str, str]],
    check_abort: AbortCheck,
) -> list[Json]:
    """Start the server `name` on all of its nodes at the same time, because the nodes wait for each other.

    `actors`, `nodes` (what `ServerActor.describe_node` returned) and `envs` (variables to add to the environment of the
    server) have one item for each node. Returns what `ServerActor.start` returned; raises the error of the first node
    that has failed.
    """
    keys = {key: server_args.get(key) or secrets.token_urlsafe(32) for key in SECRET_ARGUMENTS}
    arguments = [
        (actor, node_arguments({**server_args, **keys}, node, nodes), config, dict(env))
        for node, (actor, env) in enumerate(zip(actors, envs, strict=True))
    ]
    timeout_s, problem = config.timeouts.start_s + ANSWER_TIMEOUT_S, f"{name} was not ready"
    replies: list[Json]
    for replies in ask(
        lambda: [actor.start.remote(*rest) for actor, *rest in arguments], timeout_s, check_abort, problem
    ):
        for reply in replies:
            if "error" in reply:
                raise from_wire(reply["error"])
        if all(replies):
            return replies
    raise AssertionError("unreachable: `ask` ends with an error")


def attach_head(
    name: str, actors: Sequence[Any], head: Json, config: AdapterConfig, free_resources: Callable[[], None]
) -> HttpServerEngineAdapter:
    """The adapter of a server that `start_on_nodes` has started. `head`: the reply of its first node."""
    return HttpServerEngineAdapter.attach(
        head["base_url"],
        api_key=head["api_key"],
        admin_api_key=head["admin_api_key"],
        config=config,
        process=RayServer(name, actors, free_resources, head["pid"]),
    )


# -- Ray placed launcher ----------------------------------------------------------------------------


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
            adapter, machines = self._start_with_actors(name, places, server_args, config, env, check_abort)
        with self._lock:
            self._machines[name] = machines
        return adapter

    def _host(self) -> str:
        """The loopback address if the cluster has one node; otherwise the address that other nodes reach."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return "127.0.0.1" if len(nodes) == 1 else str(ray.util.get_node_ip_address())

    def _start_with_actors(
        self,
        name: str,
        places: Sequence[NodePlace],
        server_args: Mapping[str, Any],
        config: AdapterConfig,
        env: Mapping[str, str],
        check_abort: AbortCheck,
    ) -> tuple[HttpServerEngineAdapter, set[str]]:
        """The adapter of a server that actors run, and the machine ids of its nodes."""
        actors = [
            ray.remote(ServerActor)
            .options(
                num_cpus=0,
                **ACTOR_OPTIONS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False),
            )
            .remote()
            for place in places
        ]
        try:
            nodes = describe_nodes(name, actors, check_abort)
            envs = [{**env, **place.env} for place in places]
            replies = start_on_nodes(name, actors, nodes, server_args, config, envs, check_abort)
            adapter = attach_head(name, actors, replies[0], config, lambda: None)
        except BaseException as failure:
            end_actors(actors, config.timeouts.stop_s)
            if isinstance(failure, RayError):
                raise StartupError(f"{name} did not start: {first_line(failure)}") from failure
            raise
        return adapter, {node["machine"] for node in nodes}

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
