"""`verl-server router` in front of three servers: `/generate`, the OpenAI paths, lost replicas, invalid requests."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from helpers import GREEDY, PROMPTS, all_at_once, wait_until
from stub_servers import serving

from verl_server import HttpServerEngineAdapter, RouterClient, RouterConfig
from verl_server.engine.servers import HttpServers
from verl_server.errors import BadInputError, ServerError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http import RouterServer
from verl_server.types import ServerInfo

KEY, ADMIN_KEY = "callers-key", "admin-key-of-the-replicas"
ENDLESS = {"max_new_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def servers(tiny: Callable[..., Path]) -> Iterator[list[Any]]:
    folder = str(tiny("qwen3"))

    def start() -> Any:
        return HttpServerEngineAdapter(
            model_path=folder, dtype="float32", max_total_tokens=8192, api_key="replicas", admin_api_key=ADMIN_KEY
        )

    with all_at_once(start, start, start) as started:
        yield started


@pytest.fixture(scope="module")
def url(servers: list[Any]) -> Iterator[str]:
    """URL of the router process."""
    command = [sys.executable, "-m", "verl_server.cli", "router", *(f"--replica={one.base_url}" for one in servers)]
    # As `echo` writes keys into files.
    env = {**os.environ, "VERL_SERVER_API_KEY": KEY + "\r\n", "VERL_SERVER_REPLICA_API_KEY": "replicas\n"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert process.stderr is not None
    ready = process.stdout.readline()
    assert ready.startswith("Ready: http://127.0.0.1:"), ready + process.stderr.read()
    try:
        yield ready.split()[1]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def call(url: str, body: Any = None, key: str | None = KEY, **headers: str) -> tuple[int, Any]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json", **headers})
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            raw, status = response.read(), response.status
    except urllib.error.HTTPError as error:
        raw, status = error.read(), error.code
    try:
        return status, json.loads(raw)
    except ValueError:
        return status, raw.decode()


def test_generate_replies_like_sglang(url: str, servers: list[Any]) -> None:
    expected = servers[0].generate(input_ids=PROMPTS[0], sampling_params=GREEDY, return_logprob=True)
    status, reply = call(
        f"{url}/generate", {"input_ids": PROMPTS[0], "sampling_params": GREEDY, "return_logprob": True}
    )
    assert status == 200
    assert reply["output_ids"] == expected["output_ids"]
    status, replies = call(f"{url}/generate", {"input_ids": PROMPTS, "sampling_params": GREEDY})
    assert status == 200
    assert replies[0]["output_ids"] == expected["output_ids"]
    assert len(replies) == len(PROMPTS)


def test_session_stays_on_one_replica(url: str) -> None:
    """Later turns find the earlier turns in the prefix cache of the session's replica."""
    history = list(range(100, 160))
    for turn in range(3):
        status, reply = call(
            f"{url}/generate", {"input_ids": history, "sampling_params": GREEDY, "session_id": "conversation"}
        )
        assert status == 200
        if turn:
            assert reply["meta_info"]["cached_tokens"] >= len(history) - 20
        history += reply["output_ids"] + [7, 8, 9]


def test_openai_paths_are_forwarded(url: str) -> None:
    name = call(f"{url}/v1/models")[1]["data"][0]["id"]
    body = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    status, reply = call(f"{url}/v1/chat/completions", body)
    assert status == 200, reply
    assert reply["choices"][0]["finish_reason"] in ("length", "stop")
    status, text = call(f"{url}/v1/chat/completions", {**body, "stream": True})
    assert status == 200
    assert str(text).rstrip().endswith("data: [DONE]")


def test_metrics_health_and_replicas(url: str) -> None:
    status, text = call(f"{url}/metrics", key=None)
    assert status == 200
    assert "verl_router_finished_total" in text
    assert 'verl_replica_admitted{replica="http://127.0.0.1:' in text
    assert call(f"{url}/health", key=None)[0] == 200
    assert {one["admitted"] for one in call(f"{url}/replicas")[1]} == {True}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "must be a JSON object"),
        ({"input_ids": [], "sampling_params": {}}, 400, "empty"),
        ({"input_ids": [10**9], "sampling_params": {}}, 400, "vocabulary"),
        ({"input_ids": [1], "session_id": "x" * 10_000_000}, 400, "session_id"),
        ({"input_ids": [1], "timeout_s": -1}, 400, "deadline has passed"),
        ({"input_ids": [1], "timeout_s": "soon"}, 400, "timeout_s"),
        ({"input_ids": [[1], [2]], "rid": "one id"}, 400, "2 prompts need a list of 2 request ids"),
        ({"input_ids": [[1], [2]], "stream": True}, 400, "cannot be streamed"),
        ({"input_ids": [1], "return_logprobs": True}, 400, "did you mean 'return_logprob'"),
        ({"input_ids": [1], "min_weight_verison": 0}, 400, "did you mean 'min_weight_version'"),
        ({"input_ids": [1], "sampling_params": {"max_tokens": 4}}, 400, "did you mean 'max_new_tokens'"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": "ten"}}, 400, "['max_new_tokens'] must be a valid"),
        (
            {"input_ids": [1], "sampling_params": {"max_tokens": 4, "max_new_tokens": 99}},
            400,
            "no sampling parameter 'max_tokens'",
        ),
        ({"input_ids": [1], "weight_version": 77}, 503, "no replica serves weight version 77"),
        ({"input_ids": [1], "sampling_params": ENDLESS, "timeout_s": 0.2}, 504, "0.2 s"),
    ],
)
def test_invalid_requests(body: Any, status: int, message: str, url: str) -> None:
    got, reply = call(f"{url}/generate", body)
    assert (got, message in reply["error"]["message"]) == (status, True), reply
    assert call(f"{url}/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})[0] == 200


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"logprobs": True, "top_logprobs": 1_000_000}),
    (CHAT, {"stop_token_ids": [2**62], "min_tokens": 2}),
    (CHAT, {"input_ids": [1_000_000]}),
    (CHAT, {"max_tokens": 2, "priority": 2**62}),
    (CHAT, {"max_tokens": 2, "custom_params": {"a": {"b": {"c": 1}}}}),
    (COMPLETIONS, {"prompt": [1_000_000]}),
    (COMPLETIONS, {"prompt": [-1]}),
    (COMPLETIONS, {"prompt": [[1, 2], [320]]}),
    (COMPLETIONS, {"prompt": "hi", "echo": True, "logprobs": 1_000_000}),
    (COMPLETIONS, {"prompt": "hi", "logit_bias": {"5": 1e300}}),
    (COMPLETIONS, {"prompt": "hi", "top_k": 2**62}),
    (COMPLETIONS, {"prompt": "hi", "n": 10**7}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "top_k": 2**40}),
    ("/v1/messages", {"max_tokens": 2, "top_k": 2**40}),
]
#: Bodies for paths that routers do not forward, or check themselves.
HOSTILE_DIRECT: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"input_ids": [[]]}),
    ("/generate", {"input_ids": [1], "return_logprob": True, "top_logprobs_num": [5]}),
    ("/generate", {"input_ids": [1], "return_logprob": True, "top_logprobs_num": -5}),
    ("/generate", {"input_ids": [1], "return_logprob": True, "token_ids_logprob": [1] * 1000}),
    ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "stop_token_ids": [320]}}),
    ("/generate", {"input_ids": [1], "sampling_params": {"custom_params": "x"}}),
    ("/generate", {"input_ids": [1], "token_indices_to_pool": [50]}),
    ("/generate", {"input_ids": [1], "session_params": {"offset": "x"}}),
    ("/v1/score", {"query": [10**6], "items": [[5]], "label_token_ids": [5]}),
    ("/vertex_generate", {"instances": [{"input_ids": [10**6]}], "parameters": {}}),
]


def test_no_request_ends_a_server(url: str, servers: list[Any]) -> None:
    """Whichever path it takes, through the router or directly with the key for generation."""
    name = call(f"{url}/v1/models")[1]["data"][0]["id"]
    through = [(url, KEY, *each) for each in HOSTILE]
    direct = [(servers[0].base_url, "replicas", *each) for each in HOSTILE + HOSTILE_DIRECT]
    for base_url, key, path, body in through + direct:
        named = {"model": name, "messages": [{"role": "user", "content": "hi"}], **body}
        status, reply = call(base_url + path, body if path in ("/generate", "/vertex_generate") else named, key)
        assert status == 400, (path, body, status, reply)
    assert all(server.generate(input_ids=[1], sampling_params={"max_new_tokens": 1}) for server in servers)


def test_no_reply_of_a_server_holds_its_keys(servers: list[Any]) -> None:
    for path in ("/server_info", "/get_server_info", "/model_info", "/v1/models"):
        status, reply = call(servers[0].base_url + path, key="replicas")
        assert status == 200
        assert ADMIN_KEY not in json.dumps(reply), path
        assert "api_key" not in json.dumps(reply), path


def test_client_refuses_values_that_are_not_json(url: str) -> None:
    async def generate(**request: Any) -> Any:
        async with RouterClient(f"{url}/v1", KEY) as client:
            return await client.generate(sampling_params={"max_new_tokens": 1, "stop_token_ids": {7}}, **request)

    with pytest.raises(BadInputError, match=r"JSON: a Tensor is no JSON value; convert it with \.tolist\(\)"):
        asyncio.run(generate(input_ids=[1, torch.tensor(2)]))
    with pytest.raises(BadInputError, match="did you mean 'return_logprob'"):
        asyncio.run(generate(input_ids=[1], return_logprobs=True))
    with pytest.raises(BadInputError, match="returns the whole generation: leave stream out"):
        asyncio.run(generate(input_ids=[1, 2], stream=True))
    assert asyncio.run(generate(input_ids=[1, 2], stream=False, timeout_s=np.float32(60)))["output_ids"]


def test_session_stays_on_one_of_several_servers(servers: list[Any]) -> None:
    """Also without a router: the second request finds its prompt in the prefix cache of the session's server."""
    members = [ServerInfo(one.base_url, 1) for one in servers]
    engine = HttpServers(servers, members)
    for session in ("first", "second"):
        prompt = [*session.encode(), *range(100, 160)]
        replies = [engine.generate(input_ids=prompt, sampling_params=GREEDY, session_id=session) for _ in range(2)]
        assert replies[1]["meta_info"]["cached_tokens"] >= len(prompt) - 20


def test_status_shows_the_replicas(url: str, servers: list[Any]) -> None:
    def status(*arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "verl_server.cli", "status", *arguments]
        env = {**os.environ, "VERL_SERVER_API_KEY": key, "COLUMNS": "160"}
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=env)

    shown = status(url)
    assert shown.returncode == 0, shown.stderr
    assert all(one.base_url in shown.stdout for one in servers)
    assert [row["admitted"] for row in json.loads(status(url, "--json").stdout)] == [True] * len(servers)
    wrong = status(url, key="wrong")
    assert (wrong.returncode, "refused the key (401)" in wrong.stderr) == (1, True)
    unreachable = status("http://127.0.0.1:1")
    assert (unreachable.returncode, "cannot be reached" in unreachable.stderr) == (1, True)


def test_requests_need_the_api_key(url: str) -> None:
    for key in (None, "wrong", "replicas"):
        assert call(f"{url}/generate", {"input_ids": [1]}, key=key)[0] == 401

    async def generate() -> None:
        async with RouterClient(url, "wrong") as client:
            await client.generate(input_ids=[1])

    message = rf"the router at {url} refused /generate \(401\)\. Pass the key of the router: RolloutManager\.router_key"
    with pytest.raises(ServerError, match=message) as caught:
        asyncio.run(generate())
    assert caught.value.details == {"status": 401, "url": f"{url}/generate", "key": "api_key"}


def test_router_needs_a_replica() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verl_server.cli", "router"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert "replica" in done.stderr


def test_only_results_with_a_rid_are_stored(servers: list[Any]) -> None:
    """A repeated rid receives the stored result. Equal requests without a rid are generated each time."""

    async def run() -> None:
        dispatcher = Dispatcher(RouterConfig(result_cache_bytes=1 << 16))
        dispatcher.pool.add_replica("a", servers[0].asynchronous, 0)
        request = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
        for _ in range(3):
            await dispatcher.generate(request)
        assert dispatcher.counters.finished == 3
        assert dispatcher.snapshot().stored_results == 0
        replies = [await dispatcher.generate(request, rid="same") for _ in range(3)]
        assert dispatcher.counters.finished == 4
        assert dispatcher.snapshot().stored_results == 1
        assert replies[0] == replies[1] == replies[2]
        snapshot = dispatcher.snapshot()
        assert (snapshot.counters.requests, snapshot.counters.attached) == (4, 2)
        assert [(one.name, one.running_requests, one.tokens_in_flight) for one in snapshot.replicas] == [("a", 0, 0)]
        for number in range(20):  # each result takes more than the 4 KiB of an empty result
            await dispatcher.generate(request, rid=f"r{number}")
        assert 0 < dispatcher.snapshot().stored_results < 16
        await dispatcher.close()
        await servers[0].asynchronous.close_connections()

    asyncio.run(run())


def test_generations_survive_a_lost_replica(url: str, servers: list[Any]) -> None:
    """A server is killed while 24 generations run: all of them finish, with the tokens of an undisturbed server."""
    sampling = {"temperature": 0.0, "max_new_tokens": 150, "ignore_eos": True}
    prompts = [[1, 2, 3 + i] for i in range(24)]
    expected = [one["output_ids"] for one in servers[0].generate(input_ids=prompts, sampling_params=sampling)]

    def generate(prompt: list[int]) -> Any:
        return call(f"{url}/generate", {"input_ids": prompt, "sampling_params": sampling})

    with ThreadPoolExecutor(len(prompts)) as pool:
        generating = [pool.submit(generate, prompt) for prompt in prompts]
        name = servers[2].base_url
        wait_until(
            lambda: any(one["name"] == name and one["tokens_in_flight"] > 60 for one in call(f"{url}/replicas")[1]),
            20.0,
            "the replica received no requests",
        )
        os.kill(servers[2].pids.main, signal.SIGKILL)
        replies = [one.result() for one in generating]
    assert {status for status, _ in replies} == {200}
    assert [reply["output_ids"] for _, reply in replies] == expected
    assert max(reply["meta_info"]["attempts"] for _, reply in replies) == 2
    gone = {one["name"]: one["admitted"] for one in call(f"{url}/replicas")[1]}
    assert gone == {servers[0].base_url: True, servers[1].base_url: True, servers[2].base_url: False}


def test_repeated_rid_receives_the_same_generation(url: str) -> None:
    """The connection breaks and the caller repeats the request with the same rid: one generation, not two."""
    body = {"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}, "rid": "again"}

    async def disconnect_early() -> None:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        raw = json.dumps(body).encode()
        head = [
            "POST /generate HTTP/1.1",
            f"Host: {host}",
            f"Authorization: Bearer {KEY}",
            f"Content-Length: {len(raw)}",
        ]
        writer.write("\r\n".join([*head, "", ""]).encode() + raw)
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        del reader

    def counter(name: str) -> float:
        lines = call(f"{url}/metrics", key=None)[1].splitlines()
        return float(next(line for line in lines if line.startswith(f"verl_router_{name}_total")).split()[1])

    before = counter("requests"), counter("attached")
    asyncio.run(disconnect_early())
    time.sleep(0.1)
    first = call(f"{url}/generate", body)
    second = call(f"{url}/generate", body)
    assert first == second
    assert first[0] == 200
    assert counter("attached") == before[1] + 2
    assert counter("requests") == before[0] + 1


@pytest.mark.parametrize(
    ("body", "headers", "status", "cause"),
    [
        ({"input_ids": [[1]] * 200_000}, {}, 400, "200000 prompts are more than"),
        ({"text": ["hi"] * 200_000, "stream": True}, {}, 400, "200000 prompts are more than"),
        (
            b'{"input_ids": [1], "custom_labels": ' + b"[" * 1000 + b"]" * 1000 + b"}",
            {},
            400,
            "levels of lists and objects",
        ),
        ({"input_ids": [1], "sampling_params": {"stop_regex": "(a|b)" * 10**6}}, {}, 400, "at most 256 characters"),
        (gzip.compress(b" " * (200 << 20)), {"Content-Encoding": "gzip"}, 415, "no compressed bodies"),
    ],
)
def test_limits_come_before_work(
    body: Any, headers: dict[str, str], status: int, cause: str, url: str, servers: list[Any]
) -> None:
    begin = time.monotonic()
    got, reply = call(f"{url}/generate", body, **headers)
    assert got == status, reply
    assert cause in reply["error"]["message"]
    assert time.monotonic() - begin < 3


def test_callers_without_a_key_keep_nobody_out(servers: list[Any]) -> None:
    """The router may open few files. Connections that send nothing, a part of a head, or a wrong key, use them up."""
    command = [sys.executable, "-m", "verl_server.cli", "router", f"--replica={servers[0].base_url}"]
    env = {**os.environ, "VERL_SERVER_API_KEY": KEY, "VERL_SERVER_REPLICA_API_KEY": "replicas"}
    limited = ["prlimit", "--nofile=256:256", *command]
    with subprocess.Popen(limited, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[1]
            address = (urllib.parse.urlsplit(url).hostname, urllib.parse.urlsplit(url).port)
            with contextlib.ExitStack() as stack:
                for number in range(400):
                    client = stack.enter_context(socket.create_connection(address))
                    client.sendall((b"", b"GET / HT", b"GET /replicas HTTP/1.1\r\nhost: a\r\n\r\n")[number % 3])
                for _ in range(3):
                    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
                    assert call(f"{url}/generate", body)[0] == 200
        finally:
            process.send_signal(signal.SIGTERM)


def test_a_head_that_does_not_arrive_closes_its_connection() -> None:
    async def run() -> bytes:
        async def handle(_: Any) -> web.StreamResponse:
            raise AssertionError("no request has arrived")

        async with serving(RouterServer(handle)) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", urllib.parse.urlsplit(url).port)
            writer.write(b"POST /generate HTTP/1.1\r\n")
            async with asyncio.timeout(5):
                received = await reader.read()
            writer.close()
            return received

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_server.router.http.HEAD_TIMEOUT_S", 0.3)
        assert asyncio.run(run()) == b""
