"""Control of real servers of both engines: pauses, caches, memory, keys, and what a server says about itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from both_engines import (
    KINDS,
    RUN_S,
    RunningStream,
    SharedEngines,
    assert_computed_by,
    in_background,
    load_of,
    until_idle,
)
from helpers import GREEDY, adapter_of, reference_model, wait_until
from vllm_helpers import needs_vllm

from verl_server import HttpServerEngineAdapter, PauseMode, VerlEngine
from verl_server.adapter.sglang import replies as endpoints
from verl_server.adapter.sglang.replies import Endpoint
from verl_server.errors import NotReadyError, ServerBusyError, ServerError

pytestmark = pytest.mark.timeout(600)

OPEN = {"/health", "/ping", "/ready"}
"""Paths that may answer without a key: they tell only whether the server works."""
ENDPOINTS = {each.path: each for each in vars(endpoints).values() if isinstance(each, Endpoint)}


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, shared_engines: SharedEngines) -> VerlEngine:
    return shared_engines.of(request.param)


@pytest.fixture
def adapter(engine: VerlEngine) -> Iterator[HttpServerEngineAdapter]:
    """The adapter of a server without requests, which serves again after the test."""
    adapter = adapter_of(engine)
    until_idle(adapter)
    yield adapter
    until_idle(adapter)
    assert adapter.is_ready()


# -- pauses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE, PauseMode.ABORT])
def test_pauses(
    adapter: HttpServerEngineAdapter, engine: VerlEngine, shared_engines: SharedEngines, mode: PauseMode
) -> None:
    """Running requests do what the mode says, and their tokens stay exact. New requests wait."""
    rid = f"paused, {mode}"  # SGLang aborts the id of a stream again, two seconds after its end
    stream = RunningStream(adapter, input_ids=[7, 8, 9], rid=rid)
    stream.until_tokens(5)
    adapter.pause_generation(mode)
    try:
        if mode is PauseMode.ABORT:
            assert stream.result()["meta_info"]["finish_reason"]["type"] == "abort"
        new, replies = in_background(lambda: adapter.generate(input_ids=[5], sampling_params=GREEDY))
        time.sleep(0.5)
        count = stream.num_tokens
        new.join(1.0)
        assert not replies
        assert stream.num_tokens == count
        assert not adapter.is_ready()
        assert adapter.ping()
    finally:
        adapter.continue_generation()
    new.join(RUN_S)
    assert len(replies[0]["output_ids"]) == GREEDY["max_new_tokens"]
    if mode is not PauseMode.ABORT:
        stream.until_tokens(count + 5)
        adapter.abort_request(rid)
    assert_computed_by({engine.weight_version: reference_model(shared_engines.model)}, [7, 8, 9], stream.result())
    assert adapter.is_ready()
    assert adapter.health()


@needs_vllm
def test_a_request_that_waits_for_the_end_of_a_pause_is_aborted(shared_engines: SharedEngines) -> None:
    """SGLang does not abort such a request: it runs to its end after the pause."""
    adapter = adapter_of(shared_engines.of("vllm"))
    adapter.pause_generation(PauseMode.RETRACT)
    try:
        waiting = RunningStream(adapter, input_ids=[5, 6], rid="waiting")
        wait_until(lambda: load_of(adapter) == (0, 1), RUN_S, "the request does not wait")
        adapter.abort_request("waiting")
        assert waiting.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert waiting.result()["output_ids"] == []
    finally:
        adapter.continue_generation()
    until_idle(adapter)


def test_a_second_continue_and_a_second_pause_change_nothing(adapter: HttpServerEngineAdapter) -> None:
    for _ in range(2):
        adapter.pause_generation(PauseMode.RETRACT)
        assert not adapter.is_ready()
    for _ in range(2):
        adapter.continue_generation()
        assert adapter.is_ready()


# -- load and cache ----------------------------------------------------------------------------------


def test_loads_and_the_flush_of_the_cache(adapter: HttpServerEngineAdapter) -> None:
    prompt = [1 + k % 200 for k in range(400)]

    def cached_tokens() -> int:
        return int(adapter.generate(input_ids=prompt, sampling_params=GREEDY)["meta_info"]["cached_tokens"])

    adapter.flush_cache()
    assert cached_tokens() == 0
    assert cached_tokens() > 200
    streams = [RunningStream(adapter, input_ids=[index + 1, 2]) for index in range(2)]
    for stream in streams:
        stream.until_tokens(3)
    assert load_of(adapter) == (2, 0)
    with pytest.raises(ServerBusyError, match="running"):
        adapter.flush_cache()
    adapter.abort_request(abort_all=True)
    for stream in streams:
        stream.result()
    until_idle(adapter)
    adapter.flush_cache()
    assert cached_tokens() == 0


def test_more_requests_than_run_at_the_same_time(adapter: HttpServerEngineAdapter) -> None:
    """vLLM runs 16 requests of this server at the same time; the others wait in its queue."""
    prompts = [[1 + index, 7] for index in range(40)]
    alone = [adapter.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] for prompt in prompts[::13]]
    replies = adapter.generate(input_ids=prompts, sampling_params=GREEDY)
    assert [reply["output_ids"] for reply in replies[::13]] == alone


# -- memory ------------------------------------------------------------------------------------------


def test_memory_is_not_released_while_requests_run(adapter: HttpServerEngineAdapter) -> None:
    stream = RunningStream(adapter, input_ids=[1, 2], rid="busy")
    stream.until_tokens(2)
    with pytest.raises(ServerBusyError):
        adapter.release_memory_occupation(["kv_cache"])
    count = stream.num_tokens
    stream.until_tokens(count + 2)
    adapter.abort_request("busy")
    assert stream.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_requests_while_memory_is_released(adapter: HttpServerEngineAdapter) -> None:
    """The adapter that has released memory refuses. Requests of other clients wait for the memory."""
    expected = adapter.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"]
    with HttpServerEngineAdapter.attach(
        adapter.base_url, api_key=adapter.api_key, admin_api_key=adapter.admin_api_key
    ) as other:
        adapter.release_memory_occupation(["kv_cache"])
        try:
            assert adapter.released_memory == {"kv_cache"}
            for call in (adapter.continue_generation, lambda: adapter.generate(input_ids=[1], sampling_params=GREEDY)):
                with pytest.raises(NotReadyError, match="kv_cache"):
                    call()
            waiting, replies = in_background(lambda: other.generate(input_ids=[1, 2], sampling_params=GREEDY))
            waiting.join(1.0)
            assert not replies
            assert not adapter.is_ready()
        finally:
            adapter.resume_memory_occupation()
        waiting.join(RUN_S)
    assert replies[0]["output_ids"] == expected
    assert adapter.generate(input_ids=[1, 2], sampling_params=GREEDY)["output_ids"] == expected


# -- keys --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "call", "message"),
    [
        ({"api_key": "wrong"}, "get_model_info", r"refused the api_key for /model_info \(401\)"),
        ({}, "get_model_info", r"needs an api_key for /model_info, but none was given \(401\)"),
        ({"admin_api_key": "wrong"}, "flush_cache", r"refused the admin_api_key for /flush_cache \(401\)"),
        ({"api_key": "wrong"}, "flush_cache", r"needs an admin_api_key for /flush_cache, but none was given \(401\)"),
        ({"api_key": "wrong"}, "check_keys", r"refused the api_key for /model_info \(401\)"),
    ],
)
def test_wrong_keys(adapter: HttpServerEngineAdapter, keys: dict[str, Any], call: str, message: str) -> None:
    with (
        HttpServerEngineAdapter.attach(adapter.base_url, **keys) as attached,
        pytest.raises(ServerError, match=f"{adapter.base_url} {message}"),
    ):
        getattr(attached, call)()


def test_every_route_needs_its_key(adapter: HttpServerEngineAdapter) -> None:
    """The routes of this library, and those that the server describes: without a key, with the API key."""
    adapter.check_keys()
    with requests.Session() as session:
        session.trust_env = False

        def status(method: str, path: str, key: str | None) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return session.request(method, adapter.base_url + path, json={}, headers=headers, timeout=RUN_S).status_code

        for endpoint in ENDPOINTS.values():
            if endpoint.path in OPEN:
                assert status(endpoint.method, endpoint.path, None) in (200, 401), endpoint.path
                continue
            assert status(endpoint.method, endpoint.path, None) == 401, endpoint.path
            assert status(endpoint.method, endpoint.path, "wrong") == 401, endpoint.path
            if endpoint.needs_admin_key:
                assert status(endpoint.method, endpoint.path, adapter.api_key) in (401, 403), endpoint.path
        described = session.get(
            f"{adapter.base_url}/openapi.json", headers={"Authorization": f"Bearer {adapter.api_key}"}, timeout=RUN_S
        ).json()
        for path, operations in described.get("paths", {}).items():
            for method in operations:
                if not path.startswith(("/health", "/ping", "/metrics", "/ready")):
                    assert status(method.upper(), path.replace("{", "").replace("}", ""), None) == 401, path


# -- what a server says about itself -----------------------------------------------------------------


def test_the_version_of_the_weights_is_an_int(adapter: HttpServerEngineAdapter, engine: VerlEngine) -> None:
    before = adapter.get_model_info()["weight_version"]
    assert before == engine.weight_version
    adapter.update_weight_version(before + 700)
    try:
        assert adapter.get_model_info()["weight_version"] == before + 700
        meta = adapter.generate(input_ids=[1], sampling_params=GREEDY)["meta_info"]
        assert meta["weight_version"] == before + 700
        assert meta["weight_versions"] == [{"version": before + 700, "start": 0, "end": meta["completion_tokens"]}]
    finally:
        adapter.update_weight_version(before)
    assert adapter.get_model_info()["weight_version"] == before


def test_facts_of_a_server(adapter: HttpServerEngineAdapter, shared_engines: SharedEngines) -> None:
    info, args = adapter.get_model_info(), adapter.get_server_info()
    assert info["model_path"] == args["model_path"] == str(shared_engines.model)
    assert info["is_generation"] is True
    assert (args["tp_size"], args["dp_size"], args["dtype"], args["context_length"]) == (1, 1, "float32", 32768)
    assert args["max_running_requests"] is None or args["max_running_requests"] >= 1
    assert not {"api_key", "admin_api_key"} & {name for name, value in args.items() if value}
    wait_until(lambda: adapter.health() and adapter.ping(), RUN_S, "the server does not answer")


def test_the_cpu_time_of_a_server_is_a_sign_of_life(adapter: HttpServerEngineAdapter) -> None:
    """A replica that computes without a new token, for example while a kernel is compiled, is not stalled."""
    assert adapter.process is not None
    before = adapter.process.scheduler_cpu().own_s
    adapter.generate(input_ids=[1, 2], sampling_params={"max_new_tokens": 200, "ignore_eos": True})
    assert adapter.process.scheduler_cpu().own_s > before > 0.0
