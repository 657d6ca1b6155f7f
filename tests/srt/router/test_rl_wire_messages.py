"""What callers of the vLLM-RL wire are told, and what the router logs, over servers that only remember their calls."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rl_wire_fakes import KEY, REQUEST, STATIC, FakeServer, fake_router
from test_rl_wire_missed import write_lora

from verl_server.adapter.sglang.replies import Endpoint, key_error
from verl_server.adapter.sglang.requests import PromptLimits, generate_payload
from verl_server.cli.common import log_also_info_of
from verl_server.errors import BadInputError, ServerError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http import Forwarder
from verl_server.router.vllm_wire import admin
from verl_server.router.vllm_wire.models import ServedModel, ServedModels

NO_MODEL = Path("/no/model")


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30.0))


def served_models(owner: str) -> ServedModels:
    """The models of one server: a base model and an adapter."""

    async def get_json(*_: Any) -> Any:
        base = {"id": "base", "owned_by": owner, "max_model_len": 9}
        return {"data": [base, {"id": "policy", "owned_by": owner, "parent": "base"}]}

    dispatcher = Dispatcher()
    server: Any = FakeServer("a", NO_MODEL)
    dispatcher.pool.add_replica("a", server, 0)
    return ServedModels(dispatcher.pool, get_json)


@pytest.mark.parametrize(("owner", "adapter"), [("sglang", {"lora_path": "policy"}), ("vllm", {})])
def test_a_forwarded_body_names_the_adapter_for_its_engine(owner: str, adapter: Any) -> None:
    async def scenario() -> None:
        models, path = served_models(owner), "/v1/chat/completions"
        for body in ({}, {"model": None}, {"model": "base"}, {"model": "base:policy"}, {"model": "default"}):
            assert await models.with_adapter(path, body) is body
        assert await models.with_adapter(path, {"model": "policy"}) == {"model": "policy", **adapter}
        for name in ("polciy", "base:polciy"):
            with pytest.raises(BadInputError, match=f"The model `{name}` does not exist"):
                await models.with_adapter(path, {"model": name})

    run(scenario())


# -- the log -------------------------------------------------------------------------------------------


def test_the_router_logs_each_admin_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainers show their users the status of a reply, and not its body."""
    monkeypatch.setattr(admin.logger, "level", logging.NOTSET)
    a = FakeServer("a", NO_MODEL)

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            log_also_info_of(admin.__name__)
            a.failures["pause"] = [ServerError("busy", status=500)]
            await router.call("/pause?mode=keep")
            await router.call("/pause?mode=keep")
            await router.call("/update_weights", {"weight_dir": "/no/folder"})
            await router.call("/update_weights", {"weights_dir": "/no/folder"})
            await router.call("/resume")
            headers = {"Authorization": f"Bearer {KEY}"}
            async with aiohttp.ClientSession() as session, session.post(f"{router.url}/pause", headers=headers) as got:
                assert got.status == 403

    run(scenario())
    lines = [(each.levelname, each.getMessage()) for each in caplog.records if each.name == admin.__name__]
    expected = [
        ("WARNING", "/pause mode='keep' failed with status 500 after", "busy"),
        ("INFO", "/pause mode='keep': status=paused after", ""),
        ("WARNING", "/update_weights weight_dir='/no/folder' failed with status 400", "has no file *.safetensors"),
        ("WARNING", "/update_weights was refused with status 400", "has no argument 'weights_dir'"),
        ("INFO", "/resume: status=resumed after", ""),
        ("WARNING", "/pause was refused with status 403", "needs the admin key"),
    ]
    assert len(lines) == len(expected), lines
    for (level, line), (expected_level, start, part) in zip(lines, expected, strict=True):
        assert level == expected_level
        assert line.startswith(start)
        assert part in line


def test_operations_are_logged_without_an_option() -> None:
    code = """
from verl_server.cli import app
import logging, verl_server.router.process.router_main as router_main
def serve_static(*_, **__):
    logging.getLogger("verl_server.router.vllm_wire.admin").info("operation")
    logging.getLogger("verl_server.router").info("other information")
    logging.getLogger("verl_server.router").warning("a warning")
router_main.serve_static = serve_static
app.main()
"""
    command = [sys.executable, "-c", code, "router", "--replica=http://127.0.0.1:1"]
    env = {**os.environ, "VERL_SERVER_API_KEY": KEY}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env)
    shown = [line.split(": ")[-1] for line in done.stderr.splitlines()]
    assert shown == ["operation", "a warning"]


# -- prime-rl ------------------------------------------------------------------------------------------


def test_a_broadcast_by_nccl_is_refused_with_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is prime-rl's default: the trainer calls /init_broadcaster, and then posts a folder without weights."""
    (tmp_path / "NCCL_READY").touch()
    hint = "set weight_broadcast.type='filesystem'"

    async def scenario() -> None:
        async with fake_router(monkeypatch, FakeServer("a", NO_MODEL)) as router:
            for path, body, expected in (
                ("/init_broadcaster", {"host": "h", "port": 1, "rank_offset": 0}, 501),
                ("/update_weights", {"weight_dir": str(tmp_path)}, 400),
                ("/update_weights", {"weight_dir": None}, 400),
            ):
                status, reply = await router.call(path, body)
                assert (status, hint in reply["error"]["message"]) == (expected, True), reply

    run(scenario())


# -- a paused router -----------------------------------------------------------------------------------


def test_a_paused_router_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of a request, `verl-server status`, `/health` and `/metrics`."""

    def status(url: str) -> str:
        env = {**os.environ, "VERL_SERVER_API_KEY": KEY}
        command = [sys.executable, "-m", "verl_server.cli", "status", url, "--json"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=env).stderr

    async def scenario() -> None:
        async with fake_router(monkeypatch, FakeServer("a", NO_MODEL)) as router, aiohttp.ClientSession() as session:
            await router.until_admitted("a")
            for is_paused in (False, True):
                if is_paused:
                    await router.control.pause("keep")
                async with session.get(f"{router.url}/health") as got:
                    assert (await got.json())["paused"] is is_paused
                async with session.get(f"{router.url}/metrics") as got:
                    assert f"verl_router_paused {float(is_paused)}" in await got.text()
                async with session.get(f"{router.url}/is_paused", headers={"Authorization": f"Bearer {KEY}"}) as got:
                    assert await got.json() == {"is_paused": is_paused}
                assert ("The router is paused" in await asyncio.to_thread(status, router.url)) is is_paused
            body = {"token_ids": [1], "sampling_params": {}, "timeout_s": 0.2, "model": None}
            monkeypatch.setattr(ServedModels, "find", find_base)
            got_status, reply = await router.call("/inference/v1/generate", body)
            assert (got_status, "the router is paused" in reply["error"]["message"]) == (504, True), reply

    async def find_base(*_: Any) -> ServedModel:
        return ServedModel("base", None, None)

    run(scenario())


# -- adapters ------------------------------------------------------------------------------------------


def test_names_of_adapters_that_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a = FakeServer("a", NO_MODEL)

    async def get_json(*_: Any) -> Any:
        return {"data": [{"id": "base", "owned_by": "sglang"}]}

    monkeypatch.setattr(Forwarder, "get_json", get_json)
    body = {"lora_path": write_lora(tmp_path / "1", 1.0)}

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            await router.until_admitted("a")
            status, reply = await router.call("/load_lora_adapter", {**body, "lora_name": "base"})
            assert (status, "conflicts with a served base model" in reply["error"]["message"]) == (400, True), reply
            status, reply = await router.call("/unload_lora_adapter", {"lora_name": "policy"})
            assert (status, "The lora adapter 'policy' cannot be found" in reply["error"]["message"]) == (404, True)
            status, reply = await router.call(
                "/load_lora_adapter", {**body, "lora_name": "a", "is_3d_lora_weight": True}
            )
            assert (status, "is_3d_lora_weight" in reply["error"]["message"]) == (400, True)
            assert not {"load", "unload"} & set(a.calls)
            for name in ("policy", "other"):
                fields = {**body, "lora_name": name, "is_3d_lora_weight": False}
                assert (await router.call("/load_lora_adapter", fields))[0] == 200
            assert (await router.call("/unload_lora_adapter", {"lora_name": "policy"}))[0] == 200
            status, reply = await router.call("/unload_lora_adapter", {"lora_name": "policy"})
            assert (status, "['other']" in reply["error"]["message"]) == (404, True)

    run(scenario())


# -- generation ----------------------------------------------------------------------------------------


class CheckingServer(FakeServer):
    """A server whose adapter checks the prompt, as a real one does."""

    async def generate(self, **request: Any) -> Any:
        given = {name: request[name] for name in ("sampling_params", "input_ids", "rid")}
        generate_payload(PromptLimits(vocab_size=100), given)
        raise AssertionError(request)


GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (GENERATE, {"sampling_params": {"max_tokens": "4"}}, "['max_new_tokens'] must be"),
        (GENERATE, {"sampling_params": {"include_stop_str_in_output": 3}}, "['no_stop_trim'] must be"),
        (GENERATE, {"sampling_params": {"structured_outputs": {"json": 3}}}, "['json_schema'] must be"),
        (GENERATE, {"token_ids": [1, 1000]}, "input_ids holds token id 1000"),
        (GENERATE, {"token_ids": [1, -1]}, "negative value"),
        (GENERATE, {"token_ids": [1, "a"]}, "input_ids must hold token ids"),
        (COMPLETIONS, {"top_p": "4"}, "['top_p'] must be"),
        (COMPLETIONS, {"prompt": [1, 1000], "max_tokens": 1}, "input_ids holds token id 1000"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_the_adapter_of_a_server(
    path: str, fields: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_base(*_: Any) -> ServedModel:
        return ServedModel("base", None, None)

    monkeypatch.setattr(ServedModels, "find", find_base)
    body = (
        {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        if path == GENERATE
        else {"prompt": [1], "return_token_ids": True}
    )

    async def scenario() -> None:
        async with fake_router(monkeypatch, CheckingServer("a", NO_MODEL)) as router:
            await router.until_admitted("a")
            status, reply = await router.call(path, {**body, **fields})
            assert (status, message in reply["error"]["message"]) == (400, True), reply

    run(scenario())


# -- keys ----------------------------------------------------------------------------------------------


def test_a_wrong_key_of_the_servers_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A caller gets a retryable error, so the message must say that waiting does not help."""
    a, admin_endpoint = FakeServer("a", NO_MODEL), Endpoint("/pause_generation", needs_admin_key=True)
    refused = key_error(a.base_url, Endpoint("/model_info"), has_key=True)

    async def get_model_info() -> Any:
        raise refused

    async def scenario() -> None:
        async with fake_router(monkeypatch, a) as router:
            await router.until_admitted("a")
            a.failures["pause"] = [key_error(a.base_url, admin_endpoint, has_key=True)]
            status, reply = await router.call("/pause?mode=keep")
            assert status == 502
            assert "VERL_SERVER_REPLICA_ADMIN_API_KEY" in reply["error"]["message"]
            assert "VERL_SERVER_ADMIN_API_KEY" not in reply["error"]["message"]
            monkeypatch.setattr(f"{STATIC}.RETURN_TIMEOUT_S", 0.0)
            monkeypatch.setattr(a, "get_model_info", get_model_info)
            await router.until_admitted("")
            status, reply = await router.call("/generate", {**REQUEST})
            assert status == 503
            for text in (reply["error"]["message"], caplog.text):
                assert "VERL_SERVER_REPLICA_API_KEY. Requests do not succeed before" in text
                assert "VERL_SERVER_API_KEY" not in text

    run(scenario())
