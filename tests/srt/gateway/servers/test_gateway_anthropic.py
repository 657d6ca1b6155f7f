"""Anthropic's dialect of the gateway, with the official SDK on a real server."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import orjson
import pydantic
import pytest
from agent_helpers import TOOL_CALL_REGEX, RecordingGenerateFn
from anthropic.types import (
    Message,
    MessageTokensCount,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
)
from anthropic.types.shared import ErrorResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from verl_server import VerlEngine
from verl_server.agent import RolloutLimits
from verl_server.gateway import Gateway
from verl_server.gateway.conversation import AssistantTurn, ToolUse, TurnDelta, TurnRequest, message_of
from verl_server.gateway.dialects.anthropic import AnthropicDialect
from verl_server.gateway.dialects.chat import ChatDialect
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.sessions.history import conversation_keys, tools_digest
from verl_server.trajectory import ChatRenderer, TrajectoryGraph, load_session

MAX_CONTEXT_TOKENS = 2000
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: Any = {"name": "add", "description": "The sum of two numbers.", "input_schema": SCHEMA}
ADD_IN_CHAT: Any = {
    "type": "function",
    "function": {"name": "add", "description": "The sum of two numbers.", "parameters": SCHEMA},
}
SHORT = {"max_new_tokens": 100, "temperature": 1.0}
FORCED_CALL = {**SHORT, "regex": TOOL_CALL_REGEX}
FORCED_THOUGHT = {**SHORT, "regex": "<think>[a-z]{5}</think>" + TOOL_CALL_REGEX}
PIXEL = base64.b64encode(b"not a real image").decode()
EVENT_TYPES: dict[str, type[pydantic.BaseModel]] = {
    "message_start": RawMessageStartEvent,
    "content_block_start": RawContentBlockStartEvent,
    "content_block_delta": RawContentBlockDeltaEvent,
    "content_block_stop": RawContentBlockStopEvent,
    "message_delta": RawMessageDeltaEvent,
    "message_stop": RawMessageStopEvent,
}
DIALECT = AnthropicDialect()


@pytest.fixture(scope="module")
def generate(shared_engine: VerlEngine) -> RecordingGenerateFn:
    return RecordingGenerateFn(shared_engine)


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


@pytest.fixture(scope="module")
def gateway(
    generate: RecordingGenerateFn, renderer: ChatRenderer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    limits = RolloutLimits(max_context_tokens=MAX_CONTEXT_TOKENS, max_turns=1000)
    with Gateway(generate, tmp_path_factory.mktemp("run"), renderer=renderer, limits=limits) as gateway:
        yield gateway


def client_of(gateway: Gateway, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0)


def graph_of(gateway: Gateway, session_id: str) -> TrajectoryGraph:
    return load_session(gateway.config.run_dir / f"{session_id}.jsonl")


def require_known_fields(value: Any) -> None:
    """Every field is a field of the official types, at any depth."""
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra, (type(value).__name__, value.model_extra)
        for name in value.model_fields_set:
            require_known_fields(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            require_known_fields(item)


def as_official(model: type[pydantic.BaseModel], body: Any) -> Any:
    """The body as the official type, which has to have all fields of the body."""
    value = model.model_validate(body)
    require_known_fields(value)
    assert json.loads(value.model_dump_json(exclude_unset=True)) == body
    return value


def post(gateway: Gateway, key: str, path: str = "/v1/messages?beta=true", **fields: Any) -> httpx.Response:
    body = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "a"}], **fields}
    return httpx.post(gateway.url + path, json=body, headers={"x-api-key": key}, timeout=60.0)


def stream_events(gateway: Gateway, key: str, **fields: Any) -> list[tuple[str, Any]]:
    """Name and data of the events of a stream."""
    reply = post(gateway, key, stream=True, **fields)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = list[tuple[str, Any]]()
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in events)
    return events


# -- conversations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_conversation_with_tools_is_one_path(
    gateway: Gateway, generate: RecordingGenerateFn, is_stream: bool
) -> None:
    info, key = gateway.create_session(sampling_params=FORCED_THOUGHT)
    generate.prompts.clear()
    client = client_of(gateway, key)
    messages: list[Any] = [{"role": "user", "content": "1 + 2"}]
    for turn in range(3):
        arguments: Any = {"model": "any-name", "max_tokens": 200, "system": "Add.", "messages": messages}
        arguments |= {"tools": [ADD], "tool_choice": {"type": "auto"}}
        count = client.messages.count_tokens(
            **{name: value for name, value in arguments.items() if name != "max_tokens"}
        )
        if is_stream:
            with client.messages.stream(**arguments) as stream:
                reply: Any = stream.get_final_message()
        else:
            reply = client.messages.create(**arguments)
        assert (reply.model, reply.stop_reason) == ("any-name", "tool_use")
        thought, call = reply.content
        assert (thought.type, len(thought.thinking), thought.signature) == ("thinking", 5, "")
        assert (call.type, call.name, sorted(call.input)) == ("tool_use", "add", ["a", "b"])
        num_prompt_tokens = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
        assert count.input_tokens == num_prompt_tokens == len(generate.prompts[-1])
        echoed = [block.model_dump() for block in reply.content]
        messages.append({"role": "assistant", "content": echoed[turn % 2 :]})  # every second turn without the thought
        messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "3"}]})
    graph = graph_of(gateway, info.id)
    assert len(graph.leaves) == 1
    sampled = [node for node in graph.nodes if node.sampled]
    assert [graph.token_ids(node.parent) for node in sampled if node.parent is not None] == generate.prompts
    assert len(sampled) == 3


def test_both_dialects_continue_the_same_path(gateway: Gateway) -> None:
    """A conversation that changes the dialect at each turn stays one path, also with arguments of another spelling."""
    info, key = gateway.create_session(sampling_params=FORCED_CALL)
    chat_client = openai.OpenAI(base_url=gateway.openai_url, api_key=key, max_retries=0)
    ours: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "1 + 2"}]}]
    theirs: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2"}]
    for turn in range(4):
        if turn % 2 == 0:
            reply = client_of(gateway, key).messages.create(
                model="m", max_tokens=100, system="Add.", messages=ours, tools=[ADD]
            )
            (use,) = reply.content
            assert use.type == "tool_use"
            call_id, arguments = use.id, use.input
        else:
            choice = chat_client.chat.completions.create(
                model="m", messages=theirs, tools=[ADD_IN_CHAT], max_tokens=100
            ).choices[0]
            assert choice.message.tool_calls is not None
            call: Any = choice.message.tool_calls[0]
            call_id, arguments = call.id, json.loads(call.function.arguments)
        function = {"name": "add", "arguments": json.dumps(arguments, indent=1)}
        theirs.append({"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]})
        theirs.append({"role": "tool", "tool_call_id": call_id, "content": "3"})
        ours.append({"role": "assistant", "content": [as_use(call_id, arguments)]})
        ours.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "3"}]})
    graph = graph_of(gateway, info.id)
    assert len(graph.leaves) == 1
    assert sum(node.sampled for node in graph.nodes) == 4


def as_use(call_id: str, arguments: Any) -> Any:
    return {"type": "tool_use", "id": call_id, "name": "add", "input": arguments}


def test_a_foreign_conversation_has_the_tokens_of_the_chat_dialect(
    gateway: Gateway, generate: RecordingGenerateFn
) -> None:
    """The turns of this conversation are not recorded."""
    ours: list[Any] = [{"role": "user", "content": "x"}]
    theirs: list[Any] = [{"role": "system", "content": "AB"}, {"role": "user", "content": "x"}]
    for turn in range(3):
        calls = [(f"call_{turn}_{number}", {"a": number, "b": turn}) for number in range(2)]
        uses = [as_use(call_id, arguments) for call_id, arguments in calls]
        thought = {"type": "thinking", "thinking": "t", "signature": ""}
        ours.append({"role": "assistant", "content": [thought, {"type": "text", "text": "So"}, *uses]})
        blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": call_id} for call_id, _ in calls]
        ours.append({"role": "user", "content": [*blocks, {"type": "text", "text": "go on"}]})
        functions = [
            {"id": call_id, "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}
            for call_id, arguments in calls
        ]
        theirs.append({"role": "assistant", "content": "So", "tool_calls": functions})
        theirs += [{"role": "tool", "tool_call_id": call_id, "content": call_id} for call_id, _ in calls]
        theirs.append({"role": "user", "content": "go on"})
    generate.prompts.clear()
    _, key = gateway.create_session(sampling_params=SHORT)
    system: Any = [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "B"}]
    client_of(gateway, key).messages.create(model="m", max_tokens=9, system=system, messages=ours, tools=[ADD])
    _, key = gateway.create_session(sampling_params=SHORT)
    chat_client = openai.OpenAI(base_url=gateway.openai_url, api_key=key, max_retries=0)
    chat_client.chat.completions.create(model="m", max_tokens=9, messages=theirs, tools=[ADD_IN_CHAT])
    ours_ids, theirs_ids = generate.prompts
    assert ours_ids == theirs_ids


def test_a_changing_billing_line_and_system_messages_do_not_fork(
    gateway: Gateway, generate: RecordingGenerateFn, renderer: ChatRenderer
) -> None:
    info, key = gateway.create_session(sampling_params=FORCED_CALL)
    messages: list[Any] = [{"role": "user", "content": "1 + 2"}]
    for number in range(2):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}, {"type": "text", "text": "S"}]
        reply = post(gateway, key, messages=messages, system=system, tools=[ADD]).json()
        messages.append({"role": "assistant", "content": reply["content"]})
        result = {"type": "tool_result", "tool_use_id": reply["content"][-1]["id"], "content": "3"}
        messages += [{"role": "user", "content": [result]}, {"role": "system", "content": "Be brief."}]
    assert post(gateway, key, messages=messages, system="S", tools=[ADD]).status_code == 200
    graph = graph_of(gateway, info.id)
    assert len(graph.leaves) == 1
    text = renderer.tokenizer.decode(generate.prompts[-1])
    assert text.endswith("3<|im_end|>\n<|im_start|>user\nBe brief.<|im_end|>\n<|im_start|>assistant\n")
    assert "billing" not in text


def test_numbers_that_javascript_writes_in_another_way_do_not_fork(gateway: Gateway) -> None:
    """JSON.stringify(JSON.parse("1.0")) is 1, and -0 becomes 0."""
    regex = r'<tool_call>\{"name": "add", "arguments": \{"a": [1-9]\.0, "b": \[-0\.0, \{"c": 1e2\}\]\}\}</tool_call>'
    info, key = gateway.create_session(sampling_params={**SHORT, "regex": regex})
    messages: list[Any] = [{"role": "user", "content": "a"}]
    reply = post(gateway, key, messages=messages, tools=[ADD]).json()
    (use,) = reply["content"]
    echoed = {**use, "input": {"a": int(use["input"]["a"]), "b": [0, {"c": 100}]}}
    messages.append({"role": "assistant", "content": [echoed]})
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "3"}]})
    assert post(gateway, key, messages=messages, tools=[ADD]).status_code == 200
    assert len(graph_of(gateway, info.id).leaves) == 1


# -- replies and events ------------------------------------------------------------------------------


def test_events_and_replies_are_those_of_the_protocol(gateway: Gateway) -> None:
    _, key = gateway.create_session(sampling_params=FORCED_THOUGHT)
    events = stream_events(gateway, key, tools=[ADD])
    assert [name for name, _ in events] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    deltas = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "input_json_delta"]
    for name, data in events:
        as_official(EVENT_TYPES[name], data)
    started, ended = events[0][1]["message"]["usage"], events[-2][1]["usage"]
    assert started["input_tokens"] == ended["input_tokens"] + ended["cache_read_input_tokens"] > 0
    assert ended["output_tokens"] > 0
    reply = as_official(Message, post(gateway, key, tools=[ADD]).json())
    assert reply.stop_reason == "tool_use"
    as_official(MessageTokensCount, post(gateway, key, "/v1/messages/count_tokens").json())


def test_reasons_for_the_end_of_a_turn(gateway: Gateway) -> None:
    _, key = gateway.create_session(sampling_params={"temperature": 1.0, "regex": "ab#c"})
    cut = post(gateway, key, max_tokens=2).json()
    assert (cut["stop_reason"], cut["stop_sequence"], cut["usage"]["output_tokens"]) == ("max_tokens", None, 2)
    stopped = post(gateway, key, stop_sequences=["#", "?"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "#")
    assert stopped["content"] == [{"type": "text", "text": "ab"}]
    (delta,) = [data for name, data in stream_events(gateway, key, stop_sequences=["#"]) if name == "message_delta"]
    assert delta["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "#"}
    ended = post(gateway, key).json()
    assert (ended["stop_reason"], ended["stop_sequence"], ended["content"][0]["text"]) == ("end_turn", None, "ab#c")


def make_turn(**fields: Any) -> AssistantTurn:
    values: dict[str, Any] = {
        "id": "s-1",
        "node": 1,
        "text": "",
        "reasoning": "",
        "tool_calls": (),
        "finish_reason": "stop",
        "stop_sequence": None,
        "num_prompt_tokens": 10,
        "num_cached_tokens": 4,
        "token_ids": [1, 2],
        "logprobs": [-1.0, -1.0],
        "tokens": (),
    }
    return AssistantTurn(**{**values, **fields})


USES = (ToolUse("call_1", "add", '{"a":1}'), ToolUse("call_2", "none", "{}"))


@pytest.mark.parametrize(
    ("turn", "kinds", "stop_reason"),
    [
        (make_turn(), ["text"], "end_turn"),
        (make_turn(reasoning="r"), ["thinking", "text"], "end_turn"),
        (
            make_turn(text="t", tool_calls=USES, finish_reason="tool_calls"),
            ["text", "tool_use", "tool_use"],
            "tool_use",
        ),
        (make_turn(text="\n", tool_calls=USES[:1], finish_reason="tool_calls"), ["tool_use"], "tool_use"),
        (make_turn(tool_calls=USES[:1], finish_reason="length"), ["tool_use"], "max_tokens"),
        (make_turn(tool_calls=USES[:1], finish_reason="tool_calls", stop_sequence="#"), ["tool_use"], "tool_use"),
    ],
)
def test_a_stream_and_a_reply_have_the_same_content(turn: AssistantTurn, kinds: list[str], stop_reason: str) -> None:
    """The stream is put together as the SDK does. The turn that is echoed means the same as the turn that was sent."""
    request = TurnRequest("m", [{"role": "user", "content": "a"}])
    reply = as_official(Message, DIALECT.reply(request, turn))
    assert ([block.type for block in reply.content], reply.stop_reason) == (kinds, stop_reason)
    ours = DIALECT.open_stream(request, "id")
    delta = TurnDelta(turn.reasoning, turn.text, turn.token_ids, turn.logprobs, turn.tokens)
    events = [*ours.begin(10), *ours.add(delta), *ours.end(turn)]

    def answer(_: httpx2.Request) -> httpx2.Response:
        content = b"".join(event.encode() for event in events)
        return httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})

    transport = httpx2.Client(transport=httpx2.MockTransport(answer))
    client = anthropic.Anthropic(api_key="k", base_url="http://localhost", http_client=transport)
    with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "a"}]) as stream:
        streamed = stream.get_final_message()
    assert streamed.to_dict()["content"] == reply.to_dict()["content"]
    assert (streamed.stop_reason, streamed.usage.input_tokens) == (stop_reason, 6)
    echoed = [block.to_dict() for block in reply.content]
    parsed = parse(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": echoed}, ASKED])
    assert conversation_keys("", [parsed.messages[1]]) == conversation_keys("", [message_of(turn)])


def test_a_stream_without_news_has_pings(generate: RecordingGenerateFn, renderer: ChatRenderer, tmp_path: Path) -> None:
    limits = RolloutLimits(max_context_tokens=MAX_CONTEXT_TOKENS, max_turns=9)
    with Gateway(generate, tmp_path, renderer=renderer, limits=limits) as gateway:
        object.__setattr__(gateway.config, "keep_alive_s", 0.01)
        # A turn with stop strings is sent when it has ended.
        _, key = gateway.create_session(sampling_params={"max_new_tokens": 100, "ignore_eos": True, "stop": "#?#?"})
        events = stream_events(gateway, key)
    assert [name for name, _ in events[:2]] == ["message_start", "ping"]
    assert events[1][1] == {"type": "ping"}
    assert events[-1][0] == "message_stop"


# -- errors ------------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long(gateway: Gateway) -> None:
    """The error has the numbers of tokens of the whole prompt, at the beginning and later in a conversation."""
    info, key = gateway.create_session(sampling_params=SHORT)
    messages: list[Any] = [{"role": "user", "content": "x" * 1000}]
    reply = post(gateway, key, messages=messages).json()
    messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "y" * 1500}]
    beginning: list[Any] = [{"role": "user", "content": "x" * 3000}]
    for too_long in (messages, beginning):
        count = post(gateway, key, "/v1/messages/count_tokens", messages=too_long).json()["input_tokens"]
        assert count > MAX_CONTEXT_TOKENS
        for is_stream in (False, True):
            with pytest.raises(anthropic.BadRequestError) as caught:
                client_of(gateway, key).messages.create(model="m", max_tokens=9, messages=too_long, stream=is_stream)
            error = as_official(ErrorResponse, caught.value.body).error
            expected = f"prompt is too long: {count} tokens > {MAX_CONTEXT_TOKENS} maximum"
            assert (error.type, error.message) == ("invalid_request_error", expected)
    assert sum(node.sampled for node in graph_of(gateway, info.id).nodes) == 1


def test_errors_have_the_words_of_the_dialect(gateway: Gateway) -> None:
    with pytest.raises(anthropic.AuthenticationError, match="missing or wrong"):
        client_of(gateway, "sk-wrong").messages.count_tokens(model="m", messages=[{"role": "user", "content": "a"}])
    _, key = gateway.create_session(sampling_params=SHORT, limits={"max_turns": 1})
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        reply = post(gateway, key, path, messages=[{"role": "user", "content": [{"type": "image"}]}])
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert post(gateway, key).status_code == 200
    with pytest.raises(anthropic.RateLimitError, match="max_turns"):
        client_of(gateway, key).messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "b"}])
    reply = httpx.post(f"{gateway.url}/v1/messages", content=b"{", headers={"x-api-key": key})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    for kind in ErrorKind:
        status, body = DIALECT.error(GatewayError(kind, "why", max_tokens=5))
        if kind is not ErrorKind.TOO_LARGE:  # the documentation has this type, the SDK has no class for it
            as_official(ErrorResponse, body)
        assert status == (529 if kind is ErrorKind.OVERLOADED else kind.status)
    stream = DIALECT.open_stream(parse(), "id")
    assert stream.fail(GatewayError(ErrorKind.INTERNAL, "why")).encode().startswith(b"event: error\n")


# -- bodies ------------------------------------------------------------------------------------------

ASKED: Any = {"role": "user", "content": "a"}


def parse(**fields: Any) -> TurnRequest:
    return DIALECT.parse({"model": "m", "max_tokens": 9, "messages": [ASKED], **fields})


def test_messages_are_those_of_the_chat_dialect() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "one"}, image]},
        {"type": "text", "text": "before"},
        {"type": "tool_result", "tool_use_id": "2", "is_error": True},
        {"type": "tool_result", "tool_use_id": "3", "content": None},
        {"type": "tool_result", "tool_use_id": "4", "content": "no such file", "is_error": True},
        {"type": "text", "text": "after", "cache_control": {"type": "ephemeral"}},
    ]
    thoughts = [{"type": "thinking", "thinking": "t"}, {"type": "redacted_thinking", "data": "x"}]
    turn = [*thoughts, {"type": "text", "text": "x"}, as_use("1", {"a": 1}), {"type": "text", "text": "y"}]
    parsed = parse(
        system=[{"type": "text", "text": "x-anthropic-billing-header: a=1;\nS"}, {"type": "text", "text": "T"}],
        messages=[{"role": "assistant", "content": turn}, {"role": "user", "content": results}],
    )
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert parsed.messages == [
        {"role": "system", "content": "ST"},
        {"role": "assistant", "content": "xy", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "one"}, part], "tool_call_id": "1"},
        {"role": "tool", "content": "Error", "tool_call_id": "2"},
        {"role": "tool", "content": "", "tool_call_id": "3"},
        {"role": "tool", "content": "no such file", "tool_call_id": "4"},
        {"role": "user", "content": "beforeafter"},
    ]
    assert parse(system="x-anthropic-billing-header: a=1;").messages == [ASKED]
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    chat = ChatDialect().parse({"messages": [{"role": "user", "content": [url]}]})
    assert chat.messages == parse(messages=[{"role": "user", "content": [image]}]).messages


def test_system_messages_stay_at_their_place_as_text_of_the_user() -> None:
    """Many chat templates refuse a system message that is not the first message."""
    reminder = {"role": "system", "content": "r"}
    turn = {"role": "assistant", "content": "t"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "3"}
    messages = [ASKED, reminder, turn, {"role": "user", "content": [result]}, reminder]
    expected = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a\n\nr"},
        turn,
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "user", "content": "r"},
    ]
    assert parse(system="S", messages=messages).messages == expected
    chat = [{"role": "system", "content": "S"}, ASKED, reminder, turn, expected[3], reminder]
    assert ChatDialect().parse({"messages": chat}).messages == expected
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    with_image = [{"role": "user", "content": [image]}, reminder]
    assert ChatDialect().parse({"messages": with_image}).messages == [with_image[0], {"role": "user", "content": "r"}]
    assert parse(system="S", messages=[reminder, ASKED]).messages == [{"role": "system", "content": "S\n\nr"}, ASKED]


def test_tools_and_parameters() -> None:
    kinds = ["web_search_20260318", "mcp_toolset", "bash_20250124", "browser_20260101", "memory_20250818"]
    server_tools = [{"type": kind, "name": "x"} for kind in kinds]
    parsed = parse(
        tools=[{**ADD, "type": "custom", "cache_control": None}, *server_tools],
        tool_choice={"type": "auto"},
        thinking={"type": "enabled", "budget_tokens": 9},
        temperature=0.5,
        top_p=0.9,
        top_k=2**40,
        stop_sequences=["#"],
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
        metadata={"user_id": "u"},
        context_management={"edits": []},
        unknown=[{}],
        stream=True,
    )
    assert parsed.tools == ChatDialect().parse({"messages": [ASKED], "tools": [ADD_IN_CHAT]}).tools == [ADD_IN_CHAT]
    assert parsed.stream
    assert parsed.sampling_params == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 2**30,
        "stop": ["#"],
        "json_schema": orjson.dumps(SCHEMA).decode(),
    }
    assert parsed.omitted_tools == kinds
    without_calls = parse(tools=[ADD], tool_choice={"type": "none"})
    assert (without_calls.tools, without_calls.forced_tools) == ([ADD_IN_CHAT], ())


BROKEN_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": 5}}
LARGE_FORMAT = {"type": "json_schema", "schema": {"type": "string", "pattern": "a?" * 13}}
DEEP: Any = {}
for _ in range(250):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"max_tokens": None}, "'max_tokens' is required"),
        ({"max_tokens": 0}, "'max_tokens' must be"),
        ({"model": None}, "'model' must be"),
        ({"messages": []}, "'messages' must be"),
        ({"messages": [{"role": "tool", "content": "b"}]}, "messages.0: 'role' must be"),
        ({"messages": [ASKED, {"role": "user", "content": [BROKEN_IMAGE]}]}, "messages.1: 'data' must be"),
        ({"messages": [{"role": "user", "content": [{"type": 5}]}]}, "'content[0].type' = '5'"),
        ({"system": [{"type": "text"}]}, "'system[0].text' must be"),
        ({"tools": [ADD], "tool_choice": {"type": "some"}}, "'tool_choice.type' = some"),
        ({"tool_choice": {"type": "any"}}, "'tool_choice' forces a call"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "names the tool 'sub'"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "'name' must be a string"),
        ({"tools": [{"name": "add"}]}, "tools.0: 'input_schema' must be"),
        ({"tools": [{"name": "add", "input_schema": DEEP}]}, "'input_schema' has too many levels"),
        ({"stream": "yes"}, "'stream' must be"),
        ({"stop_sequences": [""]}, "'stop_sequences' must have at least 1 character"),
        ({"output_config": {"format": {"type": "text"}}}, "'output_config.format' must"),
        ({"output_config": {"format": LARGE_FORMAT}}, "'schema' has regular expressions that are too large"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], culprit: str) -> None:
    with pytest.raises(GatewayError) as caught:
        parse(**fields)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert culprit in caught.value.message


def test_values_with_too_many_levels_do_not_break_the_record(gateway: Gateway) -> None:
    """SGLang and the record take fewer levels than the parser of the body."""
    _, key = gateway.create_session(sampling_params=SHORT)
    turn = {"role": "assistant", "content": [as_use("call_1", DEEP)]}
    assert post(gateway, key, tools=[{**ADD, "input_schema": DEEP}]).status_code == 400
    assert post(gateway, key, messages=[ASKED, turn, ASKED]).status_code == 400
    function = {"name": "add", "parameters": DEEP}
    path = "/v1/chat/completions"
    assert post(gateway, key, path, tools=[{"type": "function", "function": function}]).status_code == 400
    for arguments in (DEEP, json.dumps(DEEP)):
        call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}, ASKED]
        assert post(gateway, key, path, messages=messages).status_code == 400
    assert post(gateway, key, metadata=DEEP).status_code == 400
    assert post(gateway, key).status_code == 200, "the session goes on"


REAL_BODIES: list[Any] = [
    {
        "model": "claude-sonnet",
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "top_k": 5,
        "top_p": 0.5,
        "stop_sequences": ["#"],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
        "metadata": {"user_id": "u"},
        "tool_choice": {"type": "auto"},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: a=1;"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [ADD, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "t", "signature": ""}, as_use("call_1", {"a": [1, 2.5]})],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_1",
                        "is_error": False,
                        "content": [
                            {"type": "text", "text": "3"},
                            {
                                "type": "image",
                                "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
                            },
                        ],
                    },
                    {"type": "text", "text": "b"},
                ],
            },
            {"role": "system", "content": "c"},
        ],
    },
    {"model": "m", "max_tokens": 1, "system": "s", "messages": [ASKED, {"role": "assistant", "content": "b"}, ASKED]},
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a JSON value, with each of its keys or indices."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        yield value, key
        yield from places_in(item)


@settings(max_examples=500)
@given(st.data())
def test_a_malformed_body_is_refused_and_nothing_else(data: st.DataObject) -> None:
    """What is parsed has keys and JSON: the session fails at nothing in it."""
    body: Any = copy.deepcopy(data.draw(st.sampled_from(REAL_BODIES)))
    for _ in range(data.draw(st.integers(1, 3))):
        places: Any = list(places_in(body))
        if not places:
            break
        container, key = data.draw(st.sampled_from(places))
        change = data.draw(st.sampled_from(("replace", "remove", "repeat")))
        if change == "replace":
            others = st.sampled_from([item[place] for item, place in places])
            container[key] = copy.deepcopy(data.draw(VALUES | others))
        elif change == "remove":
            del container[key]
        elif isinstance(container, list):
            container.append(container[key])
    body = orjson.loads(orjson.dumps(body))
    for parse_body in (DIALECT.parse, DIALECT.parse_count):
        try:
            request = parse_body(body)
        except GatewayError:
            continue
        conversation_keys(tools_digest(request.tools), request.messages)
        orjson.dumps([request.messages, request.tools, request.sampling_params])
