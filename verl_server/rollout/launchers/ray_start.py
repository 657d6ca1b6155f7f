"""The start of one server on the nodes of its Ray actors."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
