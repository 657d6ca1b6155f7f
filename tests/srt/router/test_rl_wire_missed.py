"""Servers that miss an operation of a trainer, and calls that a trainer repeats. The servers are fakes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_wire_fakes import STATIC, FakeRouter, FakeServer, fake_router
from safetensors.torch import save_file

from verl_server.cli import app as command_line
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    ServerDiedError,
    ServerError,
    TornWeightsError,
)
from verl_server.router.vllm_wire import calls as folders
from verl_server.router.vllm_wire.generate import parse_sampling
from verl_server.router.vllm_wire.models import ServedModels

Tiny = Callable[..., Path]
CONTROL = "verl_server.router.vllm_wire.control"


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60.0))


def write_lora(folder: Path, value: float) -> str:
    folder.mkdir(exist_ok=True)
    save_file({"weight": torch.tensor(value)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 1, "value": value}))
    return str(folder)


# -- weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_paused", [False, True])
def test_requests_wait_after_an_update_that_has_failed(
    is_paused: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until another update has succeeded, and until `resume` if the trainer has paused the router."""
    folder = tiny("qwen3")
    a, b = FakeServer("a", folder), FakeServer("b", folder)

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            control = router.control
            if is_paused:
                await control.pause("keep")
            a.failures["update"] = [ServerError("refused", status=400)]
            with pytest.raises(TornWeightsError, match=r"failed on 1 of 2 servers; http://a:1: refused"):
                await control.update_weights(str(folder))
            waiting = asyncio.ensure_future(router.generate())
            with pytest.raises(TornWeightsError, match="requests wait until another /update_weights succeeds"):
                await control.resume()
            await router.probes()
            assert not waiting.done()
            assert await control.update_weights(str(folder), 1) == 1, "the same version again"
            await router.probes()
            assert waiting.done() != is_paused
            await control.resume()
            assert {meta["weight_version"] for meta in await waiting} == {"1"}
            b.failures["update"] = [ServerDiedError("killed")]
            assert await control.update_weights(str(folder)) == 2, "a lost server is left out"
            assert router.admitted == "a"
            await router.probes()
            assert router.admitted == "a"
            assert (
                "replica http://b:1 receives no requests until it answers: the server has not taken part" in caplog.text
            )
            assert await control.update_weights(str(folder)) == 3
            await router.until_admitted("ab")

    run(scenario)


def test_a_server_that_returns_during_an_update_has_missed_it(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("qwen3")
    a, b = FakeServer("a", folder), FakeServer("b", folder)

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            await router.until_admitted("ab")
            b.is_silent, a.waits["update"] = True, asyncio.Event()
            await router.until_admitted("a")
            update = asyncio.ensure_future(router.control.update_weights(str(folder)))
            while "update" not in a.calls:
                await asyncio.sleep(0.01)
            b.is_silent = False
            await router.probes()
            assert router.admitted == "a"
            a.waits["update"].set()
            assert await update == 1
            assert {meta["server"] for meta in await router.generate()} == {"a"}
            b.version = 1  # the same version, but not the same update
            await router.probes()
            assert {meta["server"] for meta in await router.generate()} == {"a"}
            assert await router.control.update_weights(str(folder)) == 2
            await router.until_admitted("ab")
            a.version = 7  # another program has updated it, or it was started with another version
            await router.until_admitted("b")

    run(scenario)


def test_a_router_that_is_started_after_an_update(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Servers below the highest version have missed an update, and all servers may be paused. Requests wait."""
    folder = tiny("qwen3")
    a, b = FakeServer("a", folder, 4), FakeServer("b", folder, 5)
    a.is_paused = b.is_paused = True

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            waiting = asyncio.ensure_future(router.generate())
            await router.probes()
            assert router.admitted == ""
            assert "replica http://b:1 receives no requests until it answers: the server is paused" in caplog.text
            assert await router.call("/resume") == (200, {"status": "resumed"})
            assert not a.is_paused
            assert not b.is_paused
            assert {meta["server"] for meta in await waiting} == {"b"}
            await router.probes()
            assert {meta["server"] for meta in await router.generate()} == {"b"}
            assert await router.control.update_weights(str(folder)) == 6
            await router.until_admitted("ab")

    run(scenario)


def test_an_update_that_did_not_continue_is_repeated(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tiny("qwen3"))
    a = FakeServer("a", Path(folder))

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            a.failures["continue"] = [ServerError("busy", status=500)]
            body = {"weight_dir": folder, "weight_version": 5}
            status, reply = await router.call("/update_weights", body)
            assert (status, reply["error"]["type"]) == (503, "NotReadyError")
            assert "weight version 5 is loaded" in reply["error"]["message"]
            assert "Call /resume" in reply["error"]["message"]
            assert await router.call("/update_weights", body) == (200, {"status": "ok", "weight_version": 5})
            assert a.calls.count("update") == 1
            assert not a.is_paused
            await router.generate()
            assert (await router.call("/update_weights", {**body, "weight_version": 4}))[0] == 400

    run(scenario)


# -- pauses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", [False, True])
def test_a_server_that_misses_resume_is_continued_later(
    hangs: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection breaks, or it receives the call and does not answer."""
    monkeypatch.setattr("verl_server.router.vllm_wire.control.CONTINUE_TIMEOUT_S", 0.1)
    folder = tiny("qwen3")
    a, b = FakeServer("a", folder), FakeServer("b", folder)

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            await router.control.pause("keep")
            if hangs:
                b.waits["continue"] = asyncio.Event()
            else:
                b.is_silent = True
                await router.until_admitted("a")
            await router.control.resume()
            assert router.admitted == "a"
            assert {meta["server"] for meta in await router.generate()} == {"a"}
            if hangs:
                await router.probes()
                assert router.admitted == "a"
                b.waits["continue"].set()
            b.is_silent = False
            await router.until_admitted("ab")
            assert not b.is_paused
            await router.generate()

    run(scenario)


def test_a_server_that_missed_the_pause_is_paused_for_the_update(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("qwen3")
    a, b = FakeServer("a", folder), FakeServer("b", folder)

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            b.is_silent = True
            await router.control.pause("keep")
            b.is_silent = False
            assert await router.control.update_weights(str(folder)) == 1
            assert b.is_paused
            assert router.control.is_paused
            await router.control.resume()
            await router.until_admitted("ab")
            assert (a.version, b.version) == (1, 1)

    run(scenario)


def test_a_pause_that_a_server_refuses_changes_nothing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong admin key of the servers is not the caller's wrong key."""
    a, b = FakeServer("a", tiny("qwen3")), FakeServer("b", tiny("qwen3"))

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            b.failures["pause"] = [ServerError("http://b:1/pause_generation failed (401): wrong", status=401)]
            status, reply = await router.call("/pause?mode=keep")
            assert (status, reply["error"]["details"]["key"]) == (502, "replica_admin_api_key")
            assert "VERL_SERVER_REPLICA_ADMIN_API_KEY" in reply["error"]["message"]
            assert not router.control.is_paused
            assert not a.is_paused
            assert "continue" not in b.calls
            b.failures["continue"] = [ServerError("http://b:1/continue_generation failed (401)", status=401)]
            assert (await router.call("/resume"))[0] == 502
            await router.probes()
            assert router.admitted == "ab"
            assert {meta["server"] for meta in await router.generate()} == {"a", "b"}

    run(scenario)


# -- LoRA adapters -------------------------------------------------------------------------------------


def test_a_server_that_misses_an_adapter_loads_it_before_its_next_request(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = FakeServer("a", tiny("qwen3")), FakeServer("b", tiny("qwen3"))

    async def load(router: FakeRouter, value: float) -> None:
        body = {"lora_name": "policy", "lora_path": write_lora(tmp_path / f"{value}", value)}
        assert await router.call("/load_lora_adapter", body) == (200, {"status": "ok"})

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            await load(router, 1.0)
            assert router.control.lora_names == {"policy"}
            b.is_silent = True
            await load(router, 2.0)
            assert router.admitted == "a"
            assert b.adapters == {"policy": 1.0}
            b.is_silent = False
            await router.until_admitted("ab")
            assert {meta["lora"] for meta in await router.generate(lora_path="policy")} == {2.0}
            b.is_silent = True
            await router.until_admitted("a")
            b.adapters.clear()  # another process
            b.is_silent = False
            await router.until_admitted("ab")
            assert {meta["lora"] for meta in await router.generate(lora_path="policy")} == {2.0}
            b.is_silent = True
            await load(router, 3.0)
            write_lora(tmp_path / "3.0", 4.0)  # the folder has another adapter now
            b.is_silent = False
            await router.probes()
            assert router.admitted == "a"
            await load(router, 5.0)
            await router.until_admitted("ab")
            b.is_silent = True
            assert (await router.call("/unload_lora_adapter", {"lora_name": "policy"}))[0] == 200
            b.is_silent = False
            await router.until_admitted("ab")
            assert not b.adapters
            assert not router.control.lora_names

    run(scenario)


def test_an_adapter_that_a_server_refuses_is_on_no_server(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = FakeServer("a", tiny("qwen3")), FakeServer("b", tiny("qwen3"))

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            b.failures["load"] = [ServerError("too large", status=400)]
            with pytest.raises(ServerError, match="too large"):
                await router.control.load_lora_adapter("policy", write_lora(tmp_path / "x", 1.0))
            assert (a.adapters, b.adapters, router.admitted) == ({}, {}, "ab")

    run(scenario)


def test_no_adapter_is_unloaded_during_a_pause(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its paused requests would not end before `/resume`, which would wait for the unloading."""
    a = FakeServer("a", tiny("qwen3"))
    a.adapters["policy"] = 1.0

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            await router.control.pause("keep")
            with pytest.raises(NotReadyError, match="call /resume before a LoRA adapter is loaded or unloaded"):
                await router.control.unload_lora_adapter("policy")
            await router.control.resume()
            assert a.adapters
            for name in (None, "", 3):
                assert (await router.call("/unload_lora_adapter", {"lora_name": name}))[0] == 400
            assert (await router.call("/unload_lora_adapter", {"lora_name": "policy"}))[0] == 200
            assert not a.adapters

    run(scenario)


def test_the_last_load_of_an_adapter_wins(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older call reads its folder for a longer time."""
    a = FakeServer("a", tiny("qwen3"))
    read = folders.read_lora_adapter

    def read_slowly(folder: Any) -> folders.LoraFiles:
        if folder.endswith("old"):
            time.sleep(0.3)
        return read(folder)

    monkeypatch.setattr(f"{CONTROL}.read_lora_adapter", read_slowly)

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            old, new = write_lora(tmp_path / "old", 1.0), write_lora(tmp_path / "new", 2.0)
            older = asyncio.ensure_future(router.control.load_lora_adapter("policy", old))
            await asyncio.sleep(0.05)
            await router.control.load_lora_adapter("policy", new)
            await older
            assert a.adapters == {"policy": 2.0}

    run(scenario)


def test_a_loaded_adapter_is_found_without_asking_a_replica(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that does not receive requests may lack it."""

    async def get_json(*_: Any) -> Any:
        return {"data": [{"id": "base", "max_model_len": 9}]}

    async def scenario() -> None:
        async with fake_router(monkeypatch, FakeServer("a", tiny("qwen3"))) as router:
            models = ServedModels(router.dispatcher.pool, get_json, lambda: {"policy"})
            found = await models.find("policy")
            assert (found.name, found.lora_path, found.max_model_len) == ("policy", "policy", 9)

    run(scenario)


# -- calls ---------------------------------------------------------------------------------------------


def test_only_the_last_operation_is_joined(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause after a resume pauses again, although the first pause still runs."""
    a = FakeServer("a", tiny("qwen3"))

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            a.waits["pause"] = asyncio.Event()
            calls = [asyncio.ensure_future(router.call("/pause?mode=keep")) for _ in range(2)]
            await asyncio.sleep(0.1)
            calls.append(asyncio.ensure_future(router.call("/resume")))
            await asyncio.sleep(0.1)
            calls.append(asyncio.ensure_future(router.call("/pause?mode=keep")))
            await asyncio.sleep(0.1)
            a.waits["pause"].set()
            assert {status for status, _ in await asyncio.gather(*calls)} == {200}
            assert a.calls.count("pause") == 2
            assert a.is_paused
            assert router.control.is_paused

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/pause?mod=keep", None, "did you mean 'mode'"),
        ("/pause?mode=keep", {"mode": "keep"}, "more than once"),
        ("/pause?mode=keep&mode=abort", None, "more than once"),
        ("/pause", {"mode": ["keep"]}, "mode must be one of"),
        ("/pause", {"modes": "keep"}, "did you mean 'mode'"),
        ("/resume", {"mode": "keep"}, "/resume has no argument 'mode'"),
        ("/update_weights", {"weights_dir": "/x"}, "did you mean 'weight_dir'"),
        ("/load_lora_adapter?lora=a", None, "/load_lora_adapter has no argument 'lora'"),
        ("/unload_lora_adapter", {"lora_name": "polciy"}, "The lora adapter 'polciy' cannot be found"),
        ("/update_weights", {"weight_dir": "/" + 5000 * "x"}, "cannot be read"),
        ("/update_weights", {"weight_dir": "/x\0"}, "weight_dir"),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/" + 5000 * "x"}, "is no LoRA adapter"),
        ("/unload_lora_adapter", {"name": "policy"}, "did you mean 'lora_name'"),
        ("/unload_lora_adapter", {}, "lora_name must be"),
    ],
)
def test_arguments_that_are_refused(
    path: str, body: Any, message: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = FakeServer("a", tiny("qwen3"))

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            status, reply = await router.call(path, body)
            assert (status in (400, 404), message in reply["error"]["message"]) == (True, True), reply
            assert len(reply["error"]["message"]) < 1000
            assert not {"pause", "continue", "update", "load", "unload"} & set(a.calls)

    run(scenario)


def test_the_mode_may_be_in_the_body(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    a = FakeServer("a", tiny("qwen3"))

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            assert (await router.call("/pause", {"mode": "keep", "clear_cache": False}))[0] == 200
            assert a.is_paused
            assert (await router.call("/resume", {}))[0] == 200

    run(scenario)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"seed": "7"}, "seed must be a whole number, got '7'"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"seed": True}, "seed must be a whole number"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20, got 21"),
        ({"prompt_logprobs": 10**9}, "prompt_logprobs must be a whole number from 0 to 20"),
    ],
)
def test_sampling_parameters_that_are_refused(params: Any, message: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(message)):
        parse_sampling({"n": 2, **params}, 3, 100)


def test_seeds_of_samples() -> None:
    sampling = parse_sampling({"n": 2, "seed": 7, "logprobs": 20}, 3, 100)
    assert [sampling.of_sample(index)["sampling_seed"] for index in range(2)] == [7, 8]
    assert "sampling_seed" not in parse_sampling({"n": 2, "seed": -1}, 3, 100).of_sample(1), "no seed in vLLM, either"


def test_the_router_hides_the_keys_of_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    wiped, served = list[str](), list[Any]()
    monkeypatch.setattr("verl_server.cli.arguments._wipe", wiped.append)
    monkeypatch.setattr(
        "verl_server.router.process.router_main.serve_static", lambda servers, **settings: served.extend(servers)
    )
    names = [f"VERL_SERVER_{name}API_KEY" for name in ("", "ADMIN_", "REPLICA_", "REPLICA_ADMIN_")]
    for name in names:
        monkeypatch.setenv(name, f"key-of-{name}")
    command_line.router(["http://127.0.0.1:1"])
    assert sorted(wiped) == sorted(names)
    assert not os.environ.keys() & set(names)
    assert (served[0].api_key, served[0].admin_api_key) == tuple(f"key-of-{name}" for name in names[2:])
    monkeypatch.setenv(names[0], "a long enough key")
    monkeypatch.setenv(names[1], "short")
    with pytest.raises(BadInputError, match="must have at least 8 characters, but VERL_SERVER_ADMIN_API_KEY has 5"):
        command_line.router(["http://127.0.0.1:1"])


def test_a_folder_that_hangs_ends_with_a_deadline(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop continues meanwhile, and the next operation runs."""
    monkeypatch.setattr(folders, "FOLDER_TIMEOUT_S", 0.1)
    monkeypatch.setattr("verl_server.router.vllm_wire.control.require_checkpoint_folder", lambda _: time.sleep(0.5))

    async def scenario() -> None:
        async with fake_router(monkeypatch, FakeServer("a", tiny("qwen3"))) as router:
            with pytest.raises(DeadlineError, match="could not be read within"):
                await router.control.update_weights("/hangs")
            await router.control.pause("keep")
            await router.control.resume()

    run(scenario)


def test_a_server_that_answers_keeps_its_connections(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it receives no requests, because it has missed an update."""
    monkeypatch.setattr(f"{STATIC}.RETURN_TIMEOUT_S", 0.1)
    a, b = FakeServer("a", tiny("qwen3"), 1), FakeServer("b", tiny("qwen3"), 0)

    async def scenario() -> None:
        async with fake_router(monkeypatch, a, b) as router:
            await router.until_admitted("a")
            await router.probes()
            await router.probes()
            assert b.closed == 0
            b.is_silent = True
            while not b.closed:
                await asyncio.sleep(0.01)

    run(scenario)
