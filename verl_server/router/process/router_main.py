"""The router process: one HTTP server over one dispatcher, whose replicas come from a source.

`verl-server router` calls `serve_static` with a fixed list of servers. A fleet starts this module as a program (see
`supervisor.py`) and sends the statuses of its replicas through standard input.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Callable, Sequence
from typing import Protocol

import uvloop
from aiohttp import web

from verl_server.config import RemoteServer, RouterConfig
from verl_server.errors import BadInputError
from verl_server.garbage_collection import collect_garbage_rarely
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http_server import RouterHttpServer
from verl_server.router.process.pipe_replicas import PipeReplicas
from verl_server.router.process.static_replicas import StaticReplicas
from verl_server.router.rl_wire.replica_control import ReplicaControl
from verl_server.server.ports import join_host_port

DRAIN_TIMEOUT_S = 5.0
"""Seconds that running requests may continue after the source has ended, by default."""
LISTEN_BACKLOG = 4096


class ReplicaSource(Protocol):
    """Where a router process gets its replicas from."""

    async def start(self, dispatcher: Dispatcher) -> None:
        """Add the replicas that are known at the start."""

    async def run(self, dispatcher: Dispatcher) -> None:
        """Keep the dispatcher's replicas up to date. Returns when the router must end."""

    def metrics(self) -> str:
        """Additional metrics, in the text format of Prometheus."""

    @property
    def control(self) -> ReplicaControl | None:
        """Pauses and weights of the replicas, after `start`. None: whoever sends the replicas controls them."""

    async def close(self) -> None:
        """Close the source's connections."""


async def serve(
    source: ReplicaSource,
    config: RouterConfig,
    *,
    host: str,
    port: int,
    api_key: str,
    admin_api_key: str | None = None,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve requests until the source ends. `on_ready` receives the router's URL when it listens.

    `drain_timeout_s`: seconds that running requests may continue after that.
    `port` 0 takes any free port. Raises OSError when the address cannot be used.
    """
    dispatcher = Dispatcher(config)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(source.close)
        stack.push_async_callback(dispatcher.close)
        await source.start(dispatcher)
        http_server = RouterHttpServer(
            dispatcher, api_key, source.metrics, control=source.control, admin_api_key=admin_api_key
        )
        runner = web.ServerRunner(await http_server.create_server(), shutdown_timeout=drain_timeout_s)
        stack.push_async_callback(http_server.close)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, host, port, backlog=LISTEN_BACKLOG).start()
        address = runner.addresses[0]
        on_ready(f"http://{join_host_port(address[0], address[1])}")
        await source.run(dispatcher)


def serve_static(
    servers: Sequence[RemoteServer],
    *,
    host: str,
    port: int,
    api_key: str,
    admin_api_key: str | None,
    drain_timeout_s: float,
    on_ready: Callable[[str], None],
) -> None:
    """Run the router of `verl-server router` until SIGTERM, SIGINT or SIGHUP.

    `admin_api_key`: key of the routes that change weights. None: these routes are not offered. `drain_timeout_s`: see
    `serve`. Raises BadInputError for an unusable list of servers and for equal keys, OSError when the address cannot be
    used.
    """
    if admin_api_key is not None and hmac.compare_digest(admin_api_key.encode(), api_key.encode()):
        raise BadInputError("the admin key of a router must differ from its API key, which agents have")
    source = StaticReplicas(servers, has_control=admin_api_key is not None)
    collect_garbage_rarely()
    uvloop.run(
        serve(
            source,
            RouterConfig(),
            host=host,
            port=port,
            api_key=api_key,
            admin_api_key=admin_api_key,
            drain_timeout_s=drain_timeout_s,
            on_ready=on_ready,
        )
    )


async def _serve_pipe() -> None:
    source = await PipeReplicas.open()
    settings = source.settings
    await serve(
        source,
        RouterConfig(**settings["config"]),
        host=settings["host"],
        port=settings["port"],
        api_key=settings["api_key"],
    )


def main() -> None:
    """Run the router process of a fleet."""
    collect_garbage_rarely()
    with contextlib.suppress(BrokenPipeError):
        uvloop.run(_serve_pipe())


if __name__ == "__main__":
    main()
