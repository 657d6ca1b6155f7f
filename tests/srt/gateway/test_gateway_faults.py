"""The gateway under faults: malformed requests, sessions that end too early, failures of the engine, and load."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI

from verl_server.adapter.sglang.replies import error_from_reply
from verl_server.agent import RolloutLimits
from verl_server.agent.episode import EpisodeState
from verl_server.errors import ServerDiedError, ServerError
from verl_server.gateway import Gateway
from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.conversation import normalize_messages
from verl_server.gateway.health import GatewayMetrics
from verl_server.gateway.http.app import make_app
from verl_server.gateway.http.connections import CONNECTION
from verl_server.gateway.sessions.history import meaning
from verl_server.gateway.sessions.session import Session
from verl_server.gateway.sessions.session_store import SessionStore
from verl_server.tiny import make_tokenizer
from verl_server.trajectory import ChatRenderer, load_session
from verl_server.trajectory.recorder import Recorder

TEMPLATE = (
    "{%- for t in tools or [] %}{{ t.function.name + ' ' }}{%- endfor %}"
    "{%- for m in messages %}<|im_start|>{{ m.role + '\\n' }}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIMITS = RolloutLimits(max_turns=1_000_000, max_context_tokens=4000)
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "a"}]


class Engine:
    """An engine that waits before each turn until `go` is set, and that fails with `error`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.logprobs: list[float | None] | None = None
        """Log probabilities of a reply, which SGLang writes as None for NaN. By default -1.0 for each token."""
        self.num_calls = 0

    async def wait_for_calls(self, num_calls: int) -> None:
        while self.num_calls < num_calls:
            await asyncio.sleep(0.01)

    async def generate(self, *, rid: str, session_id: str, **request: Any) -> dict[str, Any]:
        self.num_calls += 1
        await self.go.wait()
        if self.error is not None:
            raise self.error
        token_ids = self._tokenizer.encode("hi", add_special_tokens=False)
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "1"}
        values = [-1.0] * len(token_ids) if self.logprobs is None else self.logprobs
        logprobs = [[value, token, None] for value, token in zip(values, token_ids, strict=False)]
        return {"output_ids": token_ids, "meta_info": {**meta, "output_token_logprobs": logprobs}}


class OpenConnection:
    """What a request knows of its connection. A test closes it."""

    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()

    @property
    def is_closing(self) -> bool:
        return self.closed.done()

    def close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class Served:
    """A gateway's application on an engine, without a socket."""

    def __init__(self, renderer: ChatRenderer, run_dir: Path) -> None:
        self.engine = Engine(renderer.tokenizer)
        self.store = SessionStore(
            run_dir,
            lambda record, limits, info: Session(
                EpisodeState(record.graph.session_id, record, self.engine.generate, renderer, limits, False),
                info.sampling_params,
                record,
            ),
            LIMITS,
        )
        self.app: FastAPI = make_app(self.store, GatewayConfig(run_dir, "sk-admin", LIMITS), str)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self._serve, raise_app_exceptions=False),
            base_url="http://gateway",
            timeout=60,
        )

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Call the application for a request of a connection that stays open."""
        await self.app({**scope, "state": {CONNECTION: OpenConnection()}}, receive, send)

    def key(self, session_id: str) -> dict[str, str]:
        """The headers of a new session."""
        return {"authorization": f"Bearer {self.store.create(session_id)[1]}"}

    async def post(self, headers: dict[str, str], path: str = CHAT, content: Any = None, **body: Any) -> httpx.Response:
        content = orjson.dumps({"model": "m", "messages": HELLO, **body}) if content is None else content
        return await self.client.post(path, content=content, headers=headers)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.chat_template = TEMPLATE
    return ChatRenderer(tokenizer)


@pytest.fixture
def served(renderer: ChatRenderer, tmp_path: Path) -> Served:
    return Served(renderer, tmp_path)


@pytest.mark.parametrize("stream", [False, True])
def test_identical_requests_at_once_are_samples_of_their_own(served: Served, stream: bool) -> None:
    async def run() -> None:
        headers = served.key("a")
        requests = [asyncio.create_task(served.post(headers, stream=stream)) for _ in range(8)]
        await served.engine.wait_for_calls(8)
        served.engine.go.set()
        assert [reply.status_code for reply in await asyncio.gather(*requests)] == [200] * 8

    asyncio.run(asyncio.wait_for(run(), 30))
    assert served.engine.num_calls == 8


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_session_that_ends_during_a_turn_says_so(served: Served, path: str, stream: bool) -> None:
    async def run() -> None:
        headers = served.key("a")
        request = asyncio.create_task(served.post(headers, path, stream=stream, max_tokens=5))
        await served.engine.wait_for_calls(1)
        await served.store.end("a", reward=1.0)
        reply = await request
        assert reply.status_code == (200 if stream else 403)
        assert "the session 'a' has ended" in reply.text

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens"])
def test_a_session_that_ends_while_a_body_arrives_takes_no_turn(served: Served, path: str) -> None:
    async def run() -> None:
        headers, is_sent, has_ended = served.key("a"), asyncio.Event(), asyncio.Event()
        served.engine.go.set()
        assert (await served.post(headers)).status_code == 200

        async def body() -> AsyncIterator[bytes]:
            yield b'{"model":"m","messages":[{"role":"user",'
            is_sent.set()
            await has_ended.wait()
            yield b'"content":"a"}]}'

        request = asyncio.create_task(served.post(headers, path, body()))
        await is_sent.wait()
        await served.store.end("a", reward=1.0)
        has_ended.set()
        reply = await request
        assert reply.status_code == 403
        assert "has ended" in reply.text

    asyncio.run(asyncio.wait_for(run(), 30))
    assert served.engine.num_calls == 1


def test_the_record_of_a_session_that_runs_has_whole_lines(served: Served, tmp_path: Path) -> None:
    """The file grows while the reply is sent, and its last line may be half written."""
    served.engine.go.set()
    assert asyncio.run(served.post(served.key("a"))).status_code == 200
    path = tmp_path / "a.jsonl"
    whole = path.read_bytes()

    async def grow_at_the_reply(scope: Any, receive: Any, send: Any) -> None:
        async def send_and_grow(message: Any) -> None:
            if message["type"] == "http.response.start":
                with path.open("ab") as file:
                    file.write(b'": null}}\n' + whole)
            await send(message)

        await served.app(scope, receive, send_and_grow)

    with path.open("ab") as file:
        file.write(b'{"node": {"id')
    client = httpx.AsyncClient(transport=httpx.ASGITransport(grow_at_the_reply), base_url="http://gateway")
    headers = {"authorization": "Bearer sk-admin"}
    reply = asyncio.run(client.get("/admin/sessions/a/record", headers=headers))
    assert (reply.status_code, reply.content) == (200, whole)
    assert int(reply.headers["content-length"]) == len(whole)


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("levels", [120, 1000, 5000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, '{"messages":[{"role":"user","content":"a"}],"n":DEEP}'),
        (CHAT, '{"messages":[{"role":"user","content":"a"}],"tool_choice":DEEP}'),
        (CHAT, '{"messages":[{"role":DEEP,"content":"a"}]}'),
        (CHAT, '{"messages":[{"role":"user","content":[{"type":DEEP}]}]}'),
        ("/v1/messages", '{"model":"m","max_tokens":5,"messages":[{"role":"user","content":[{"type":DEEP}]}]}'),
        ("/v1/messages", '{"model":"m","max_tokens":5,"system":[{"type":"text","text":DEEP}],"messages":[]}'),
        ("/v1/messages/count_tokens", '{"model":"m","tool_choice":{"type":DEEP},"messages":[]}'),
        ("/v1/completions", '{"prompt":"a","n":DEEP}'),
        ("/v1/responses", '{"input":"a","tool_choice":DEEP}'),
    ],
)
def test_too_many_levels_are_refused(served: Served, path: str, body: str, levels: int) -> None:
    reply = asyncio.run(served.post(served.key("a"), path, body.replace("DEEP", nested(levels)).encode()))
    assert reply.status_code == 400
    assert levels == 120 or "levels" in reply.text or "not valid JSON" in reply.text


def test_a_retry_header_with_many_digits_is_no_error(served: Served) -> None:
    served.engine.go.set()
    for count in ("9" * 5000, "000", "x"):
        headers = {**served.key(f"s{len(count)}"), "x-stainless-retry-count": count}
        assert asyncio.run(served.post(headers)).status_code == 200


@pytest.mark.parametrize(
    "body", [b'{"expires_in_s": NaN}', b'{"expires_in_s": -Infinity}', b'{"session_id": "\\ud800"}', b"{", b"[]"]
)
def test_a_wrong_body_of_the_admin_api_is_not_repeated(served: Served, body: bytes) -> None:
    headers = {"authorization": "Bearer sk-admin", "content-type": "application/json"}
    reply = asyncio.run(served.post(headers, "/admin/sessions", body))
    assert reply.status_code == 400
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    secret = {"session_id": ["do-not-repeat"]}
    reply = asyncio.run(served.post(headers, "/admin/sessions", orjson.dumps(secret)))
    assert reply.status_code == 400
    assert "session_id" in reply.json()["error"]["message"]
    assert "do-not-repeat" not in reply.text


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_engine_is_whole_in_the_log_only(
    served: Served, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    served.engine.error = ServerDiedError("the process 4711 at http://10.0.0.5:30000 ended; log /data/server.log")
    served.engine.go.set()
    headers = {**served.key("a"), "x-request-id": "the-first"}
    for path in (CHAT, "/v1/messages", CHAT):
        reply = asyncio.run(served.post(headers, path, stream=stream, max_tokens=5))
        assert reply.status_code == (200 if stream else 529 if path == "/v1/messages" else 503)
        assert "the engine does not answer" in reply.text
        assert "4711" not in reply.text
    assert caplog.text.count("the process 4711") == 1, "once in some seconds"
    assert f"the request {CHAT} of the session 'a' failed, request id the-first" in caplog.text
    text = served.app.state.metrics.text().decode()
    assert 'verl_gateway_turns_total{dialect="chat/completions",status="503"} 2.0' in text, "also of a stream"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [[None, -1.0], [-1.0]])
def test_a_reply_that_cannot_be_recorded_is_a_failure_of_the_engine(
    served: Served, logprobs: list[float | None], stream: bool
) -> None:
    """The agent sends the request again, and gets a turn."""

    async def run() -> None:
        served.engine.go.set()
        key, served.engine.logprobs = served.key("a"), logprobs
        reply = await served.post(key, stream=stream)
        assert reply.status_code == (200 if stream else 503)
        assert "the engine does not answer; send the request again" in reply.text
        assert isinstance(served.store.session("a").failure, ServerError)
        served.engine.logprobs = None
        again = await served.post(key | {"x-stainless-retry-count": "1"}, stream=stream)
        assert (again.status_code, '"content":"hi"' in again.text) == (200, True)
        assert served.store.session("a").failure is None

    asyncio.run(asyncio.wait_for(run(), 30))
    assert served.engine.num_calls == 2


@pytest.mark.parametrize("stream", [False, True])
def test_no_key_is_in_the_log_of_failures(served: Served, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    served.engine.error = RuntimeError("a defect")
    served.engine.go.set()
    _, key = served.store.create("a")
    reply = asyncio.run(served.post({}, f"/session/{key}{CHAT}", stream=stream))
    assert reply.status_code == (200 if stream else 500)
    assert "RuntimeError" in reply.text
    assert "the request /session/{session_key}/v1/chat/completions of the session 'a' failed" in caplog.text
    assert key not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_engine_is_told_without_its_url_and_paths(
    served: Served, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    url, reason = (
        "http://10.0.0.7:30000/generate",
        "[01:36:13] /project/cpp/grammar.cc:3389: Check failed: (a) is false",
    )
    served.engine.error = error_from_reply(400, url, {"error": {"message": f"{reason} {'and so on ' * 100}"}})
    served.engine.go.set()
    text = asyncio.run(served.post(served.key("a"), stream=stream)).text
    assert "the engine refused the request (400): Check failed: (a) is false and so on" in text
    assert "10.0.0.7" not in text
    assert ".cc" not in text
    assert text.count("and so on") < 20
    assert f"{url} refused the request (400): {reason}" in caplog.text


def test_each_refusal_of_the_engine_is_one_line_of_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """A refusal with another cause may follow at once. A message with a line break makes no second line."""
    served.engine.go.set()
    url = "http://10.0.0.7:30000/generate"
    for name in ("a", "b"):
        served.engine.error = error_from_reply(400, url, {"error": {"message": f"{'x' * 250}\nthe cause {name}"}})
        reply = asyncio.run(served.post({**served.key(name), "x-request-id": f"request-{name}"}))
        assert reply.status_code == 400
        assert "the cause" not in reply.text
    messages = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(messages) == 2
    for name, message in zip(("a", "b"), messages, strict=True):
        assert f"the request {CHAT} of the session '{name}' was refused, request id request-{name}: " in message
        assert message.endswith(rf"x\nthe cause {name}'")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens"])
def test_requests_that_are_too_large_are_refused(served: Served, path: str) -> None:
    is_openai = path == CHAT

    def tool(name: str) -> dict[str, Any]:
        schema = {"type": "object"}
        function = {"name": name, "parameters": schema}
        return {"type": "function", "function": function} if is_openai else {"name": name, "input_schema": schema}

    headers = served.key("a")
    for fields, status, error in (
        ({"messages": HELLO * 10_001}, 413, "the request has 10001 messages, and 10000 are allowed"),
        ({"tools": [tool(f"t{number}") for number in range(1001)]}, 413, "has 1001 tools, and 1000 are allowed"),
        ({"tools": [tool("e" * 257)]}, 400, "the name of a tool has more than 256 characters"),
        ({"user": "a" * (16 << 20)}, 413, "more than 16777216 bytes"),
    ):
        reply = asyncio.run(served.post(headers, path, **fields))
        assert reply.status_code == status
        assert error in reply.text
    assert served.engine.num_calls == 0


def test_thousands_of_system_messages_are_joined_at_once() -> None:
    """With a join for each message, this test needs minutes."""
    system = {"role": "system", "content": "a" * 400}
    (message,) = normalize_messages([{"role": "user", "content": "b"}, *[system] * 40_000])
    assert message["role"] == "user"
    assert message["content"] == "\n\n".join(["b", *["a" * 400] * 40_000])


def test_thousands_of_texts_are_joined_at_once() -> None:
    """With a join for each text, this test needs minutes."""
    texts, image = [{"type": "text", "text": "a" * 100}] * 400_000, {"type": "image", "image": "data"}
    assert meaning({"role": "user", "content": [*texts, image, *texts[:2]]}) == [
        "user",
        ["a" * 40_000_000, image, "a" * 200],
    ]


class HeldRenderer(ChatRenderer):
    """A renderer that stops at prompts with the word `hold` until `go` is set."""

    def hold_prompts(self) -> None:
        self.is_held, self.go = threading.Event(), threading.Event()
        self.num_held = 0

    def render_prompt(self, messages: Any, tools: Any = None) -> list[int]:
        if "hold" in messages[0]["content"]:
            self.num_held += 1
            self.is_held.set()
            assert self.go.wait(30), "the gateway waits for this prompt"
        return super().render_prompt(messages, tools)


@pytest.fixture
def held(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> HeldRenderer:
    monkeypatch.setattr("verl_server.gateway.threads.MAX_RENDERED_CHARS", 0)  # all prompts count as long
    held = HeldRenderer(renderer.tokenizer)
    held.hold_prompts()
    return held


@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens"])
def test_a_long_prompt_stops_no_other_session(held: HeldRenderer, tmp_path: Path, path: str) -> None:
    served = Served(held, tmp_path)

    async def run() -> None:
        served.engine.go.set()
        first, second = served.key("a"), served.key("b")
        hold = [{"role": "user", "content": "hold"}]
        request = asyncio.create_task(served.post(first, path, messages=hold))
        assert await asyncio.to_thread(held.is_held.wait, 20)
        assert (await served.post(second)).status_code == 200
        assert (await served.client.get("/health/liveness")).status_code == 200
        assert not request.done()
        held.go.set()
        assert (await request).status_code == 200

    asyncio.run(asyncio.wait_for(run(), 60))


def test_two_requests_of_a_session_share_their_prompt(held: HeldRenderer, tmp_path: Path) -> None:
    served = Served(held, tmp_path)

    async def run() -> None:
        served.engine.go.set()
        headers, hold = served.key("a"), [{"role": "user", "content": "hold"}]
        requests = [asyncio.create_task(served.post(headers, messages=hold, seed=number)) for number in range(2)]
        assert await asyncio.to_thread(held.is_held.wait, 20)
        assert (await served.post(headers, "/v1/messages/count_tokens")).status_code == 200
        held.go.set()
        assert [reply.status_code for reply in await asyncio.gather(*requests)] == [200, 200]

    asyncio.run(asyncio.wait_for(run(), 60))
    assert held.num_held == 1
    assert len(load_session(tmp_path / "a.jsonl").nodes) == 3, "both turns follow the same prompt"


def test_a_session_that_ends_while_its_prompt_is_rendered_takes_no_turn(held: HeldRenderer, tmp_path: Path) -> None:
    served = Served(held, tmp_path)

    async def run() -> None:
        request = asyncio.create_task(served.post(served.key("a"), messages=[{"role": "user", "content": "hold"}]))
        assert await asyncio.to_thread(held.is_held.wait, 20)
        await served.store.end("a")
        held.go.set()
        reply = await request
        assert (reply.status_code, "has ended" in reply.text) == (403, True)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert served.engine.num_calls == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_shutdown_aborts_turns_and_frees_the_records(renderer: ChatRenderer, tmp_path: Path, stream: bool) -> None:
    """The client of a running turn learns that it should send the request again, to the next gateway."""
    is_called = threading.Event()

    async def generate(**_: Any) -> dict[str, Any]:
        is_called.set()
        await asyncio.Event().wait()
        raise AssertionError

    body = {"model": "m", "messages": HELLO, "stream": stream}
    with ThreadPoolExecutor(1) as pool:
        gateway = Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS)
        headers = {"authorization": f"Bearer {gateway.create_session('a')[1]}"}
        request = pool.submit(
            httpx.post, f"{gateway.openai_url}/chat/completions", json=body, headers=headers, timeout=60
        )
        assert is_called.wait(20)
        gateway.shutdown()
        gateway.shutdown()
        reply = request.result()
    assert reply.status_code == (200 if stream else 503)
    assert "the gateway shuts down" in reply.text
    Recorder(tmp_path, "a").close()  # the record is free


TWICE = "OpenAI's clients ends with /v1, and the base URL of Anthropic's clients ends without /v1"
MISSING, NOT_OFFERED = "the base URL must end with /v1", "the gateway does not offer it"


@pytest.mark.parametrize(
    ("path", "shown", "cause"),
    [
        ("/chat/completions", "", MISSING),
        ("/responses", "", MISSING),
        ("/completions", "", MISSING),
        ("/models", "", MISSING),
        ("/models/policy", "", MISSING),
        ("/messages/count_tokens", "", MISSING),
        ("/session/sk-secret/chat/completions", "/session/KEY/chat/completions", MISSING),
        ("/v1/v1/messages", "", TWICE),
        ("/session/sk-secret/v1/v1/messages", "/session/KEY/v1/v1/messages", TWICE),
        ("/v1/session/sk-secret/v1/messages", "/v1/session/KEY/v1/messages", NOT_OFFERED),
        ("/x//session/sk-secret/v1/messages", "/x/session/KEY/v1/messages", NOT_OFFERED),
        ("/session//sk-secret/v1/message", "/session/KEY/v1/message", NOT_OFFERED),
        ("/session/sk-secret", "/session/KEY", NOT_OFFERED),
        ("/v1/embeddings", "", NOT_OFFERED),
        ("/embeddings", "", NOT_OFFERED),
        ("/v1/chat/completions/", "", "leave out the slash at its end"),
    ],
)
def test_an_unknown_path_is_answered_with_the_cause(served: Served, path: str, shown: str, cause: str) -> None:
    shown = shown or path
    reply = asyncio.run(served.post(served.key("a"), path))
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert message.startswith(f"there is no path '{shown}': ")
    assert cause in message
    assert "secret" not in reply.text
    assert reply.json().get("type") == ("error" if "messages" in path else None), "in the form of the dialect"


@pytest.mark.parametrize("path", ["/v1" + "/" * 60_000 + "x", "/session/" * 7_000, "/v1" * 20_000 + "x"])
def test_a_long_path_is_answered_at_once(served: Served, path: str) -> None:
    """Nobody needs a key to send one. A pattern that backtracks held the gateway for 7 s and more."""
    begin = time.monotonic()
    reply = asyncio.run(served.post(served.key("a"), path))
    assert reply.status_code == 404
    assert time.monotonic() - begin < 2


def test_metrics_count_cached_tokens_and_failed_generations() -> None:
    metrics = GatewayMetrics()

    async def generate(*, rid: str, session_id: str, **request: Any) -> dict[str, Any]:
        if not request["input_ids"]:
            raise ServerDiedError("the server has died")
        reason = "abort" if request["input_ids"] == [0] else "stop"
        return {"output_ids": [5], "meta_info": {"finish_reason": {"type": reason}, "cached_tokens": 3}}

    measured = metrics.measure(generate)
    asyncio.run(measured(rid="a", session_id="s", input_ids=[1, 2, 3, 4]))
    asyncio.run(measured(rid="c", session_id="s", input_ids=[0]))  # a weight update has aborted the turn
    with pytest.raises(ServerDiedError):
        asyncio.run(measured(rid="b", session_id="s", input_ids=[]))
    lines = metrics.text().decode().splitlines()
    counted = {"cached_tokens": 3, "prompt_tokens": 4, "sampled_tokens": 1, "failed_generations": 1}
    assert {f"verl_gateway_{name}_total {number}.0" for name, number in counted.items()} <= set(lines)


def test_the_live_page_lists_the_latest_sessions(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.gateway.http.routes.MAX_SHOWN_SESSIONS", 2)
    for session_id in ("b", "c", "a"):
        served.key(session_id)
    reply = asyncio.run(served.client.get("/ui/sessions", headers={"authorization": "Bearer sk-admin"}))
    assert [session["id"] for session in reply.json()["sessions"]] == ["a", "c"]


def test_the_live_page_loads_nothing_from_elsewhere(served: Served) -> None:
    policy = asyncio.run(served.client.get("/ui")).headers["content-security-policy"]
    assert "default-src 'none'" in policy


def test_pages_that_load_scripts_from_elsewhere_are_not_served(served: Served) -> None:
    for path in ("/docs", "/redoc"):
        assert asyncio.run(served.client.get(path)).status_code == 404
