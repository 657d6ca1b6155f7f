"""The router process of a fleet: told of replicas through its standard input, it tells what it sees through its output.

Wire: JSON lines. In: first the settings, then standings with a number. Out: again and again what it sees, and the
number of the last standings that it keeps to. It ends when standard input does: its fleet has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from typing import Any

import orjson
import uvloop
from aiohttp import web

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.config import AdapterConfig, Limits, RouterConfig
from verl_server.errors import ServerDiedError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http_server import RouterServer
from verl_server.router.targets import ReplicaStatus, apply

Json = dict[str, Any]

REPORT_S = 0.1


async def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its fleet decides, not the terminal
    stdin = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    settings = orjson.loads(await stdin.readline())
    limits = Limits(**settings["router"].pop("limits"))
    core = Dispatcher(RouterConfig(limits=limits, **settings["router"]))
    listener = socket.create_server((settings["host"], settings["port"]), backlog=4096)
    server = RouterServer(core, settings["api_key"])
    runner = web.ServerRunner(await server.server())
    await runner.setup()
    await web.SockSite(runner, listener).start()
    said = _Said(core, settings["parent"])
    reports = asyncio.create_task(said.repeat())
    engines: dict[str, AsyncHttpServerEngineAdapter] = {}
    try:
        while line := await stdin.readline():
            news = orjson.loads(line)
            for one in news["standings"]:
                engine = await _engine(engines, one["name"], one.pop("url"), one.pop("api_key"))
                apply(core, ReplicaStatus(engine=engine, **one))
            said.number, server.fleet_metrics = news["number"], news["metrics"]
    finally:
        reports.cancel()
        os._exit(0)  # who waits for a sample asks the next router: there is nothing to be tidy about


async def _engine(
    engines: dict[str, AsyncHttpServerEngineAdapter], name: str, url: str | None, api_key: str | None
) -> AsyncHttpServerEngineAdapter | None:
    """Of the replica's server. What runs on the one before fails now: its machine may never say that it is gone."""
    known = engines.get(name)
    if known is not None and (known.base_url != url or known.api_key != api_key):
        del engines[name]
        known.fail(ServerDiedError(f"the fleet has lost the server at {known.base_url}", url=known.base_url))
        await known.close_connections()
    if url is None:
        return None
    if name not in engines:
        engines[name] = AsyncHttpServerEngineAdapter.attach(url, api_key=api_key, config=AdapterConfig(repeats=0))
    return engines[name]


class _Said:
    """What this process says of itself."""

    def __init__(self, core: Dispatcher, parent: int) -> None:
        self._core, self._parent = core, parent
        self.number = 0

    async def repeat(self) -> None:
        """Until the fleet's process has gone, even if a child of that still holds the other end of standard input."""
        while os.getppid() == self._parent:
            now = time.monotonic()
            replicas = {
                one.name: [len(one.tokens), now - one.progress_at, one.load.admitted]
                for one in self._core.replicas.values()
            }
            os.write(1, orjson.dumps({"number": self.number, "replicas": replicas}) + b"\n")
            await asyncio.sleep(REPORT_S)
        os._exit(0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        uvloop.run(main())
