"""The work of the gateway for each request: what is compared in place of hashed, and what runs in the event loop."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_server.gateway.dialects.anthropic_messages import AnthropicDialect
from verl_server.gateway.dialects.fields import encode_schema
from verl_server.gateway.errors import GatewayError
from verl_server.gateway.http.app import _fingerprint
from verl_server.gateway.sessions import key_memo
from verl_server.gateway.sessions.history import conversation_keys, tools_digest
from verl_server.gateway.sessions.key_memo import MAX_CONVERSATIONS, KeyMemo
from verl_server.gateway.worker_threads import MAX_RENDERED_CHARS, is_short_prompt, run_aside


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(" * 600},
        {"type": "object", "minProperties": 200, "maxProperties": 30_000},
        {"type": "object", "properties": {f"p{number}": {} for number in range(3000)}},
        {"enum": ["x" * (64 << 10)]},
    ],
)
def test_a_schema_that_a_grammar_backend_may_not_survive_is_refused(schema: Any) -> None:
    with pytest.raises(GatewayError, match="too large"):
        encode_schema("response_format", schema)


def test_an_ordinary_schema_is_sent_as_it_is() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"pattern": "[a-z]+", "maxLength": 9}}}}
    assert orjson.loads(encode_schema("response_format", schema)) == schema


def test_a_retry_with_another_billing_line_is_the_same_request() -> None:
    """Claude Code changes this line of its system prompt with each request."""

    def identify(line: str) -> bytes:
        body = orjson.dumps({"system": [{"type": "text", "text": f"x-anthropic-billing-header: {line}"}], "model": "m"})
        return _fingerprint(AnthropicDialect(), {}, body)

    assert identify("cch=1;") == identify("cch=2;")
    assert identify("cch=1;") != _fingerprint(AnthropicDialect(), {}, b'{"system": []}')


CALLS = [
    {"id": "1", "type": "function", "function": {"name": "a", "arguments": {"x": value}}} for value in (1, True, 1.0)
]
TEXTS = st.sampled_from(("", "a", "b"))
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": TEXTS, "tool_call_id": TEXTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXTS, "tool_calls": st.lists(st.sampled_from(CALLS), max_size=2)}
    ),
)
TOOLS: list[Any] = [[], [{"name": "a"}], [{"name": "b"}]]
CONVERSATIONS = st.tuples(st.sampled_from(TOOLS), st.lists(MESSAGES, min_size=1, max_size=4))


@given(st.lists(CONVERSATIONS, max_size=8))
def test_remembered_keys_are_the_keys(conversations: list[tuple[list[Any], list[Any]]]) -> None:
    memo = KeyMemo()
    for tools, messages in conversations:
        expected = conversation_keys(tools_digest(tools), messages)
        assert memo.keys_of(copy.deepcopy(tools), copy.deepcopy(messages)) == expected


def test_each_message_of_a_growing_conversation_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents of a session take turns."""
    hashed = list[int]()

    def count(digest: str, messages: Any, start: Any = None) -> Any:
        hashed.append(len(messages))
        return conversation_keys(digest, messages, start)

    monkeypatch.setattr(key_memo, "conversation_keys", count)
    memo = KeyMemo()
    for turn in range(1, 20):
        for agent in range(MAX_CONVERSATIONS):
            memo.keys_of([], [{"role": "user", "content": f"{agent} {number}"} for number in range(turn)])
    assert set(hashed) == {1}


def test_long_work_runs_in_a_worker_thread() -> None:
    async def run() -> None:
        loop_thread = threading.get_ident()
        assert await run_aside(True, threading.get_ident) == loop_thread
        assert await run_aside(False, threading.get_ident) != loop_thread

    asyncio.run(run())
    long, image = (
        "a" * (MAX_RENDERED_CHARS + 1),
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
    )
    assert is_short_prompt([{"role": "user", "content": long[1:]}])
    assert not is_short_prompt([{"role": "user", "content": long}])
    assert not is_short_prompt([{"role": "user", "content": image}]), "images are decoded"
    assert not is_short_prompt([{"role": "user", "content": "a"}], MAX_RENDERED_CHARS + 1), "its tools are long"
