"""Servers that are silent for a moment, paused by a router that has ended, or started again. The servers are fakes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rl_wire_fakes import ADMIN_KEY, KEY, STATIC, FakeRouter, FakeServer, fake_router
from test_rl_wire_missed import CONTROL, run, write_lora

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.config import RemoteServer, RouterConfig
from verl_server.errors import BadInputError, DeadlineError, NotReadyError, ServerError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.process import router_main
from verl_server.router.process.static_replicas import StaticReplicas
from verl_server.router.vllm_wire import calls as folders
from verl_server.router.vllm_wire import models
from verl_server.router.vllm_wire.lora import INCOMPLETE_UNLOAD
from verl_server.router.vllm_wire.models import ServedModels

Tiny = Callable[..., Path]
NO_MODEL = Path("/no/model")


def fakes(names: str, version: int = 0) -> list[FakeServer]:
    return [FakeServer(name, NO_MODEL, version) for name in names]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


# -- probes that are missed ----------------------------------------------------------------------------


def test_a_server_that_was_silent_keeps_its_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is not unloaded, which would wait for its running requests, if the server still lists it."""
    monkeypatch.setattr(f"{STATIC}.RETURN_TIMEOUT_S", 0.4)
    a, b = fakes("ab")

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            await router.control.load_lora_adapter("policy", write_lora(tmp_path / "1", 1.0))
            await router.until_admitted("ab")
            for server in (a, b):
                server.waits["unload"] = asyncio.Event()
                server.is_silent = True
            await router.until_admitted("")
            a.is_silent = b.is_silent = False
            assert {meta["lora"] for meta in await router.generate(lora_path="policy")} == {1.0}
            await router.until_admitted("ab")
            assert "unload" not in a.calls + b.calls
            assert (a.calls + b.calls).count("load") == 2

    run(scenario)


class ServerWithAdapters(FakeServer):
    """A server with adapters of its command line."""

    async def get_resolved_args(self) -> dict[str, Any]:
        return {"lora_paths": [{"lora_name": "policy"}]}


def test_a_server_that_starts_with_adapters_loads_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = ServerWithAdapters("a", NO_MODEL)

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            await router.control.load_lora_adapter("policy", write_lora(tmp_path / "1", 1.0))
            await router.until_admitted("a")
            a.is_silent = True
            await router.until_admitted("")
            a.adapters["policy"] = 0.0  # another process, which has loaded the adapter of its command line
            a.is_silent = False
            assert {meta["lora"] for meta in await router.generate(lora_path="policy")} == {1.0}

    run(scenario)


def test_requests_wait_through_a_long_pause_with_a_missed_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{STATIC}.RETURN_TIMEOUT_S", 0.3)
    (a,) = fakes("a")

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            await router.control.load_lora_adapter("policy", write_lora(tmp_path / "1", 1.0))
            await router.until_admitted("a")
            await router.control.pause("keep")
            a.is_silent = True
            await router.until_admitted("")
            a.is_silent = False
            waiting = asyncio.ensure_future(router.generate())
            await asyncio.sleep(0.6)
            await router.control.resume()
            assert {meta["server"] for meta in await waiting} == {"a"}

    run(scenario)


def test_requests_wait_for_a_server_that_the_router_repairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Running requests of the old adapter delay its unloading for a longer time than requests wait otherwise."""
    monkeypatch.setattr(f"{STATIC}.RETURN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(f"{CONTROL}.REPAIR_TIMEOUT_S", 0.1)
    a, b = fakes("ab")

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            await router.control.load_lora_adapter("policy", write_lora(tmp_path / "1", 1.0))
            b.is_silent = True
            await router.control.load_lora_adapter("policy", write_lora(tmp_path / "2", 2.0))
            b.waits["unload"] = asyncio.Event()
            a.is_silent, b.is_silent = True, False
            await router.until_admitted("")
            waiting = asyncio.ensure_future(router.generate(lora_path="policy"))
            await asyncio.sleep(0.8)
            assert "the server could not do within 0.1 s what it has missed" in caplog.text
            b.waits.pop("unload").set()
            assert {meta["lora"] for meta in await waiting} == {2.0}

    run(scenario)


def test_an_odd_server_info_does_not_end_the_probes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OddServer(FakeServer):
        async def get_server_info(self) -> dict[str, Any]:
            return {"dp_size": "auto"}

    a = OddServer("a", NO_MODEL)

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            await router.until_admitted("a")
            await router.probes()
            a.is_silent = True
            await router.until_admitted("")
            a.is_silent = False
            await router.until_admitted("a")

    run(scenario)
    assert caplog.text.count("the /server_info of replica http://a:1 cannot be used: ValueError") == 1


# -- routers that end ----------------------------------------------------------------------------------


def test_a_router_that_ends_waits_for_a_running_update(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the servers would stay paused."""
    folder = tiny("qwen3")
    a = FakeServer("a", folder)
    router = FakeRouter([a])
    monkeypatch.setattr(AsyncHttpServerEngineAdapter, "attach", lambda url, **_: router.servers[url])

    async def scenario() -> None:
        a.waits["update"] = asyncio.Event()
        ready = asyncio.get_running_loop().create_future()
        source = StaticReplicas([RemoteServer(a.base_url)], has_control=True)
        settings: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "api_key": KEY, "admin_api_key": ADMIN_KEY}
        serving = asyncio.ensure_future(
            router_main.serve(source, RouterConfig(), **settings, drain_timeout_s=0.1, on_ready=ready.set_result)
        )
        router.url = await ready
        call = asyncio.ensure_future(router.call("/update_weights", {"weight_dir": str(folder)}))
        await until(lambda: "update" in a.calls)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.4)
        assert not serving.done()
        a.waits["update"].set()
        await serving
        assert (a.version, a.is_paused) == (1, False)
        await asyncio.gather(call, return_exceptions=True)

    run(scenario)


def test_requests_wait_a_limited_time_for_servers_that_another_router_has_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{STATIC}.RETURN_TIMEOUT_S", 0.3)
    (a,) = fakes("a")
    a.is_paused = True

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            waiting = asyncio.ensure_future(router.dispatcher.generate({"input_ids": [1]}))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            with pytest.raises(NotReadyError):
                await waiting
            a.is_paused = False  # the program that has paused the server continues it
            await router.until_admitted("a")
            a.is_paused = True  # later, a pause of another program lets requests wait in the server
            await router.probes()
            assert router.admitted == "a"

    run(scenario)


def test_a_pause_that_would_wait_for_paused_requests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = fakes("a")

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            await router.until_admitted("a")
            a.is_paused = True  # so that the request still runs when the router pauses the server
            running = asyncio.ensure_future(router.generate())
            await until(lambda: router.dispatcher.pool.running_requests > 0)
            await router.control.pause("keep")
            with pytest.raises(NotReadyError, match="the servers are paused already, and 4 running requests cannot"):
                await asyncio.wait_for(router.control.pause("wait"), 5.0)
            assert router.control.is_paused
            await router.control.resume()
            await running
            await router.control.pause("wait")
            await router.control.pause("wait")  # nothing runs

    run(scenario)


# -- weights -------------------------------------------------------------------------------------------


def test_servers_that_were_started_again_with_older_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """They receive requests when no server has newer weights. A server that was only silent has its weights again."""
    a, b = fakes("ab", 7)

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            await router.until_admitted("ab")
            a.is_silent = b.is_silent = True
            await router.until_admitted("")
            a.version, a.is_silent = 0, False
            await router.probes()
            assert router.admitted == "", "the other server may answer with version 7"
            b.is_silent = False
            await router.until_admitted("b")
            await router.probes()
            assert router.admitted == "b"
            b.is_silent = True
            await router.until_admitted("")
            b.version, b.is_silent = 0, False
            await router.until_admitted("ab")
            a.version = 1  # an update by another program, which has not reached the other server yet
            await router.until_admitted("a")
            b.version = 1
            await router.until_admitted("ab")
            a.version = 2
            await router.until_admitted("a")
            a.is_silent = True
            await router.probes()
            assert router.admitted == "", "requests wait for the other server"
            monkeypatch.setattr(f"{STATIC}.RETURN_TIMEOUT_S", 0.5)
            await router.until_admitted("b")
            assert not router.dispatcher.pool.replicas[a.base_url].will_serve, "lost before its version is forgotten"
            a.is_silent = False
            await router.until_admitted("a")

    run(scenario)


def test_a_folder_with_other_files_is_another_call(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = fakes("a")
    latest = write_lora(tmp_path / "latest", 1.0)
    body = {"lora_name": "policy", "lora_path": latest}

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            a.waits["load"] = asyncio.Event()
            calls = [asyncio.ensure_future(router.call("/load_lora_adapter", body)) for _ in range(2)]
            await until(lambda: "load" in a.calls)
            write_lora(Path(latest), 2.0)
            calls += [asyncio.ensure_future(router.call("/load_lora_adapter", body)) for _ in range(2)]
            await asyncio.sleep(0.2)
            a.waits["load"].set()
            assert [status for status, _ in await asyncio.gather(*calls)] == 4 * [200]
            assert (a.adapters, a.calls.count("load")) == ({"policy": 2.0}, 2)

            folder = tmp_path / "weights"
            shutil.copytree(tiny("qwen3"), folder)
            a.model = folder
            assert await router.control.update_weights(str(folder), 5) == 5
            assert await router.control.update_weights(str(folder), 5) == 5
            os.utime(folder / "model.safetensors")
            with pytest.raises(BadInputError, match="weight_version must be a whole number above 5"):
                await router.control.update_weights(str(folder), 5)
            assert a.calls.count("update") == 1

    run(scenario)


# -- adapters ------------------------------------------------------------------------------------------


def test_an_adapter_that_one_server_does_not_unload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router does not offer the adapter any more. The server unloads it before it receives requests again."""
    a, b = fakes("ab")

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            await router.control.load_lora_adapter("policy", write_lora(tmp_path / "1", 1.0))
            await router.until_admitted("ab")
            busy: Any = ServerError("busy", status=500)
            b.failures["unload"] = [busy]
            b.failures["list"] = 1000 * [busy]  # its probes must not repair it before the router is asked
            assert (await router.call("/unload_lora_adapter", {"lora_name": "policy"}))[0] == 500
            assert not router.control.lora_names
            assert router.admitted == "a"
            b.failures["list"].clear()
            await router.until_admitted("ab")
            assert (a.adapters, b.adapters) == ({}, {})

    run(scenario)


def test_a_load_that_no_server_answers_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = fakes("a")

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            await router.control.load_lora_adapter("policy", write_lora(tmp_path / "1", 1.0))
            a.is_silent = True
            body = {"lora_name": "policy", "lora_path": write_lora(tmp_path / "2", 2.0)}
            assert (await router.call("/load_lora_adapter", body))[0] == 503
            assert (await router.call("/unload_lora_adapter", {"lora_name": "policy"}))[0] == 503
            a.is_silent = False
            await router.until_admitted("a")
            assert router.control.lora_names == {"policy"}
            assert {meta["lora"] for meta in await router.generate(lora_path="policy")} == {1.0}

    run(scenario)


def test_an_incomplete_unload_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang does not list the name, and refuses it until it is unloaded."""
    found = importlib.util.find_spec("sglang.srt.managers.tokenizer_control_mixin")
    assert found is not None
    assert found.origin is not None
    assert INCOMPLETE_UNLOAD in Path(found.origin).read_text()

    class Server(FakeServer):
        is_blocked = True

        async def load_lora_adapter(self, name: str, tensors: Any, config: Any) -> None:
            if self.is_blocked:
                raise ServerError(f"LoRA adapter '{name}' {INCOMPLETE_UNLOAD}. Retry the unload", status=400)
            await super().load_lora_adapter(name, tensors, config)

        async def unload_lora_adapter(self, name: str) -> None:
            await self._receive("unload")
            self.is_blocked = False

    a = Server("a", NO_MODEL)

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            await router.control.load_lora_adapter("policy", write_lora(tmp_path / "1", 1.0))
            assert (a.adapters, a.calls.count("unload")) == ({"policy": 1.0}, 1)

    run(scenario)


# -- waiting for what hangs ----------------------------------------------------------------------------


def test_folders_that_hang_delay_neither_other_folders_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "FOLDER_TIMEOUT_S", 0.3)
    released = threading.Event()

    async def scenario() -> None:
        hung = (folders.in_thread(lambda: released.wait(20.0), "/hangs") for _ in range(40))
        outcomes = await asyncio.gather(*hung, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {DeadlineError}
        assert await folders.in_thread(lambda: "read", "/good") == "read"
        with pytest.raises(BadInputError, match="must be the absolute path"):
            await folders.in_thread(lambda: folders.require_checkpoint_folder("relative"), "relative")

    started = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - started < 10.0
    released.set()


def test_replicas_are_asked_for_their_models_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that do not answer delay the listing only shortly."""
    monkeypatch.setattr(models, "NEXT_CALL_S", 0.05)
    servers: list[Any] = [*fakes("abcdefghijkl")]
    running = most = 0

    async def get_json(server: Any, path: str, timeout_s: float) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            if server is not servers[-1]:
                await asyncio.sleep(1.0)
                raise ServerError("silent")
        finally:
            running -= 1
        return {"data": [{"id": "base", "max_model_len": 9}]}

    async def scenario() -> None:
        dispatcher = Dispatcher()
        for server in servers:
            dispatcher.pool.add_replica(server.name, server, 0)
        started = time.monotonic()
        assert (await ServedModels(dispatcher.pool, get_json).listing())["data"][0]["id"] == "base"
        assert time.monotonic() - started < 4.0
        assert most == models.MAX_CALLS
        servers.append(None)  # now, none answers
        with pytest.raises(NotReadyError, match="no replica has listed its models: silent"):
            await ServedModels(dispatcher.pool, get_json).listing()

    run(scenario)


def test_the_first_replica_that_answers_names_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas may have the model at other paths. The name must be the same after each start of the router."""
    monkeypatch.setattr(models, "NEXT_CALL_S", 30.0)
    asked = []

    async def get_json(server: Any, *_: Any) -> Any:
        asked.append(server.name)
        if server.name == "a":
            raise ServerError("it has just ended")
        await asyncio.sleep(0.1 if server.name == "b" else 0.0)
        return {"data": [{"id": f"/models/{server.name}"}]}

    async def scenario() -> None:
        dispatcher = Dispatcher()
        for server in list[Any](fakes("abcd")):
            dispatcher.pool.add_replica(server.name, server, 0)
        listing = await ServedModels(dispatcher.pool, get_json).listing()
        assert (listing["data"][0]["id"], asked) == ("/models/b", ["a", "b"])

    run(scenario)
