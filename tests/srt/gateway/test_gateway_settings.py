"""What the pages promise of the settings: what reaches the engine, names of models, the end by time, and the limits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from agent_helpers import ScriptedGenerateFn
from gateway_commands import ADMIN_KEY, create_session, gateway_command
from helpers import free_port, wait_until
from test_gateway_sessions import LIMITS, ask, renderer, start_gateway

from verl_server import AsyncHttpServerEngineAdapter, BadInputError
from verl_server.gateway import Gateway
from verl_server.gateway.config import GatewayConfig
from verl_server.gateway.dialects.base import (
    MAX_CHOICES,
    MAX_COUNTS,
    MAX_PATTERN_CHARS,
    MAX_PATTERN_CHOICES,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_LEVELS,
    MAX_SCHEMA_PARTS,
)
from verl_server.gateway.engines import FIND_INTERVAL_S
from verl_server.gateway.health import PING_TIMEOUT_S
from verl_server.gateway.http.app import MAX_JSON_VALUES
from verl_server.gateway.http.connections import MAX_HEAD_BYTES
from verl_server.gateway.http.routes import MAX_RECORD_BYTES, MAX_SHOWN_SESSIONS, MAX_SHOWN_TOKENS
from verl_server.gateway.sessions.history import MAX_TITLE_TOKENS
from verl_server.gateway.sessions.session import MAX_CONVERSATIONS
from verl_server.gateway.sessions.turns import ABANDONED_S
from verl_server.gateway.threads import MAX_PARSED_BYTES, MAX_RENDERED_CHARS
from verl_server.router.process.static_replicas import PROBE_INTERVAL_S
from verl_server.server.process import WANTED_OPEN_FILES
from verl_server.tiny import CHAT_TEMPLATE
from verl_server.trajectory import ChatRenderer, load_session

__all__ = ["renderer"]
PAGE, OPERATION = (
    " ".join((Path(__file__).parents[3] / "docs" / name).read_text().split())
    for name in ("gateway-reference.md", "gateway-operation.md")
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


class ParamsGenerateFn(ScriptedGenerateFn):
    """Stores the sampling parameters of the last request."""

    params: dict[str, Any]

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Any:
        self.params = request["sampling_params"]
        return await super().__call__(rid=rid, session_id=session_id, **request)


@pytest.fixture(scope="module")
def generate(renderer: ChatRenderer) -> ParamsGenerateFn:
    return ParamsGenerateFn(renderer.tokenizer, lambda prompt: "yes")


@pytest.fixture(scope="module")
def gateway(
    generate: ParamsGenerateFn, renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    with Gateway(generate, tmp_path_factory.mktemp("run"), renderer=renderer, limits=LIMITS) as gateway:
        yield gateway


def post(gateway: Gateway, key: str, path: str = CHAT, **fields: Any) -> httpx.Response:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}], **fields}
    return httpx.post(f"{gateway.url}{path}", json=body, headers={"x-api-key": key}, timeout=60.0)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_sampling_params_of_a_session_replace_those_of_the_agent(
    gateway: Gateway, generate: ParamsGenerateFn, path: str
) -> None:
    info, key = gateway.create_session(sampling_params={"temperature": 0.75})
    reply = post(gateway, key, path, temperature=0, top_p=0.5, a_field_of_next_year={"a": 1})
    assert reply.status_code == 200, reply.text
    assert (generate.params["temperature"], generate.params["top_p"]) == (0.75, 0.5)
    graph = load_session(gateway.config.run_dir / f"{info.id}.jsonl")
    assert [node.temperature for node in graph.nodes if node.sampled] == [0.75], "its log probabilities contain it"


def test_a_session_keeps_a_grammar_of_its_own(gateway: Gateway, generate: ParamsGenerateFn) -> None:
    _, key = gateway.create_session(sampling_params={"regex": "yes|no"})
    assert post(gateway, key, tools=[TOOL], tool_choice="required").status_code == 200
    assert generate.params["regex"] == "yes|no"
    assert "structural_tag" not in generate.params


def test_max_tokens_beyond_the_context_is_cut(gateway: Gateway, generate: ParamsGenerateFn) -> None:
    _, key = gateway.create_session()
    for path in (CHAT, MESSAGES):
        assert post(gateway, key, path, max_tokens=10_000_000).status_code == 200
        assert 1000 < generate.params["max_new_tokens"] < 2000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": [TOOL], "parallel_tool_calls": False}),
        (RESPONSES, {"tools": [{"type": "function", "name": "add", "parameters": {}}], "parallel_tool_calls": False}),
        (
            MESSAGES,
            {
                "tools": [{"name": "add", "input_schema": {}}],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
        ),
    ],
)
def test_wishes_without_effect_are_in_the_record(gateway: Gateway, path: str, fields: Any) -> None:
    """No grammar can forbid a second call where the policy chooses its tools. The template has no effort."""
    info, key = gateway.create_session()
    effort = {CHAT: "reasoning_effort", RESPONSES: "reasoning", MESSAGES: "output_config"}[path]
    fields |= {effort: "high" if path == CHAT else {"effort": "high"}}
    reply = post(gateway, key, path, input="a", **fields)
    assert reply.status_code == 200, reply.text
    turn = load_session(gateway.config.run_dir / f"{info.id}.jsonl").nodes[-1]
    assert (turn.message or {})["request"]["ignored"] == ["parallel_tool_calls", "reasoning_effort"]


WITHOUT_THOUGHT = "assistant\n<think>\n\n</think>\n\n"
NO_THINKING = {"enable_thinking": False}


@pytest.fixture(scope="module")
def thinking_renderer(renderer: ChatRenderer) -> ChatRenderer:
    """With a chat template like that of Qwen3: `enable_thinking=False` writes an empty thought."""
    tokenizer = copy.copy(renderer.tokenizer)
    switch = "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\n{% endif %}", f"{switch}{{% endif %}}")
    assert tokenizer.chat_template != CHAT_TEMPLATE
    return ChatRenderer(tokenizer)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_variables_of_the_chat_template(thinking_renderer: ChatRenderer, tmp_path: Path, path: str) -> None:
    """Of the gateway, of the request, and of the session: the later ones replace the earlier ones."""
    generate = ParamsGenerateFn(thinking_renderer.tokenizer, lambda prompt: "yes")
    efforts: dict[str, Any] = {
        CHAT: {"reasoning_effort": "none"},
        RESPONSES: {"reasoning": {"effort": "none"}},
        MESSAGES: {"thinking": {"type": "disabled"}},
    }
    no_effort = efforts[path]
    cases: Any = (
        ({}, {}, {}, True),
        (NO_THINKING, {}, {}, False),
        ({}, {"chat_template_kwargs": NO_THINKING}, {}, False),
        ({}, no_effort, {}, False),
        (NO_THINKING, {"chat_template_kwargs": {"enable_thinking": True}}, {}, True),
        ({}, {"chat_template_kwargs": {"enable_thinking": True}}, NO_THINKING, False),
    )
    for of_gateway, of_request, of_session, thinks in cases:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        texts = list[str]()
        for _ in range(2):  # the conversation goes on after a restart
            with Gateway(
                generate, folder, renderer=thinking_renderer, limits=LIMITS, chat_template_kwargs=of_gateway
            ) as gateway:
                key = "sk-0123456789abcdef"
                info, _ = gateway.create_session("s", key=key, chat_template_kwargs=of_session)
                said = [{"role": "user", "content": "a"}]
                for text in texts:
                    said += [{"role": "assistant", "content": text}, {"role": "user", "content": "b"}]
                reply = post(gateway, key, path, messages=said, input=said, **of_request)
                assert reply.status_code == 200, reply.text
                texts.append("yes")
                graph = load_session(gateway.config.run_dir / f"{info.id}.jsonl")
        assert len(graph.leaves) == 1
        for node in graph.nodes:
            if not node.sampled:
                assert thinking_renderer.decode_all(node.token_ids).endswith(WITHOUT_THOUGHT) != thinks


@pytest.mark.parametrize("arguments", [{"enable_thinkng": False}, {"enable_thinking": False, "tokenize": True}])
def test_a_gateway_and_a_session_with_a_variable_that_the_template_does_not_have_are_refused(
    thinking_renderer: ChatRenderer, tmp_path: Path, arguments: Any
) -> None:
    """Before each of their turns would be refused."""
    generate, wrong = ParamsGenerateFn(thinking_renderer.tokenizer, lambda prompt: "yes"), list(arguments)[-1]
    hint = "; did you mean 'enable_thinking'" if wrong == "enable_thinkng" else ""
    options: Any = {"renderer": thinking_renderer, "limits": LIMITS}
    with pytest.raises(BadInputError, match=f"no variable '{wrong}' that can be set{hint}"):
        Gateway(generate, tmp_path / "a", chat_template_kwargs=arguments, **options)
    with Gateway(generate, tmp_path / "b", chat_template_kwargs=NO_THINKING, **options) as gateway:
        with pytest.raises(BadInputError, match=f"no variable '{wrong}' that can be set{hint}"):
            gateway.create_session("s", chat_template_kwargs=arguments)
        headers = {"Authorization": f"Bearer {gateway.admin_key}"}
        body = {"session_id": "s", "chat_template_kwargs": arguments}
        reply = httpx.post(f"{gateway.url}/admin/sessions", json=body, headers=headers, timeout=30.0)
        assert (reply.status_code, f"'{wrong}'" in reply.text) == (400, True), reply.text
        assert gateway.sessions() == []
        gateway.create_session("s", chat_template_kwargs={"enable_thinking": True})


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("name", ["no_such_variable", "messages", "tokenize"])
def test_a_variable_that_the_template_does_not_have_is_refused(gateway: Gateway, path: str, name: str) -> None:
    _, key = gateway.create_session()
    reply = post(gateway, key, path, input="a", chat_template_kwargs={name: 1})
    assert (reply.status_code, name in reply.text) == (400, True)


@pytest.mark.parametrize(
    ("path", "field", "value", "good"),
    [
        (CHAT, "top_logprobs", 5, 0),
        (CHAT, "stream", "false", False),
        (CHAT, "logprobs", "false", True),
        (CHAT, "stream_options", "usage", {"include_usage": True}),
        ("/v1/responses", "include", ["message.output_text.logprobs"], ["reasoning.encrypted_content"]),
    ],
)
def test_values_that_cannot_be_honoured_are_refused(
    gateway: Gateway, path: str, field: str, value: Any, good: Any
) -> None:
    _, key = gateway.create_session()
    reply = post(gateway, key, path, input="a", **{field: value})
    assert (reply.status_code, f"'{field}'" in reply.text) == (400, True)
    assert post(gateway, key, path, input="a", **{field: good}).status_code == 200


def test_names_of_the_model_have_the_form_of_the_client(renderer: ChatRenderer, tmp_path: Path) -> None:
    with start_gateway(renderer, tmp_path, model_names=("one", "two")) as gateway:
        _, key = gateway.create_session()
        headers = {"x-api-key": key}
        listed = httpx.get(f"{gateway.url}/v1/models", headers=headers).json()
        assert httpx.get(f"{gateway.url}/v1/models/", headers=headers).json() == listed
        assert httpx.get(f"{gateway.url}/session/{key}/v1/models/").json() == listed
        assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", ["one", "two"])
        listed = httpx.get(f"{gateway.url}/v1/models", headers={**headers, "anthropic-version": "2023-06-01"}).json()
        assert [model["display_name"] for model in listed["data"]] == ["one", "two"]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("one", "two", False)
        assert httpx.get(f"{gateway.url}/v1/models").status_code == 401
        for name in ("two", "org/any name"):
            path = f"{gateway.url}/v1/models/{quote(name, safe='')}"
            assert httpx.get(path, headers=headers).json()["id"] == name
            shown = httpx.get(path, headers={**headers, "anthropic-version": "2023-06-01"}).json()
            assert (shown["type"], shown["display_name"]) == ("model", name)
            assert httpx.get(path).status_code == 401


def test_a_session_ends_by_itself(renderer: ChatRenderer, tmp_path: Path) -> None:
    with start_gateway(renderer, tmp_path, session_expiry_s=1e-6) as gateway:
        expired, key = gateway.create_session()
        assert ask(gateway, key) == 403
        wait_until(lambda: gateway.sessions()[0].stop_reason == "expired", 30, "the session has not ended")
        lasting, key = gateway.create_session(expires_in_s=600.0)
        assert ask(gateway, key) == 200
        assert {info.id: info.stop_reason for info in gateway.sessions()} == {expired.id: "expired", lasting.id: None}


def test_the_creation_of_a_session_can_be_repeated(renderer: ChatRenderer, tmp_path: Path) -> None:
    """Also after a restart. A repeated request with another key or other settings is refused."""
    generate = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes")
    body: dict[str, Any] = {
        "session_id": "a",
        "key": "sk-0123456789abc",
        "metadata": {"b": [1, 0.1]},
        "limits": {"max_turns": 3},
    }
    body |= {"sampling_params": {"temperature": 0.7}, "expires_in_s": 1000.1}

    def create(gateway: Gateway, **changes: Any) -> httpx.Response:
        headers, url = {"x-api-key": gateway.admin_key}, f"{gateway.url}/admin/sessions"
        return httpx.post(url, json=body | changes, headers=headers, timeout=60.0)

    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway:
        first = create(gateway)
        assert (first.status_code, first.json()["key"]) == (200, body["key"])
        assert create(gateway).json() == first.json()
        assert post(gateway, str(body["key"])).status_code == 200
        for key in ("sk-0123456789ab", "sk-0123456789 abc", "sk-0123456789abcé"):
            refused = create(gateway, session_id="b", key=key)
            assert (refused.status_code, key in refused.text, "key: " in refused.text) == (400, False, True)
    with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway:
        assert create(gateway).json() == first.json() | {"base_url": gateway.url}
        changed: list[dict[str, Any]] = [{"metadata": {}}, {"limits": {}}, {"sampling_params": {}}]
        for changes in (*changed, {"expires_in_s": 9.0}, {"key": "sk-of-another-one"}, {"key": None}):
            refused = create(gateway, **changes)
            assert refused.status_code == 400
            assert "there is a session 'a' already" in refused.text
        assert len(gateway.sessions()) == 1


def test_headers_of_a_proxy_change_no_base_url(gateway: Gateway) -> None:
    forwarded = {
        "x-forwarded-proto": "https",
        "x-forwarded-host": "b",
        "x-forwarded-prefix": "/b",
        "forwarded": "host=b",
    }
    headers = {"x-api-key": gateway.admin_key, "host": "a:1", **forwarded}
    reply = httpx.post(f"{gateway.url}/admin/sessions", json={}, headers=headers, timeout=60.0)
    assert reply.json()["base_url"] == "http://a:1"


def test_a_session_without_requests_ends_by_itself(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_server.gateway.gateway.EXPIRY_INTERVAL_S", 0.05)
    with start_gateway(renderer, tmp_path, session_expiry_s=1e-6) as gateway:
        gateway.create_session()
        wait_until(lambda: gateway.sessions()[0].stop_reason == "expired", 30, "the session has not ended")


def test_sessions_of_the_command_end_by_themselves(tmp_path: Path) -> None:
    """The gateway needs no server for this."""
    options = ("--server", "http://127.0.0.1:9", "--session-expiry", "1")
    with gateway_command(str(tmp_path), *options, VERL_SERVER_GATEWAY_ADMIN_KEY=ADMIN_KEY) as url:
        create_session(url, ADMIN_KEY)

        def session() -> Any:
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            (found,) = httpx.get(f"{url}/admin/sessions", headers=headers, timeout=60.0).json()["sessions"]
            return found

        assert session()["expires_at"] - session()["created_at"] == pytest.approx(1.0)
        wait_until(lambda: session()["stop_reason"] == "expired", 30, "the session has not ended")


def test_a_proxy_closes_idle_connections_before_the_gateway(gateway: Gateway) -> None:
    """Otherwise, the proxy sends requests on connections that the gateway closes: its clients get the status 502."""
    assert gateway._server.config.timeout_keep_alive == gateway.config.idle_timeout_s
    assert gateway.config.idle_timeout_s > 60, "the default of nginx (keepalive_timeout) and of AWS's load balancers"


def test_sampling_params_of_a_session_hold_over_a_restart(renderer: ChatRenderer, tmp_path: Path) -> None:
    generate, key = ParamsGenerateFn(renderer.tokenizer, lambda prompt: "yes"), ""
    for content in ("a", "b"):
        with Gateway(generate, tmp_path, renderer=renderer, limits=LIMITS) as gateway:
            key = key or gateway.create_session(sampling_params={"temperature": 0.75})[1]
            assert post(gateway, key, messages=[{"role": "user", "content": content}]).status_code == 200
        assert generate.params.pop("temperature") == 0.75


def test_reasons_of_readiness_have_no_addresses(renderer: ChatRenderer, tmp_path: Path) -> None:
    adapter = AsyncHttpServerEngineAdapter.attach(f"http://127.0.0.1:{free_port()}")
    with Gateway(adapter, tmp_path, renderer=renderer, limits=LIMITS) as gateway:
        reply = httpx.get(f"{gateway.url}/health/readiness", timeout=60.0)
        assert (reply.status_code, reply.json()["reasons"]) == (503, ["the engine does not answer"])


def test_the_page_of_the_operation_has_its_times() -> None:
    for text in (
        f"probes each server {round(1 / PROBE_INTERVAL_S)} times a second",
        f"every {FIND_INTERVAL_S:.0f} seconds, by the names in the Ray namespace",
        f"a deadline of {PING_TIMEOUT_S:.0f} seconds",
    ):
        assert text in OPERATION


def test_the_page_has_the_limits_of_the_settings(gateway: Gateway) -> None:
    config: GatewayConfig = gateway.config
    assert config.max_body_bytes == 16 << 20
    assert config.max_image_pixels // 10**6 == 134
    for text in (
        f"A request may have {config.max_body_bytes >> 20} MiB",
        f"{config.max_messages:,} messages, {config.max_content_parts:,} content parts",
        f"{config.max_tools:,} tools, {config.max_tool_name_chars} characters in the name of a tool",
        f"A session may have {config.max_session_requests} open requests",
        f"All sessions together may have {config.max_requests:,}",
        f"nothing arrives for {config.keep_alive_s:.0f} seconds",
        f"within {ABANDONED_S:.0f} seconds is aborted",
        f"{MAX_HEAD_BYTES >> 10} KiB together",
        f"{MAX_JSON_VALUES:,} commas and opening brackets",
        f"bodies above {MAX_PARSED_BYTES >> 10} KiB",
        f"prompts above {MAX_RENDERED_CHARS:,} characters",
        f"up to {MAX_CONVERSATIONS} conversations",
        f"a `max_tokens` up to {MAX_TITLE_TOKENS}",
        f"{MAX_SCHEMA_BYTES >> 10} KiB, {MAX_SCHEMA_PARTS:,} parts and {MAX_SCHEMA_LEVELS} levels",
        f"may have {MAX_PATTERN_CHARS:,} characters",
        f"may be {MAX_COUNTS:,} together",
        f"may have {MAX_CHOICES} of `?`, `*`, `+` and `{{m,n}}`, and {MAX_PATTERN_CHOICES} in one",
        f"the latest {MAX_SHOWN_SESSIONS},",
        f"more than {MAX_SHOWN_TOKENS:,} tokens or {MAX_RECORD_BYTES >> 20} MiB",
    ):
        assert text in PAGE
    for text in (
        f"| {config.max_connections:,} |",
        f"the end of the head | {config.head_timeout_s:.0f} seconds |",
        f"the end of the body | {config.body_timeout_s:.0f} seconds |",
        f"idle after a reply | {config.idle_timeout_s} seconds |",
        f"towards {WANTED_OPEN_FILES:,}",
    ):
        assert text in OPERATION
