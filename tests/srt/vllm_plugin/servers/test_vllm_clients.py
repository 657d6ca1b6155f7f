"""Clients of a vLLM server that go away, fail or act at the same time: the server stays in a known state."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from both_engines import in_background
from helpers import wait_until
from torch.distributed.device_mesh import DeviceMesh
from vllm_helpers import SIZES, TINY_SERVER, needs_vllm, start_config, weights_of

from verl_server import HttpServerEngineAdapter, RemoteServer, VerlEngine
from verl_server.adapter.sglang.server_arguments import WEIGHT_LOADER
from verl_server.config import EngineKind
from verl_server.errors import BadInputError, NotReadyError, VerlServerError
from verl_server.weights.transports.base import serialize_message

pytestmark = needs_vllm

PROMPT = [5, 6, 7]
LONG = {"max_new_tokens": 30_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapter(tiny: Callable[..., Path]) -> Iterator[HttpServerEngineAdapter]:
    arguments: dict[str, Any] = {"config": start_config(engine_kind=EngineKind.VLLM), **TINY_SERVER}
    with HttpServerEngineAdapter(tiny("qwen3", **SIZES), **arguments) as adapter:
        yield adapter


def http_request(adapter: HttpServerEngineAdapter, path: str, body: Any) -> bytes:
    """The bytes of a POST request with the admin key, after whose reply the server closes the connection."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {adapter.admin_api_key}\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def leave(adapter: HttpServerEngineAdapter, path: str, body: Any, after_s: float) -> None:
    """Send a request with the admin key, and close the connection after a time, without reading an answer."""

    async def send() -> None:
        url = urlsplit(adapter.base_url)
        _, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(http_request(adapter, path, body))
        await writer.drain()
        await asyncio.sleep(after_s)
        writer.close()

    asyncio.run(send())


def running(adapter: HttpServerEngineAdapter) -> int:
    load = adapter.get_loads()["loads"][0]
    return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.02])
def test_a_pause_whose_client_goes_is_made_or_not_made(adapter: HttpServerEngineAdapter, after_s: float) -> None:
    leave(adapter, "/pause_generation", {"mode": "retract"}, after_s)
    time.sleep(0.3)
    if adapter.is_ready():  # then vLLM runs, too
        assert len(adapter.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 3})["output_ids"]) > 0
    adapter.continue_generation()
    assert len(adapter.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 3})["output_ids"]) > 0


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.05])
def test_a_release_whose_client_goes_is_known(adapter: HttpServerEngineAdapter, after_s: float) -> None:
    leave(adapter, "/release_memory_occupation", {"tags": ["kv_cache"]}, after_s)
    time.sleep(0.5)
    adapter.update_released_memory()
    if adapter.released_memory:
        adapter.resume_memory_occupation()
    adapter.continue_generation()
    assert len(adapter.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 3})["output_ids"]) > 0


def test_a_batch_with_an_error_leaves_nothing_running(adapter: HttpServerEngineAdapter) -> None:
    """The second prompt is longer than the context, which the server finds out itself."""
    body = {"input_ids": [PROMPT, [1] * 40_000], "sampling_params": LONG, "rid": ["a", "b"]}
    with pytest.raises(VerlServerError):
        asyncio.run(_post(adapter, body))
    wait_until(lambda: running(adapter) == 0, 30.0, "a request of the batch runs")
    before = _generated_tokens(adapter)
    time.sleep(1.0)
    assert _generated_tokens(adapter) == before, "vLLM goes on with a request of the batch"


async def _post(adapter: HttpServerEngineAdapter, body: Any) -> Any:
    from verl_server.adapter.sglang.replies import GENERATE

    try:
        return await adapter.asynchronous.connection.http.call(GENERATE, body)
    finally:
        await adapter.asynchronous.close_connections()


def _generated_tokens(adapter: HttpServerEngineAdapter) -> float:
    import requests

    session = requests.Session()
    session.trust_env = False
    text = session.get(f"{adapter.base_url}/metrics", timeout=10).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:generation_tokens_total"))


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.005, 0.01, 0.02])
def test_an_aborting_pause_also_ends_requests_on_their_way_to_the_engine(
    adapter: HttpServerEngineAdapter, after_s: float
) -> None:
    """The pause arrives while vLLM prepares the prompts of a batch. Prompts that come later wait for its end."""
    assert asyncio.run(_pause_in_a_batch(adapter, after_s)) == 0


async def _pause_in_a_batch(adapter: HttpServerEngineAdapter, after_s: float) -> int:
    """The number of requests in vLLM after an aborting pause, that the server gets shortly after a batch."""
    url = urlsplit(adapter.base_url)
    _, batch = await asyncio.open_connection(url.hostname, url.port)
    pause_reader, pause = await asyncio.open_connection(url.hostname, url.port)
    try:
        prompts = [[5, 6, number] for number in range(60)]
        batch.write(http_request(adapter, "/generate", {"input_ids": prompts, "sampling_params": LONG}))
        await asyncio.sleep(after_s)
        pause.write(http_request(adapter, "/pause_generation", {"mode": "abort"}))
        assert b" 200 OK" in await asyncio.wait_for(pause_reader.readline(), 30.0)
        return await asyncio.to_thread(_num_running, adapter)
    finally:
        await asyncio.to_thread(adapter.continue_generation)
        batch.close()  # the server ends the batch of a client that has gone
        pause.close()
        await asyncio.to_thread(wait_until, lambda: running(adapter) == 0, 30.0, "the batch runs")


def _num_running(adapter: HttpServerEngineAdapter) -> int:
    return int(adapter.get_loads()["loads"][0]["num_running_reqs"])


def test_an_aborted_request_that_waits_has_all_its_generations(adapter: HttpServerEngineAdapter) -> None:
    """Otherwise the generations of a batch would be those of other prompts."""
    params = {"max_new_tokens": 2, "n": 2, "temperature": 1.0, "ignore_eos": True}
    adapter.pause_generation("retract")
    try:
        thread, replies = in_background(
            lambda: adapter.generate(input_ids=[PROMPT, PROMPT], sampling_params=params, rid=["x", "y"])
        )
        wait_until(lambda: running(adapter) == 2, 30.0, "the requests do not wait")
        adapter.abort_request("x")
        wait_until(lambda: running(adapter) == 1, 30.0, "the aborted request waits")
    finally:
        adapter.continue_generation()
    thread.join(60.0)
    assert [len(reply["output_ids"]) for reply in replies[0]] == [0, 0, 2, 2]
    assert [reply["meta_info"]["finish_reason"]["type"] for reply in replies[0]] == ["abort"] * 2 + ["length"] * 2


def test_vllms_own_routes_wait_during_an_update(adapter: HttpServerEngineAdapter, one_rank: DeviceMesh) -> None:
    model = adapter.get_model_info()["model_path"]
    assert adapter.api_key is not None
    server = RemoteServer(adapter.base_url, adapter.api_key, adapter.admin_api_key)
    weights = weights_of(Path(model))
    body = {"prompt": PROMPT, "max_tokens": 1}

    def update() -> None:
        for _ in range(20):
            engine.update_weights_from_tensor(weights)

    with (
        VerlEngine(one_rank, servers=[server], model_path=model, dtype="float32") as engine,
        ThreadPoolExecutor(200) as pool,
    ):
        updates, requests = pool.submit(update), []
        while not updates.done():  # requests come at all times of an update
            requests.append(pool.submit(_own_route, adapter, "/v1/completions", body))
            time.sleep(0.005)
        updates.result()
        statuses = [request.result() for request in requests]
    assert len(statuses) > 20
    assert set(statuses) == {200}


def test_the_base_model_is_no_adapter(adapter: HttpServerEngineAdapter) -> None:
    model = adapter.get_model_info()["model_path"]
    with pytest.raises(BadInputError, match="base model"):
        adapter.generate(input_ids=PROMPT, lora_path=model)


def test_an_update_that_another_client_left_open_is_closed(
    adapter: HttpServerEngineAdapter, one_rank: DeviceMesh
) -> None:
    """It may have left a part of its weights, so only an update of all weights makes the server generate again."""
    model = adapter.get_model_info()["model_path"]
    assert adapter.api_key is not None
    server = RemoteServer(adapter.base_url, adapter.api_key, adapter.admin_api_key)
    weights = weights_of(Path(model))
    adapter.pause_generation("retract")
    assert _own_route(adapter, "/start_weight_update") == 200
    adapter.continue_generation()
    with VerlEngine(one_rank, servers=[server], model_path=model, dtype="float32") as engine:
        result = engine.update_weights_from_tensor(weights)
        assert result.num_missing == 0
        reply = engine.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2})
    assert reply["meta_info"]["weight_version"] == result.weight_version


def test_an_incomplete_message_changes_nothing(adapter: HttpServerEngineAdapter) -> None:
    with pytest.raises(BadInputError, match="needs"):
        adapter.update_weights_from_tensor([serialize_message({"update_id": "a"})], load_format=WEIGHT_LOADER)
    assert adapter.is_ready()
    assert len(adapter.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 2})["output_ids"]) > 0


def _own_route(adapter: HttpServerEngineAdapter, path: str, body: Any = None) -> int:
    """The status of a request to one of vLLM's own routes."""
    import requests

    session = requests.Session()
    session.trust_env = False
    headers = {"Authorization": f"Bearer {adapter.admin_api_key}"}
    return session.post(adapter.base_url + path, json=body, headers=headers, timeout=30).status_code


def test_no_route_generates_while_the_weights_are_undefined(adapter: HttpServerEngineAdapter) -> None:
    import requests

    adapter.release_memory_occupation(["weights"])
    adapter.resume_memory_occupation()  # generation continues, and the weights are zeros
    session = requests.Session()
    session.trust_env = False
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}, "prompt": PROMPT, "max_tokens": 1}
    headers = {"Authorization": f"Bearer {adapter.api_key}"}
    for path in ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions/batch", "/v1/unknown"):
        reply = session.post(adapter.base_url + path, json=body, headers=headers, timeout=30)
        assert reply.status_code == 503, path
    with pytest.raises(NotReadyError, match="weights are undefined"):
        adapter.generate(input_ids=PROMPT, sampling_params={"max_new_tokens": 1})
    assert adapter.ping()
