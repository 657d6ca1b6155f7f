"""The start of one server on the nodes of its Ray actors."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.sglang.server_arguments import SECRET_ARGUMENTS
from verl_server.config import AdapterConfig
from verl_server.errors import StartupError, from_wire
from verl_server.rollout.launchers.ray_server import ANSWER_TIMEOUT_S, POLL_INTERVAL_S, RayServer, node_arguments
from verl_server.server.supervisor import AbortCheck
from verl_server.types import Json


def wait_for(reference: Any, timeout_s: float, check_abort: AbortCheck, problem: str) -> Any:
    """The value of a Ray reference. Raises StartupError after `timeout_s` seconds, or the error of `check_abort`."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(GetTimeoutError):
            return ray.get(reference, timeout=POLL_INTERVAL_S)
        if (reason := check_abort()) is not None:
            raise reason
        if time.monotonic() > deadline:
            raise StartupError(f"{problem} after {timeout_s:g} s")


def describe_nodes(name: str, actors: Sequence[Any], check_abort: AbortCheck) -> list[Json]:
    """What `ServerActor.describe_node` returns on the nodes of the server `name`."""
    problem = f"an actor of {name} does not answer"
    return [wait_for(actor.describe_node.remote(), ANSWER_TIMEOUT_S, check_abort, problem) for actor in actors]


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
    calls = [
        actor.start.remote(node_arguments({**server_args, **keys}, node, nodes), config, dict(env))
        for node, (actor, env) in enumerate(zip(actors, envs, strict=True))
    ]
    deadline = time.monotonic() + config.timeouts.start_s + ANSWER_TIMEOUT_S
    waiting = list(calls)
    while waiting:  # a node that has failed is noticed while another one still waits for it
        ready, waiting = ray.wait(waiting, timeout=POLL_INTERVAL_S)
        for reply in ray.get(ready):
            if "error" in reply:
                raise from_wire(reply["error"])
        if (reason := check_abort()) is not None:
            raise reason
        if waiting and time.monotonic() > deadline:
            raise StartupError(f"{name} was not ready after {config.timeouts.start_s + ANSWER_TIMEOUT_S:g} s")
    replies: list[Json] = ray.get(calls)
    return replies


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
