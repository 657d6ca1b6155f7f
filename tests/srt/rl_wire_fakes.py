"""A router of `verl-server router` in this process, over servers that only remember what the router tells them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.config import PauseMode, RemoteServer
from verl_server.errors import ServerError, VerlServerError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http import RouterHttpServer
from verl_server.router.process.static_replicas import StaticReplicas
from verl_server.router.vllm_wire.control import ReplicaControl

KEY, ADMIN_KEY = "key-of-the-agents", "key-of-the-trainer"
STATIC = "verl_server.router.process.static_replicas"
REQUEST = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}


class FakeServer:
    """The part of an adapter that a router calls. A server that is silent is lost for each call."""

    def __init__(self, name: str, model: Path, version: int = 0) -> None:
        self.name, self.model, self.version = name, model, version
        self.base_url, self.api_key, self.connection = f"http://{name}:1", None, self
        self.http = SimpleNamespace(on_restart=None, process=name)
        self.is_silent = self.is_paused = False
        self.adapters: dict[str, Any] = {}
        self.failures: dict[str, list[VerlServerError]] = {}
        """Errors of the next calls of a method."""
        self.waits: dict[str, asyncio.Event] = {}
        """Calls of a method wait for an event."""
        self.calls: list[str] = []
        self.closed = 0

    async def _receive(self, method: str) -> None:
        self.calls.append(method)
        if method in self.waits:
            await self.waits[method].wait()
        if self.is_silent:
            raise ServerError("the connection broke")
        if self.failures.get(method):
            raise self.failures[method].pop(0)

    async def get_model_info(self) -> dict[str, Any]:
        await self._receive("info")
        return {"weight_version": str(self.version)}

    async def is_ready(self) -> bool:
        await self._receive("ready")
        return not self.is_paused

    async def get_server_info(self) -> dict[str, Any]:
        return {"model_path": str(self.model)}

    get_resolved_args = get_server_info

    async def pause_generation(self, mode: PauseMode) -> None:
        await self._receive("pause")
        self.is_paused = True

    async def continue_generation(self) -> None:
        await self._receive("continue")
        self.is_paused = False

    async def update_weights_from_disk(self, folder: str, flush_cache: bool, weight_version: int) -> None:
        await self._receive("update")
        assert self.is_paused
        self.version = weight_version

    async def list_lora_adapters(self) -> list[str]:
        await self._receive("list")
        return list(self.adapters)

    async def load_lora_adapter(self, name: str, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        await self._receive("load")
        assert name not in self.adapters
        self.adapters[name] = float(tensors["weight"])

    async def unload_lora_adapter(self, name: str) -> None:
        await self._receive("unload")
        del self.adapters[name]

    async def generate(self, **request: Any) -> Any:
        await asyncio.sleep(0.02)  # so that the requests are distributed over all servers
        while self.is_paused or self.is_silent:
            await asyncio.sleep(0.01)
        finish = {"type": "length", "length": 1}
        meta = {"weight_version": str(self.version), "finish_reason": finish, "server": self.name}
        return {"output_ids": [1], "meta_info": {**meta, "lora": self.adapters.get(request.get("lora_path", ""))}}

    def forget_server(self) -> None:
        """As the connection of an adapter does."""

    async def close_connections(self) -> None:
        self.closed += 1


class FakeRouter:
    """A router with its probes."""

    def __init__(self, servers: Iterable[FakeServer]) -> None:
        self.servers = {server.base_url: server for server in servers}
        self.dispatcher = Dispatcher()
        self.replicas = StaticReplicas([RemoteServer(url) for url in self.servers], has_control=True)
        self.url = ""

    @property
    def control(self) -> ReplicaControl:
        assert self.replicas.control is not None
        return self.replicas.control

    @property
    def admitted(self) -> str:
        """The names of the servers that may receive requests."""
        rows = self.dispatcher.snapshot().replicas
        return "".join(self.servers[row.name].name for row in rows if row.admitted)

    async def until_admitted(self, names: str) -> None:
        while self.admitted != names:
            await asyncio.sleep(0.01)

    async def probes(self) -> None:
        """Wait until each server was probed again."""
        await asyncio.sleep(0.2)

    async def generate(self, **fields: Any) -> list[Any]:
        """The `meta_info` of several requests."""
        calls = (self.dispatcher.generate({**REQUEST, **fields}) for _ in range(4 * len(self.servers)))
        return [reply["meta_info"] for reply in await asyncio.gather(*calls)]

    async def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with aiohttp.ClientSession() as session, session.post(self.url + path, json=body, headers=headers) as got:
            return got.status, await got.json()


@contextlib.asynccontextmanager
async def fake_router(patch: pytest.MonkeyPatch, *servers: FakeServer) -> AsyncIterator[FakeRouter]:
    """A router process, in this event loop, over these servers."""
    router = FakeRouter(servers)
    patch.setattr(f"{STATIC}.PROBE_INTERVAL_S", 0.02)
    patch.setattr(AsyncHttpServerEngineAdapter, "attach", lambda url, **_: router.servers[url])
    await router.replicas.start(router.dispatcher)
    http_server = RouterHttpServer(router.dispatcher, KEY, control=router.control, admin_api_key=ADMIN_KEY)
    runner = web.ServerRunner(await http_server.create_server())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    router.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield router
    finally:
        await router.replicas.close()
        await router.dispatcher.close()
        await runner.cleanup()
        await http_server.close()
