"""Small HTTP servers in place of SGLang, for what a real server does only by chance: lost answers, slow answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import orjson
from aiohttp import web

from verl_server.platforms.server_report import RELEASED_MEMORY
from verl_server.server.launch import join_host_port


@contextlib.asynccontextmanager
async def serving(server: web.Server, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """The URL of a running server. `port` 0: any free port."""
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, port, reuse_address=True).start()
    try:
        yield f"http://{join_host_port(host, runner.addresses[0][1])}"
    finally:
        await runner.cleanup()


class MemoryServer:
    """A server that releases and resumes memory, and records the paths of its requests."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        """Paths of the requests, without `/server_info`."""
        self.released: set[str] = set()
        self.num_requests = [0]
        """Number of running requests in the next answers to `/v1/loads`. The last number stays."""
        self.lost: list[str] = []
        """Paths whose next answer is lost: the request is carried out, and the connection breaks."""
        self.refused: list[str] = []
        """Paths whose next answer is the status 500, after the request was carried out."""
        self.slow_path = ""
        """Path of the requests that are carried out after one second."""

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body, path = await request.read(), request.path
        if path == "/server_info":
            state = {RELEASED_MEMORY: sorted(self.released)}
            return web.json_response({"model_path": "none", "device": "cpu", "internal_states": [state]})
        self.paths.append(path)
        if path == self.slow_path:
            await asyncio.sleep(1.0)
        if path == "/v1/loads":
            count = self.num_requests.pop(0) if len(self.num_requests) > 1 else self.num_requests[0]
            return web.json_response({"loads": [{"num_running_reqs": count}]})
        if path == "/release_memory_occupation":
            self.released.update(orjson.loads(body)["tags"])
        elif path == "/resume_memory_occupation":
            self.released.difference_update(orjson.loads(body)["tags"])
        if path in self.lost:
            self.lost.remove(path)
            assert request.transport is not None
            request.transport.abort()
        if path in self.refused:
            self.refused.remove(path)
            return web.json_response({}, status=500)
        return web.json_response({"success": True})
