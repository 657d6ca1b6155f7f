"""A proxy in front of each server of a fleet. `bench_chaos` lets a proxy answer generations with errors for a while."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from verl_server import AdapterConfig, HttpServerEngineAdapter, LocalLauncher
from verl_server.adapter.blocking import EventLoopThread
from verl_server.adapter.sglang.server_arguments import launch_sglang_server
from verl_server.server.process import AbortCheck

REQUEST_HEAD = re.compile(rb"^POST /generate[ ?]")
CONTENT_LENGTH = re.compile(rb"\r\nContent-Length: (\d+)", re.IGNORECASE)
CHUNK_BYTES = 1 << 16
ERROR_500 = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 15\r\nConnection: close\r\n\r\ninjected error\n"
ABORT_EVENT = {
    "text": "",
    "output_ids": [],
    "meta_info": {
        "id": "injected",
        "finish_reason": {"type": "abort", "message": "injected abort", "status_code": 503},
        "prompt_tokens": 1,
        "completion_tokens": 0,
    },
}
ABORT_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    + f"data: {json.dumps(ABORT_EVENT)}\n\ndata: [DONE]\n\n".encode()
)
ANSWERS: Mapping[str, bytes] = {"error": ERROR_500, "abort": ABORT_STREAM}
"""Injected answers to `/generate`: HTTP status 500, or a stream that SGLang aborts at once with status 503."""

_TASKS: set[asyncio.Task[None]] = set()
"""The open connections of all proxies. The event loop refers to tasks weakly: those that wait for each other and for
connections that nothing else refers to were removed by the garbage collector, which ended the process."""


class FaultProxy:
    """Forwards TCP connections to the server at `url`. While `fault` is set, it answers generations itself."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self.fault: str | None = None
        """A key of `ANSWERS`, or None. A generation that has begun before is not disturbed."""
        self.answered = 0
        """Number of generations that the proxy has answered itself."""
        self._server: asyncio.Server | None = None
        self.url = ""

    async def open(self) -> None:
        """Listen on a free port of this machine."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Stop listening. Open connections end with the server."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_writer: asyncio.StreamWriter | None = None
        replies: asyncio.Task[None] | None = None
        task = asyncio.current_task()
        assert task is not None
        _TASKS.add(task)
        task.add_done_callback(_TASKS.discard)
        try:
            while data := await reader.read(CHUNK_BYTES):
                if (fault := self.fault) is not None and REQUEST_HEAD.match(data):
                    await _read_body(reader, data)
                    writer.write(ANSWERS[fault])
                    self.answered += 1
                    await writer.drain()
                    return
                if server_writer is None:
                    server_reader, server_writer = await asyncio.open_connection(
                        self._target.hostname, self._target.port
                    )
                    replies = asyncio.create_task(_forward(server_reader, writer))
                server_writer.write(data)
                await server_writer.drain()
            if replies is not None and server_writer is not None:
                if not server_writer.is_closing():
                    server_writer.write_eof()
                await replies
        except (OSError, asyncio.IncompleteReadError):
            pass  # the server or the caller has ended
        finally:
            if replies is not None:
                replies.cancel()
            for end in (writer, server_writer):
                if end is not None:
                    end.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass the server's replies on. The end of the server's connection ends the caller's connection."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _read_body(reader: asyncio.StreamReader, data: bytes) -> None:
    """Read the rest of a request. A connection that is closed with unread bytes would lose the answer."""
    head, _, body = data.partition(b"\r\n\r\n")
    length = CONTENT_LENGTH.search(head)
    missing = int(length[1]) - len(body) if length is not None else 0
    if missing > 0:
        await reader.readexactly(missing)


class ProxiedLauncher(LocalLauncher):
    """Starts servers on this machine, each behind a `FaultProxy`."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = EventLoopThread()
        self._lock_proxies = threading.Lock()
        self.proxies: dict[str, FaultProxy] = {}
        """The proxy of each replica's present server, by the name of the replica."""

    def start_server(
        self,
        name: str,
        server_args: Mapping[str, Any],
        config: AdapterConfig,
        env: Mapping[str, str],
        check_abort: AbortCheck,
    ) -> HttpServerEngineAdapter:
        server = launch_sglang_server(server_args, config, env, check_abort)
        proxy = FaultProxy(server.base_url)
        try:
            self._loop.run(proxy.open())
        except BaseException:
            server.process.stop(config.timeouts.stop_s)
            raise
        with self._lock_proxies:
            before, self.proxies[name] = self.proxies.get(name), proxy
        if before is not None:
            self._loop.run(before.close())
        return HttpServerEngineAdapter.attach(
            proxy.url,
            api_key=server.api_key,
            admin_api_key=server.admin_api_key,
            config=config,
            process=server.process,
        )

    def close(self) -> None:
        for proxy in self.proxies.values():
            self._loop.run(proxy.close())
        self._loop.close()
