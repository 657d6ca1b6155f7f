"""The blocking and the asynchronous adapter: IPv6, a real router, pauses, updates from disk and by broadcast."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import requests
import torch
from helpers import (
    GREEDY,
    PROMPTS,
    change_weights,
    free_port,
    greedy_with_logprobs,
    reference_model,
    wait_until,
    workers_of,
)

from verl_server import AsyncHttpServerEngineAdapter, HttpServerEngineAdapter, PauseMode, Timeouts
from verl_server.adapter.router_registration import RouterRegistration
from verl_server.adapter.sglang.replies import convert_weight_versions, count_requests, require_logprobs
from verl_server.config import AdapterConfig
from verl_server.conformance.reference import Interceptor
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    PeerError,
    ServerError,
    UnsupportedError,
)
from verl_server.types import Json, parse_weight_version

LONG = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def on_ipv6(tiny: Callable[..., Path], sglang_router: int) -> Iterator[HttpServerEngineAdapter]:
    """A server on the IPv6 loopback that is registered with a router. The proxy variables name a closed port."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            patch.setenv(name, "http://127.0.0.1:9")
        with HttpServerEngineAdapter(
            model_path=str(tiny("qwen3")),
            dtype="float32",
            max_total_tokens=8192,
            host="::1",
            config=AdapterConfig(router_ip="127.0.0.1", router_port=sglang_router),
        ) as adapter:
            yield adapter


def test_ipv6_proxy_variables_and_router(on_ipv6: HttpServerEngineAdapter, sglang_router: int) -> None:
    assert on_ipv6.base_url.startswith("http://[::1]:")
    reply = on_ipv6.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert workers_of(sglang_router) == {on_ipv6.base_url}
    direct = requests.Session()
    direct.trust_env = False  # the fixture's proxy variables are still set
    routed = direct.post(
        f"http://127.0.0.1:{sglang_router}/generate",
        json={"input_ids": PROMPTS[0], "sampling_params": GREEDY},
        headers={"Authorization": f"Bearer {on_ipv6.api_key}"},
        timeout=30,
    )
    assert routed.json()["output_ids"] == reply["output_ids"]


def test_a_router_whose_connections_are_lost(adapter: HttpServerEngineAdapter, sglang_router: int) -> None:
    """A router that starts, or that is busy, loses requests. The registration sends them again until its deadline."""
    requests_seen: list[str] = []

    def lose_the_first_of_each_kind(path: str) -> None:
        requests_seen.append(path)
        if len(requests_seen) in (1, 3):  # GET, and POST after the second GET
            raise ConnectionResetError

    with Interceptor(f"http://127.0.0.1:{sglang_router}", lose_the_first_of_each_kind) as forwarder:
        config = AdapterConfig(router_ip="127.0.0.1", router_port=int(forwarder.url.rpartition(":")[2]))
        registration = RouterRegistration.start(config, adapter.base_url, adapter.api_key)
        assert len(requests_seen) > 3
        assert adapter.base_url in workers_of(sglang_router)
        registration.stop()
    wait_until(lambda: adapter.base_url not in workers_of(sglang_router), 30.0, "the worker is still registered")


def answer_in_part(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listening.accept()
            connection.recv(65536)
            connection.sendall(b'HTTP/1.1 202 Accepted\r\nContent-Length: 100\r\n\r\n{"worker_id')
            connection.close()


def test_a_router_that_is_not_there(adapter: HttpServerEngineAdapter) -> None:
    config = AdapterConfig(Timeouts(control_s=0.5), router_ip="127.0.0.1", router_port=free_port())
    with pytest.raises(ServerError, match=f"{config.router_port} could not be reached within 0.5 s"):
        RouterRegistration.start(config, adapter.base_url, None)
    with socket.create_server(("127.0.0.1", 0)) as half_dead:  # ends in the middle of its answers
        threading.Thread(target=answer_in_part, args=(half_dead,), daemon=True).start()
        port = half_dead.getsockname()[1]
        with pytest.raises(ServerError, match=r"could not be reached within 0\.5 s"):
            RouterRegistration.start(replace(config, router_port=port), adapter.base_url, None)
    another_program = replace(config, router_port=int(adapter.base_url.rpartition(":")[2]))
    with pytest.raises(ServerError, match=f"{adapter.base_url} refused .*401"):
        RouterRegistration.start(another_program, adapter.base_url, None)


def test_async_adapter_attached_to_the_same_server(adapter: HttpServerEngineAdapter) -> None:
    """Both adapters return the same tokens, also in a second event loop. Leaving a stream aborts its request."""

    async def work() -> list[int]:
        async with AsyncHttpServerEngineAdapter.attach(
            adapter.base_url,
            api_key=adapter.api_key,
            admin_api_key=adapter.admin_api_key,
        ) as other:
            async for event in other.generate_stream(input_ids=PROMPTS[0], sampling_params=LONG):
                assert event["meta_info"]["weight_version"] == version
                if len(event["output_ids"]) > 3:
                    break
            info, loads = await other.get_model_info(), await other.get_loads()
            assert info["model_type"] == "qwen3"
            assert info["weight_version"] == version
            assert (await other.get_server_info())["allowed_media_domains"] == ["none-by-default.invalid"]
            assert loads["loads"][0]["max_total_num_tokens"] > 0
            assert await other.ping()
            assert await other.is_ready()
            assert await other.health()
            return list((await other.generate(input_ids=PROMPTS[0], sampling_params=GREEDY))["output_ids"])

    reply = adapter.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    expected, version = reply["output_ids"], reply["meta_info"]["weight_version"]
    assert isinstance(version, int)
    assert asyncio.run(work()) == asyncio.run(work()) == expected
    assert adapter.ping(), "an attached adapter leaves the server running"


def test_weight_versions_of_replies_are_ints() -> None:
    """SGLang's labels are strings. A missing label and "default" name version 0, the version of the checkpoint."""
    span = {"version": "12", "start": 0, "end": 3}
    replies: list[Json] = [
        {"meta_info": {"weight_version": "12", "weight_versions": [dict(span)]}},
        {"meta_info": {"weight_version": "default"}},
    ]
    assert [convert_weight_versions(reply) for reply in replies] == [
        {"meta_info": {"weight_version": 12, "weight_versions": [{**span, "version": 12}]}},
        {"meta_info": {"weight_version": 0}},
    ]
    assert [parse_weight_version(label) for label in ("7", 7, None, "default")] == [7, 7, 0, 0]
    for label in ("", "v7", "step_12", "1.5"):
        with pytest.raises(BadInputError, match=rf"{label!r}.*weight_version=0"):
            parse_weight_version(label)


@pytest.mark.parametrize("nothing", [None, float("nan")], ids=["null in JSON", "NaN of an engine in the process"])
def test_nan_logits_are_an_error(nothing: float | None) -> None:
    def reply(*logprobs: float | None) -> Json:
        first_of_prompt = [[None, 5, None], [-1.0, 6, None]]  # the first token of a prompt has no log probability
        entries = [[logprob, 0, None] for logprob in logprobs]
        return {"meta_info": {"input_token_logprobs": first_of_prompt, "output_token_logprobs": entries}}

    require_logprobs({"meta_info": {}})
    require_logprobs(reply(-0.5, 0, -3.4e38))
    require_logprobs(reply(nothing, -0.5), num_checked=1)
    with pytest.raises(ServerError, match=r"output token 1 is NaN: .*NaN logits.*check_finite=True") as caught:
        require_logprobs(reply(-0.5, nothing))
    assert caught.value.details == {"status": 200, "token_index": 1}


def test_an_attached_adapter_knows_no_processes(adapter: HttpServerEngineAdapter) -> None:
    """The adapter that started the server knows its processes; an attached adapter raises UnsupportedError."""
    pids = adapter.pids
    assert psutil.Process(pids.main).ppid() == pids.warden
    assert any("scheduler" in " ".join(psutil.Process(pid).cmdline()) for pid in pids.workers)
    assert b"GOMP_SPINCOUNT=" in Path(f"/proc/{pids.main}/environ").read_bytes()
    assert adapter.log_path is not None
    assert adapter.log_path.is_file()
    with HttpServerEngineAdapter.attach(adapter.base_url, api_key=adapter.api_key) as attached:
        assert attached.log_path is None
        with pytest.raises(UnsupportedError, match="did not start it"):
            _ = attached.pids


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("keys", "call", "message"),
    [
        ({"api_key": "wrong"}, "get_model_info", r"refused the api_key for /model_info \(401\).* VERL_SERVER_API_KEY$"),
        ({}, "get_model_info", r"needs an api_key for /model_info, but none was given \(401\)"),
        (
            {"admin_api_key": "wrong"},
            "flush_cache",
            r"refused the admin_api_key for /flush_cache \(401\).* VERL_SERVER_ADMIN_API_KEY$",
        ),
        ({"api_key": "wrong"}, "flush_cache", r"needs an admin_api_key for /flush_cache, but none was given \(401\)"),
    ],
)
def test_wrong_key_is_a_typed_error(
    adapter: HttpServerEngineAdapter, keys: dict[str, Any], call: str, message: str
) -> None:
    """The error names the key, the server and the request."""
    with (
        HttpServerEngineAdapter.attach(adapter.base_url, **keys) as attached,
        pytest.raises(ServerError, match=f"{adapter.base_url} {message}"),
    ):
        getattr(attached, call)()


def test_address_without_a_server() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with (
        HttpServerEngineAdapter.attach(url, config=AdapterConfig(max_retries=0)) as attached,
        pytest.raises(ServerError, match=f"nothing answers at {url} .*check that the server runs"),
    ):
        attached.ping()


def test_address_that_accepts_no_connection() -> None:
    """The backlog of a listening socket is full, so that further connections are not completed."""
    config = AdapterConfig(Timeouts(connect_s=0.2), max_retries=0)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, contextlib.ExitStack() as stack:
        address = listening.getsockname()
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        url = f"http://127.0.0.1:{address[1]}"
        attached = stack.enter_context(HttpServerEngineAdapter.attach(url, config=config))
        with pytest.raises(DeadlineError, match=rf"nothing answers at {url}: .*after 0\.2 s"):
            attached.ping()


def _start(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    time.sleep(0.3)
    return thread, results


@pytest.mark.smoke
@pytest.mark.parametrize("mode", [mode for mode in PauseMode if mode is not PauseMode.WAIT])
def test_pause_modes(adapter: HttpServerEngineAdapter, mode: PauseMode) -> None:
    whole = adapter.generate(input_ids=PROMPTS[1], sampling_params=LONG)["output_ids"]
    running, replies = _start(lambda: adapter.generate(input_ids=PROMPTS[1], sampling_params=LONG))
    adapter.pause_generation(mode)
    try:
        assert not adapter.is_ready()
        assert adapter.ping()
        if mode is PauseMode.ABORT:
            running.join(30.0)
            assert replies[0]["meta_info"]["finish_reason"]["type"] == "abort"
        else:
            assert not replies
    finally:
        adapter.continue_generation()
    running.join(60.0)
    if mode is not PauseMode.ABORT:
        assert replies[0]["output_ids"] == whole
    assert adapter.is_ready()


@pytest.mark.smoke
def test_abort_by_id(adapter: HttpServerEngineAdapter) -> None:
    running, replies = _start(lambda: adapter.generate(input_ids=[5, 6], sampling_params=LONG, rid="only-this"))
    adapter.abort_request("only-this")
    running.join(30.0)
    assert replies[0]["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("kind", ["one prompt", "batch", "samples", "stream", "chat"])
def test_a_cancelled_generation_ends_at_once(kind: str, adapter: HttpServerEngineAdapter) -> None:
    """Whatever the request is, and without the key that aborts: the connection closes."""
    other, params = adapter.asynchronous, {"max_new_tokens": 2000, "ignore_eos": True}

    async def stream() -> None:
        async for _ in other.generate_stream(input_ids=[1, 2], sampling_params=params):
            pass

    async def chat() -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1900, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {adapter.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            await session.post(f"{adapter.base_url}/v1/chat/completions", json=body)

    async def run() -> float:
        calls: dict[str, Callable[[], Any]] = {
            "one prompt": lambda: other.generate(input_ids=[1, 2], sampling_params=params),
            "batch": lambda: other.generate(input_ids=[[1, 2], [3]], sampling_params=params),
            "samples": lambda: other.generate(input_ids=[1, 2], sampling_params=params | {"n": 2}),
            "stream": stream,
            "chat": chat,
        }
        call = asyncio.ensure_future(calls[kind]())
        while not call.done() and not count_requests(await other.get_loads()):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        started = time.monotonic()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while count_requests(await other.get_loads()):
            await asyncio.sleep(0.02)
        seconds = time.monotonic() - started
        await other.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 1})
        await other.close_connections()
        return seconds

    assert asyncio.run(asyncio.wait_for(run(), 30.0)) < 1.0


def test_updates_from_disk_and_by_broadcast(on_ipv6: HttpServerEngineAdapter, tiny: Callable[..., Path]) -> None:
    """The served tokens, the version and the checksums follow an update from disk and one by broadcast over gloo."""
    model = reference_model(tiny("qwen3"))
    before = on_ipv6.weights_checker()["ranks"]
    folder = tiny("qwen3", tie_word_embeddings=False).parent / "changed"
    change_weights(model, seed=21)
    model.save_pretrained(folder)
    on_ipv6.update_weights_from_disk(str(folder), weight_version=7)
    reply = on_ipv6.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert reply["output_ids"] == greedy_with_logprobs(model, PROMPTS[0])[0]
    assert reply["meta_info"]["weight_version"] == 7
    assert on_ipv6.weights_checker()["ranks"] != before
    original = reference_model(tiny("qwen3"))
    _push_distributed(on_ipv6, original)
    reply = on_ipv6.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert reply["output_ids"] == greedy_with_logprobs(original, PROMPTS[0])[0]
    assert on_ipv6.weights_checker()["ranks"] == before


def _push_distributed(adapter: HttpServerEngineAdapter, model: Any) -> None:
    """As rank 0 of a trainer: join the group while the server joins, broadcast while the server receives."""
    from sglang.srt.utils import init_custom_process_group

    port, weights = free_port(), model.state_dict()
    joining, _ = _start(lambda: adapter.init_weights_update_group("127.0.0.1", port, 1, 2, "push", "gloo"))
    group = init_custom_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="push"
    )
    joining.join(60.0)
    adapter.pause_generation(PauseMode.RETRACT)
    adapter.begin_weight_update()
    receiving, replies = _start(
        lambda: adapter.update_weights_from_distributed(
            list(weights),
            [tensor.dtype for tensor in weights.values()],
            [tensor.shape for tensor in weights.values()],
            group_name="push",
            weight_version=8,
        )
    )
    for tensor in weights.values():
        torch.distributed.broadcast(tensor, src=0, group=group)
    receiving.join(60.0)
    assert replies[0]["success"]
    adapter.end_weight_update()
    adapter.continue_generation()
    adapter.destroy_weights_update_group("push")


def test_an_update_session_that_a_dead_trainer_left_open_is_closed(adapter: HttpServerEngineAdapter) -> None:
    adapter.begin_weight_update()
    adapter.begin_weight_update()
    adapter.end_weight_update()
    with pytest.raises(ServerError, match="no weight-update session"):
        adapter.end_weight_update()


def test_continue_is_refused_while_memory_is_released(on_ipv6: HttpServerEngineAdapter) -> None:
    on_ipv6.release_memory_occupation(["kv_cache"])
    with pytest.raises(NotReadyError, match="kv_cache"):
        on_ipv6.continue_generation()
    with pytest.raises(NotReadyError, match="kv_cache"):
        on_ipv6.generate(input_ids=[1])
    on_ipv6.resume_memory_occupation()
    assert on_ipv6.generate(input_ids=[1], sampling_params=GREEDY)["output_ids"]


def test_fail_wakes_a_call_that_reads_a_reply(adapter: HttpServerEngineAdapter) -> None:
    args = adapter.server_args
    other = HttpServerEngineAdapter.attach(
        adapter.base_url, api_key=args["api_key"], admin_api_key=args["admin_api_key"]
    )
    failing = threading.Timer(0.5, lambda: other.asynchronous.fail(PeerError("a rank died")))

    def read_all() -> int:
        return sum(1 for _ in other.generate_stream(input_ids=[1, 2], sampling_params=long))

    long = {"max_new_tokens": 2000, "ignore_eos": True}
    failing.start()
    started = time.monotonic()
    try:
        with pytest.raises(PeerError, match="a rank died"):
            read_all()
        assert time.monotonic() - started < 5.0
    finally:
        failing.join()
        other.shutdown()


def test_use_in_a_forked_child_is_refused(adapter: HttpServerEngineAdapter) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            adapter.ping()
        except BadInputError:
            os.write(write, b"refused")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 7) == b"refused"
