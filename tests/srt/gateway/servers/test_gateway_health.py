"""Health, metrics and request ids of the gateway, and the doctor's walk along its chain, on a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers import adapter_of, free_port, remote_server_of, wait_until
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from transformers import AutoTokenizer

from verl_server import HttpServerEngineAdapter, RemoteServer, VerlEngine
from verl_server.agent import RolloutLimits, as_generate_fn
from verl_server.agent.engines import limit_concurrency
from verl_server.doctor import Finding, Level, examine_gateway
from verl_server.gateway import DiscoveredServers, Gateway
from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.health import PROBE_FILE
from verl_server.gateway.http.app import make_app
from verl_server.gateway.sessions.session_store import SessionStore
from verl_server.gateway.threads import run_aside
from verl_server.router.client import RouterClient
from verl_server.tiny import make_tokenizer
from verl_server.trajectory import ChatRenderer, load_session

LIMITS = RolloutLimits(max_context_tokens=2000, max_turns=1000)
SHORT = {"max_new_tokens": 5, "temperature": 1.0}
ROUTER_KEY = "the-key-of-the-router"


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


@pytest.fixture
def gateway(shared_engine: VerlEngine, tmp_path: Path) -> Iterator[Gateway]:
    with Gateway(shared_engine, tmp_path / "run", limits=LIMITS) as gateway:
        yield gateway


def get(gateway: Gateway, path: str, key: str | None = None, **headers: str) -> httpx.Response:
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return httpx.get(f"{gateway.url}{path}", headers=headers, timeout=60.0)


def ask(gateway: Gateway, key: str, *, path: str = "/v1/chat/completions", retry: int = 0, **fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}], **fields}
    headers = {"authorization": f"Bearer {key}", "x-stainless-retry-count": f"{retry}"}
    return httpx.post(f"{gateway.url}{path}", json=body, headers=headers, timeout=60.0)


def metric(gateway: Gateway, name: str) -> float:
    """The value of a metric, with its labels as they are written."""
    lines = get(gateway, "/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == f"verl_gateway_{name}")


# -- health -----------------------------------------------------------------------------------------------


def test_health_of_a_gateway_with_a_server(gateway: Gateway) -> None:
    for path in ("/health/liveliness", "/health/liveness"):
        assert get(gateway, path).json() == {"status": "healthy"}
    assert httpx.head(gateway.url, timeout=60.0).status_code == 200
    ready = get(gateway, "/health/readiness")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "reasons": []})
    assert get(gateway, "/health").status_code == 401
    assert get(gateway, "/health", gateway.create_session()[1]).status_code == 401
    report = get(gateway, "/health", gateway.admin_key)
    assert (report.status_code, report.json()["status"]) == (200, "healthy")
    assert report.json()["ping"]["seconds"] > 0
    assert list(gateway.config.run_dir.glob("*.jsonl")) == [], "the token of the ping is no sample"
    assert list(gateway.config.run_dir.glob("*probe*")) == []


def test_a_folder_that_is_gone_is_named(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "run").rename(tmp_path / "moved")
    reply = get(gateway, "/health/readiness")
    assert reply.status_code == 503
    assert reply.json()["reasons"] == ["the folder of the records takes no files: No such file or directory"]
    assert str(tmp_path) not in reply.text
    (tmp_path / "moved").rename(tmp_path / "run")
    assert get(gateway, "/health/readiness").status_code == 200


def test_a_gateway_that_shuts_down_is_not_ready(tmp_path: Path) -> None:
    async def run() -> httpx.Response:
        store = SessionStore(tmp_path, _no_session, LIMITS)
        transport = httpx.ASGITransport(make_app(store, GatewayConfig(tmp_path, None, LIMITS), lambda _: ""))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            assert (await client.get("/health/readiness")).status_code == 200
            store.close()
            assert (await client.get("/health/liveness")).status_code == 200
            return await client.get("/health/readiness")

    reply = asyncio.run(run())
    assert (reply.status_code, reply.json()["reasons"]) == (503, ["the gateway shuts down"])
    assert reply.headers["retry-after"] == "1"


def test_a_gateway_whose_worker_threads_are_busy_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts are rendered in worker threads. The disk takes files meanwhile."""
    monkeypatch.setattr("verl_server.gateway.health.FOLDER_TIMEOUT_S", 30.0)
    monkeypatch.setattr("verl_server.gateway.threads.MAX_WORKERS", 1)
    go, was_ready = threading.Event(), list[bool]()

    async def run() -> httpx.Response:
        rendering = asyncio.create_task(run_aside(False, go.wait, 10))
        store = SessionStore(tmp_path, _no_session, LIMITS)
        transport = httpx.ASGITransport(make_app(store, GatewayConfig(tmp_path, None, LIMITS), lambda _: ""))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            reply = await client.get("/health/readiness")
        was_ready.append(not rendering.done())
        go.set()
        await rendering
        return reply

    assert asyncio.run(run()).status_code == 200
    assert was_ready == [True], "readiness waited for the worker threads"


def test_a_folder_that_takes_no_file_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open a FIFO for writing waits for a reader, as a network file system that hangs."""
    monkeypatch.setattr("verl_server.gateway.health.FOLDER_TIMEOUT_S", 0.05)
    probe = tmp_path / PROBE_FILE
    os.mkfifo(probe)

    async def run() -> None:
        store = SessionStore(tmp_path, _no_session, LIMITS)
        transport = httpx.ASGITransport(make_app(store, GatewayConfig(tmp_path, None, LIMITS), lambda _: ""))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            reply = await client.get("/health/readiness")
            assert reply.status_code == 503
            assert reply.json()["reasons"] == ["the folder of the records took no file for 0.05 s"]
            reader = os.open(probe, os.O_RDONLY | os.O_NONBLOCK)
            while (await client.get("/health/readiness")).status_code != 200:
                await asyncio.sleep(0.01)
            os.close(reader)

    asyncio.run(asyncio.wait_for(run(), 30))


def _no_session(*_: Any) -> Any:
    raise AssertionError


def test_paused_generation_is_named_by_the_ping(
    gateway: Gateway, shared_engine: VerlEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight update that was interrupted leaves generation paused: nothing fails, and nothing goes on."""
    monkeypatch.setattr("verl_server.gateway.health.PING_TIMEOUT_S", 1.0)
    adapter = adapter_of(shared_engine)
    adapter.pause_generation()
    try:
        assert get(gateway, "/health/readiness").status_code == 200
        reply = get(gateway, "/health", gateway.admin_key)
        assert reply.status_code == 503
        assert reply.json()["reasons"] == ["the engine did not generate a token: no token within 1 s"]
        (stuck,) = problems(gateway.url, VERL_SERVER_GATEWAY_ADMIN_KEY=gateway.admin_key)
        assert (stuck.title, "paused and never continued" in stuck.fix) == ("Engine", True)
    finally:
        adapter.continue_generation()
    assert get(gateway, "/health", gateway.admin_key).status_code == 200


class HeldEngine:
    """A real server whose replies wait until `go` is set. `ignores_cancellation`: also if the request is cancelled."""

    def __init__(self, engine: VerlEngine, *, ignores_cancellation: bool = False) -> None:
        self._generate = as_generate_fn(adapter_of(engine).asynchronous)
        self._ignored = [asyncio.CancelledError] if ignores_cancellation else []
        self.go, self.num_calls = threading.Event(), 0

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        self.num_calls += 1
        reply = await self._generate(rid=rid, session_id=session_id, **request)
        while not self.go.is_set():
            with contextlib.suppress(*self._ignored):
                await asyncio.sleep(0.005)
        return reply


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_busy_engine_is_healthy_if_tokens_have_come(
    shared_engine: VerlEngine,
    renderer: ChatRenderer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_stream: bool,
) -> None:
    """The engine takes one request at a time, so the ping waits behind the turn.

    The tokens of a turn without a stream come at its end, so the engine is also healthy while such a turn runs.
    """
    monkeypatch.setattr("verl_server.gateway.health.PING_TIMEOUT_S", 0.2)
    limit = "verl_server.gateway.health." + ("RECENT_TOKENS_S" if is_stream else "SILENT_TURNS_S")
    held = HeldEngine(shared_engine)
    busy = limit_concurrency(held, 1)
    with Gateway(busy, tmp_path, renderer=renderer, limits=LIMITS) as gateway, ThreadPoolExecutor(2) as pool:
        _, key = gateway.create_session(sampling_params=SHORT)

        def check(*, is_healthy: bool) -> None:
            reply = get(gateway, "/health", gateway.admin_key)
            assert reply.status_code == (200 if is_healthy else 503)
            if is_healthy:
                assert list(reply.json()["ping"]) == ["seconds_without_tokens"]
            else:
                assert reply.json()["reasons"] == ["the engine did not generate a token: no token within 0.2 s"]

        try:
            turns = [pool.submit(ask, gateway, key, stream=is_stream)]
            wait_until(lambda: held.num_calls == 1, 30, "no turn")
            check(is_healthy=not is_stream)
            held.go.set()
            assert turns[0].result().status_code == 200
            held.go.clear()
            messages = [{"role": "user", "content": "b"}]
            turns.append(pool.submit(ask, gateway, key, stream=is_stream, messages=messages))
            wait_until(lambda: held.num_calls == 2, 30, "no second turn")
            check(is_healthy=True)
            env = {"VERL_SERVER_GATEWAY_ADMIN_KEY": gateway.admin_key}
            assert "busy" in next(each.detail for each in examine_gateway(gateway.url, env) if each.title == "Engine")
            monkeypatch.setattr(limit, 0.0)
            check(is_healthy=False)
        finally:
            held.go.set()


def test_a_ping_that_ignores_its_cancellation_ends(
    shared_engine: VerlEngine, renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_server.gateway.health.PING_TIMEOUT_S", 0.2)
    monkeypatch.setattr("verl_server.agent.user_code.CANCEL_TIMEOUT_S", 0.1)
    held = HeldEngine(shared_engine, ignores_cancellation=True)
    with Gateway(held, tmp_path, renderer=renderer, limits=LIMITS) as gateway:
        try:
            reply = get(gateway, "/health", gateway.admin_key)
            assert reply.json()["reasons"] == ["the engine did not generate a token: no token within 0.2 s"]
        finally:
            held.go.set()


def test_released_memory_is_named(gateway: Gateway, shared_engine: VerlEngine, tmp_path: Path) -> None:
    """Also by a gateway that finds its servers by URL."""
    adapter = adapter_of(shared_engine)
    with Gateway(DiscoveredServers([remote_server_of(adapter)]), tmp_path / "found", limits=LIMITS) as found:
        wait_until(lambda: get(found, "/health/readiness").status_code == 200, 30, "the server is not found")
        adapter.release_memory_occupation()
        try:
            for asked in (gateway, found):
                reply = get(asked, "/health/readiness")
                assert reply.status_code == 503
                assert "the engine has no loaded model: its memory is released" in reply.json()["reasons"][0]
        finally:
            adapter.resume_memory_occupation()
            shared_engine.update_weights_from_tensor(_weights(shared_engine))
        for asked in (gateway, found):
            assert get(asked, "/health/readiness").status_code == 200


def _weights(engine: VerlEngine) -> Any:
    from helpers import reference_model

    return reference_model(adapter_of(engine).get_model_info()["model_path"]).state_dict().items()


# -- metrics ----------------------------------------------------------------------------------------------


def test_metrics_count_turns_retries_forks_and_errors(gateway: Gateway) -> None:
    info, key = gateway.create_session(sampling_params=SHORT)
    gateway.create_session()
    ask(gateway, key)
    ask(gateway, key, retry=1)
    assert ask(gateway, key, stream=True).status_code == 200  # another sample of the same prompt: a fork
    assert ask(gateway, key, path="/v1/messages").status_code == 200
    assert ask(gateway, key, path="/v1/messages", max_tokens=0).status_code == 400
    assert ask(gateway, "sk-wrong").status_code == 401
    graph = load_session(gateway.config.run_dir / f"{info.id}.jsonl")
    sampled = [node for node in graph.nodes if node.sampled]
    assert metric(gateway, 'turns_total{dialect="chat/completions",status="200"}') == 3
    assert metric(gateway, 'turns_total{dialect="chat/completions",status="401"}') == 1
    assert metric(gateway, 'turns_total{dialect="messages",status="200"}') == 1
    assert metric(gateway, 'turns_total{dialect="messages",status="400"}') == 1
    assert metric(gateway, "attached_retries_total") == 1
    assert metric(gateway, "sampled_tokens_total") == sum(len(node.token_ids) for node in sampled)
    assert metric(gateway, "prompt_tokens_total") == sum(graph.num_tokens(node.parent or 0) for node in sampled)
    assert metric(gateway, 'forks_total{reason="sample"}') == 2
    assert metric(gateway, "turn_seconds_count") == 6
    assert metric(gateway, "first_token_seconds_count") == 4
    assert metric(gateway, "queue_seconds_count") == len(sampled) == 3
    assert metric(gateway, "sessions_open") == 2
    assert metric(gateway, "open_streams") == metric(gateway, "running_turns") == 0
    text = get(gateway, "/metrics").text
    assert set(re.findall(r'[{,](\w+)="', text)) <= {"dialect", "status", "reason", "le"}
    assert info.id not in text
    assert key not in text


def test_metrics_show_what_runs(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.gateway.sessions.turns.ABANDONED_S", 0.1)
    _, key = gateway.create_session(sampling_params={"max_new_tokens": 1900, "ignore_eos": True})
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.stream("POST", f"{gateway.openai_url}/chat/completions", json=body, headers=headers) as reply:
        lines = reply.iter_lines()
        next(lines)
        wait_until(lambda: metric(gateway, "running_turns") == 1, 20, "no turn runs")
        assert metric(gateway, "open_streams") == 1
    wait_until(lambda: metric(gateway, "aborted_generations_total") == 1, 20, "the turn was not aborted")
    assert metric(gateway, "running_turns") == metric(gateway, "open_streams") == 0
    assert metric(gateway, 'turns_total{dialect="chat/completions",status="200"}') == 1


# -- request ids ------------------------------------------------------------------------------------------


def test_each_request_has_an_id(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="verl_server.gateway")
    reply = get(gateway, "/v1/models", **{"x-request-id": "from-the-client.7"})
    assert reply.headers["x-request-id"] == reply.headers["request-id"] == "from-the-client.7"
    wait_until(lambda: "from-the-client.7: GET /v1/models, status 401" in caplog.text, 5, "no line of the log")
    made = get(gateway, "/v1/models").headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)
    for wrong in ("a b", "a" * 129, "a\tb", "<a>"):
        assert get(gateway, "/health/liveness", **{"x-request-id": wrong}).headers["x-request-id"] != wrong


def test_a_key_in_the_path_is_in_no_log(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="verl_server.gateway")
    _, key = gateway.create_session(sampling_params=SHORT)
    assert ask(gateway, "none", path=f"/session/{key}/v1/chat/completions").status_code == 200
    wait_until(lambda: "POST /session/{session_key}/v1/chat/completions, status 200" in caplog.text, 5, "no line")
    assert key not in caplog.text


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans of a program that has set a tracer provider."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("verl_server.tracing._tracer", provider.get_tracer("verl_server"))
    return exporter


def test_a_request_is_a_span_of_the_trace_of_its_client(gateway: Gateway, spans: InMemorySpanExporter) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    reply = get(gateway, "/health/liveness", traceparent=parent)

    def found() -> list[Any]:
        trace_id = int(parent.split("-")[1], 16)
        return [span for span in spans.get_finished_spans() if span.context.trace_id == trace_id]

    wait_until(found, 5, "no span")
    (span,) = found()
    assert span.name == "gateway.request"
    assert span.attributes["verl.request_id"] == reply.headers["x-request-id"]
    assert span.attributes["http.response.status_code"] == 200


# -- the doctor -------------------------------------------------------------------------------------------


def problems(url: str, **env: str) -> list[Finding]:
    """What the doctor finds, without what is well."""
    return [finding for finding in examine_gateway(url, env) if finding.level is not Level.OK]


def test_the_doctor_finds_nothing_wrong(gateway: Gateway) -> None:
    _, key = gateway.create_session("a")
    env = {"ANTHROPIC_AUTH_TOKEN": key, "OPENAI_API_KEY": key, "VERL_SERVER_GATEWAY_ADMIN_KEY": gateway.admin_key}
    env |= {"ANTHROPIC_BASE_URL": gateway.url, "OPENAI_BASE_URL": gateway.openai_url}
    for url in (gateway.url, gateway.openai_url, f"{gateway.url}/"):
        found = examine_gateway(url, env)
        assert [finding for finding in found if finding.level is not Level.OK] == []
        assert {"Agent -> gateway", "Base URL", "Session key", "Model name", "Engine"} <= {each.title for each in found}
    assert not load_session(gateway.config.run_dir / "a.jsonl").nodes, "the doctor records nothing"


def test_the_doctor_names_wrong_base_urls_and_keys(gateway: Gateway, shared_engine: VerlEngine) -> None:
    (nothing,) = problems(f"http://127.0.0.1:{free_port()}")
    assert "nothing answers" in nothing.detail
    (server,) = problems(adapter_of(shared_engine).base_url)
    assert "another program, perhaps an SGLang server" in server.detail
    urls = {"ANTHROPIC_BASE_URL": gateway.openai_url, "OPENAI_BASE_URL": gateway.url}
    assert [finding.fix for finding in problems(gateway.url, **urls)] == [
        f"export ANTHROPIC_BASE_URL={gateway.url}",
        f"export OPENAI_BASE_URL={gateway.openai_url}",
    ]
    (elsewhere,) = problems(gateway.url, OPENAI_BASE_URL="https://example.org/v1")
    assert "not this gateway" in elsewhere.detail
    (key,) = problems(gateway.url, ANTHROPIC_API_KEY=gateway.admin_key)
    assert "refuses the key in ANTHROPIC_API_KEY (401)" in key.detail
    assert gateway.admin_key not in f"{key}"
    (admin,) = problems(gateway.url, VERL_SERVER_GATEWAY_ADMIN_KEY="sk-wrong")
    assert admin.title == "Admin key"
    info, key_of_ended = gateway.create_session()
    gateway.end_session(info.id)
    (ended,) = problems(gateway.url, OPENAI_API_KEY=key_of_ended)
    assert "has ended" in ended.detail


def test_the_doctor_names_a_server_that_does_not_run(tmp_path: Path) -> None:
    server = f"http://127.0.0.1:{free_port()}"
    with Gateway(DiscoveredServers([RemoteServer(server)]), tmp_path) as gateway:
        _, key = gateway.create_session()
        wait_until(lambda: "none of the 1" in get(gateway, "/health/readiness").text, 20, "not probed")
        (ready,) = problems(gateway.url)
        assert ready.title == "Readiness"
        assert server not in f"{ready}", "addresses are for the admin only"
        engine, replica = problems(gateway.url, OPENAI_API_KEY=key, VERL_SERVER_GATEWAY_ADMIN_KEY=gateway.admin_key)
        assert (engine.title, replica.title) == ("Gateway -> engine", "Gateway -> engine")
        assert server in replica.detail


# -- the chain with a router ------------------------------------------------------------------------------


@pytest.fixture
def router(adapter: HttpServerEngineAdapter) -> Iterator[Callable[[str], str]]:
    """Starts routers in front of a server, and returns their URL."""
    started = list[subprocess.Popen[str]]()

    def start(server: str) -> str:
        keys = {"VERL_SERVER_API_KEY": ROUTER_KEY, "VERL_SERVER_REPLICA_API_KEY": adapter.api_key or "none"}
        command = [sys.executable, "-m", "verl_server.cli", "router", "--replica", server]
        started.append(subprocess.Popen(command, env=os.environ | keys, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        for line in started[-1].stdout:
            if line.startswith("Ready: "):
                return line.split()[1]
        raise AssertionError("the router has not started")

    yield start
    for process in started:
        process.terminate()
        process.wait(30)


def test_the_doctor_walks_the_chain_with_a_router(
    adapter: HttpServerEngineAdapter, renderer: ChatRenderer, router: Callable[[str], str], tmp_path: Path
) -> None:
    def found(url: str, key: str, limits: RolloutLimits = LIMITS, model: ChatRenderer = renderer) -> list[str]:
        folder = tmp_path / f"{time.monotonic_ns()}"
        with Gateway(RouterClient(url, key, 0.0), folder, renderer=model, limits=limits) as gateway:
            return [
                f"{finding.title}: {finding.detail}"
                for finding in problems(gateway.url, VERL_SERVER_GATEWAY_ADMIN_KEY=gateway.admin_key)
            ]

    url = router(adapter.base_url)
    assert found(url, ROUTER_KEY) == []
    (wrong_key,) = found(url, "wrong")
    assert wrong_key.startswith("Gateway -> router: the key is refused")
    (no_router,) = found(f"http://127.0.0.1:{free_port()}", ROUTER_KEY)
    assert "cannot be reached" in no_router
    make_tokenizer(tmp_path / "other-model")
    other = ChatRenderer(AutoTokenizer.from_pretrained(tmp_path / "other-model"))
    (wrong_model,) = found(url, ROUTER_KEY, model=other)
    assert wrong_model.startswith("Model name: the gateway has the tokenizer")
    assert "other-model" in wrong_model
    assert f"the engine serves {adapter.get_model_info()['model_path']}" in wrong_model
    (too_long,) = found(url, ROUTER_KEY, RolloutLimits(max_context_tokens=1_000_000))
    assert too_long.startswith("Context length: the gateway allows 1000000 tokens, and the engine")
    lost = router(f"http://127.0.0.1:{free_port()}")
    (replica,) = found(lost, ROUTER_KEY)
    assert replica.startswith("Router -> engine: http://127.0.0.1")
    assert "receives no requests" in replica


def test_the_command_of_the_doctor(gateway: Gateway) -> None:
    env = {**os.environ, "VERL_SERVER_GATEWAY_ADMIN_KEY": gateway.admin_key, "OPENAI_API_KEY": "sk-wrong"}
    command = [sys.executable, "-m", "verl_server.cli", "doctor", "--gateway", gateway.openai_url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert [entry["title"] for entry in report["findings"] if entry["level"] == "fail"] == ["Session key"]
    assert "sk-wrong" not in done.stdout
    assert gateway.admin_key not in done.stdout
