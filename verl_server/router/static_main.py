"""The process of `verl-server router`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence

import uvloop
from aiohttp import web

from verl_server.config import RemoteServer
from verl_server.router.http_server import RouterServer
from verl_server.router.static_replicas import AttachedFleet

#: How long requests may still run when the router is told to stop.
DRAIN_S = 5.0


def serve(servers: Sequence[RemoteServer], host: str, port: int, api_key: str, ready: Callable[[str], None]) -> None:
    """Route until SIGTERM or SIGINT; `ready` is told the URL. Raises BadInputError, OSError for a taken port."""
    uvloop.run(_serve(servers, host, port, api_key, ready))


async def _serve(
    servers: Sequence[RemoteServer], host: str, port: int, api_key: str, ready: Callable[[str], None]
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    fleet = AttachedFleet(servers)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(fleet.close)
        await fleet.start()
        server = RouterServer(fleet.core, api_key)
        runner = web.ServerRunner(await server.server(), shutdown_timeout=DRAIN_S)
        stack.push_async_callback(server.close)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, host, port, backlog=4096)
        await site.start()
        address = runner.addresses[0]
        name = f"[{address[0]}]" if ":" in address[0] else address[0]
        ready(f"http://{name}:{address[1]}")
        await stop.wait()
