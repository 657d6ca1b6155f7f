"""Turns that must be tool calls, in each dialect: on a real server, whose tiny model writes random text otherwise."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import xgrammar
from agent_helpers import TOOL_CALL_REGEX, RecordingGenerateFn, renderer_with_template
from helpers import QWEN, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gateway import gateway, generate, graph_of, openai_client
from test_gateway_anthropic import client_of
from transformers import AutoTokenizer

from verl_server import VerlEngine
from verl_server.agent import RolloutLimits
from verl_server.gateway import Gateway
from verl_server.gateway.conversation import TurnRequest
from verl_server.gateway.errors import GatewayError
from verl_server.gateway.turn_text.grammar import turn_params
from verl_server.gateway.turn_text.splitting import split_turn
from verl_server.tiny import CHAT_TEMPLATE
from verl_server.trajectory import ChatRenderer, FamilyRenderer

__all__ = ["gateway", "generate"]

SAMPLING = {"max_new_tokens": 1000, "temperature": 1.0}
YES_OR_NO: Any = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}
COLOURS: Any = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", 'b"lue', None, 7]},
        "shades": {"$ref": "#/$defs/shade"},
    },
    "required": ["colour", "shades"],
    "additionalProperties": False,
    "$defs": {"shade": {"anyOf": [{"const": "dark"}, {"type": "boolean"}]}},
}
SCHEMAS = {"decide": YES_OR_NO, "paint-it": COLOURS}
HELLO: list[Any] = [{"role": "user", "content": "a"}]

Call = tuple[str, Any]
Ask = Callable[[Gateway, str, str | None, bool], list[Call]]
"""Asks for a turn that must be a call: of the named tool, or of any tool. The flag: whether several calls may come."""


def ask_chat(gateway: Gateway, key: str, name: str | None, parallel: bool) -> list[Call]:
    tools: Any = [{"type": "function", "function": {"name": tool, "parameters": SCHEMAS[tool]}} for tool in SCHEMAS]
    choice: Any = "required" if name is None else {"type": "function", "function": {"name": name}}
    reply: Any = openai_client(gateway, key).chat.completions.create(
        model="m",
        messages=HELLO,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    return [(call.function.name, json.loads(call.function.arguments)) for call in reply.choices[0].message.tool_calls]


def ask_responses(gateway: Gateway, key: str, name: str | None, parallel: bool) -> list[Call]:
    tools: Any = [{"type": "function", "name": tool, "parameters": SCHEMAS[tool]} for tool in SCHEMAS]
    choice: Any = "required" if name is None else {"type": "function", "name": name}
    reply: Any = openai_client(gateway, key).responses.create(
        model="m",
        input="a",
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
    )
    assert (reply.status, reply.parallel_tool_calls, reply.tool_choice) == ("completed", parallel, "required")
    return [(item.name, json.loads(item.arguments)) for item in reply.output]


def ask_messages(gateway: Gateway, key: str, name: str | None, parallel: bool) -> list[Call]:
    tools: Any = [{"name": tool, "input_schema": SCHEMAS[tool]} for tool in SCHEMAS]
    choice: Any = {"type": "any"} if name is None else {"type": "tool", "name": name}
    choice["disable_parallel_tool_use"] = not parallel
    client = client_of(gateway, key)
    with client.messages.stream(model="m", max_tokens=300, messages=HELLO, tools=tools, tool_choice=choice) as stream:
        reply: Any = stream.get_final_message()
    assert reply.stop_reason == "tool_use"
    return [(block.name, block.input) for block in reply.content]


def require_valid(call: Call) -> None:
    name, arguments = call
    if name == "decide":
        assert set(arguments) == {"yes"}
        assert isinstance(arguments["yes"], bool)
    else:
        assert name == "paint-it"
        assert arguments["colour"] in ["red", 'b"lue', None, 7]
        assert arguments["shades"] in ("dark", True, False)


@pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
def test_the_turn_is_a_call(gateway: Gateway, ask: Ask) -> None:
    info, key = gateway.create_session(sampling_params=SAMPLING)
    for name in (None, *SCHEMAS) * 4:
        (call,) = ask(gateway, key, name, False)
        require_valid(call)
        assert name in (None, call[0])
    graph = graph_of(gateway, info.id)
    assert all(node.finish_reason == "stop" for node in graph.nodes if node.sampled)
    assert len(graph.leaves) == 12, "the same prompt has 12 turns"


def test_several_calls_are_allowed(gateway: Gateway) -> None:
    _, key = gateway.create_session(sampling_params=SAMPLING)
    found = [ask_chat(gateway, key, None, True) for _ in range(8)]
    assert max(map(len, found)) > 1
    for calls in found:
        for call in calls:
            require_valid(call)


def post(gateway: Gateway, key: str, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": HELLO, "tool_choice": "required", **fields}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{gateway.openai_url}/chat/completions", json=body, headers=headers, timeout=60.0)


def tool(parameters: Any, name: str = "decide") -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


# -- structured output, and turns without calls -------------------------------------------------------

MESSAGES, RESPONSES, CHAT = DIALECTS = ("messages", "responses", "chat/completions")


def send(gateway: Gateway, key: str, dialect: str, *, choice: str = "auto", **wanted: Any) -> Any:
    """The reply to a request, with `schema` for structured output and `tools` by name if they are given."""
    schema, tools, headers = wanted.pop("schema", None), wanted.pop("tools", {}), {"x-api-key": key}
    body: dict[str, Any] = {"model": "m", "messages": HELLO, **wanted}
    body |= {"tool_choice": {"type": choice} if dialect == MESSAGES else choice} if tools else {}
    if dialect == CHAT:
        body["tools"] = [tool(parameters, name) for name, parameters in tools.items()] or None
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body["response_format"] = None if schema is None else named
    elif dialect == RESPONSES:
        body["input"] = body.pop("messages")
        body["tools"] = [{"type": "function", "name": name, "parameters": value} for name, value in tools.items()]
        body["text"] = None if schema is None else {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    else:
        body["max_tokens"] = 1000
        body["tools"] = [{"name": name, "input_schema": value} for name, value in tools.items()]
        body["output_config"] = None if schema is None else {"format": {"type": "json_schema", "schema": schema}}
    return httpx.post(f"{gateway.openai_url}/{dialect}", json=body, headers=headers, timeout=60.0)


def parts_of(reply: Any, dialect: str) -> tuple[str, str, list[Call]]:
    """Thought, text and calls of a reply."""
    assert reply.status_code == 200, reply.text
    found = reply.json()
    if dialect == CHAT:
        message = found["choices"][0]["message"]
        calls = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls", ())
        ]
        assert (found["choices"][0]["finish_reason"] == "tool_calls") == bool(calls)
        return message.get("reasoning_content", ""), message["content"] or "", calls
    texts = {"thinking": "", "text": ""}
    calls = []
    for item in found["content"] if dialect == MESSAGES else found["output"]:
        if item["type"] in ("tool_use", "function_call"):
            arguments = item["input"] if dialect == MESSAGES else json.loads(item["arguments"])
            calls.append((item["name"], arguments))
        elif dialect == MESSAGES:
            texts[item["type"]] += item[item["type"]]
        else:
            texts["text" if item["type"] == "message" else "thinking"] += item["content"][0]["text"]
    return texts["thinking"], texts["text"], calls


@pytest.mark.parametrize("dialect", DIALECTS)
def test_structured_output_with_tools_is_a_call_or_the_json(gateway: Gateway, dialect: str) -> None:
    """The policy can still call a tool, and it writes nothing but a call or the JSON."""
    _, key = gateway.create_session(sampling_params=SAMPLING)
    found = dict[bool, int]()
    for _ in range(60):
        _, text, calls = parts_of(send(gateway, key, dialect, schema=YES_OR_NO, tools={"paint-it": COLOURS}), dialect)
        require_valid(calls[0] if calls else ("decide", json.loads(text)))
        assert not calls or not text
        found[bool(calls)] = found.get(bool(calls), 0) + 1
        if len(found) == 2:
            break
    assert len(found) == 2, found


def test_structured_output_with_tools_of_another_family_is_refused_by_name(tokenizer: Any) -> None:
    params = {"json_schema": json.dumps(YES_OR_NO)}
    request = TurnRequest("m", HELLO, [tool(YES_OR_NO)], sampling_params=params)
    with pytest.raises(GatewayError, match="structured output cannot have tools") as caught:
        turn_params(FamilyRenderer(tokenizer, "llama-3"), request, [], {})
    assert caught.value.kind.status == 400


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_without_tools_a_call_is_text(gateway: Gateway, dialect: str, is_stream: bool) -> None:
    """Also with the `tool_choice` none. The agent repeats the text, and the conversation goes on."""
    for tools in ({}, {"add": YES_OR_NO}):
        info, key = gateway.create_session(sampling_params={"max_new_tokens": 100, "regex": TOOL_CALL_REGEX})
        reply = send(gateway, key, dialect, choice="none", tools=tools, stream=is_stream)
        if is_stream:
            assert reply.status_code == 200
            assert "tool_use" not in reply.text
            assert "function_call" not in reply.text
            assert '"tool_calls"' not in reply.text
            assert "<tool_call>" in reply.text.replace("\\u003c", "<")
            continue
        thought, text, calls = parts_of(reply, dialect)
        assert (thought, calls) == ("", [])
        assert re.fullmatch(TOOL_CALL_REGEX, text)
        messages = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "b"}]
        send(gateway, key, dialect, choice="none", tools=tools, messages=messages)
        assert len(graph_of(gateway, info.id).leaves) == 1


def test_a_turn_without_calls_stays_text_after_a_restart(
    shared_engine: VerlEngine, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    limits = RolloutLimits(max_context_tokens=2000, max_turns=1000)
    info, messages = None, list(HELLO)
    for _ in range(2):
        with Gateway(RecordingGenerateFn(shared_engine), tmp_path, renderer=renderer, limits=limits) as gateway:
            params = {"max_new_tokens": 100, "regex": TOOL_CALL_REGEX}
            info, key = gateway.create_session("s", key="sk-0123456789abcdef", sampling_params=params)
            reply = send(gateway, key, CHAT, choice="none", tools={"add": YES_OR_NO}, messages=messages)
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "b"}]
            graph = graph_of(gateway, info.id)
    assert (len(graph.leaves), sum(node.sampled for node in graph.nodes)) == (1, 2)


def test_a_call_replaces_structured_output(gateway: Gateway) -> None:
    _, key = gateway.create_session(sampling_params=SAMPLING)
    reply = post(gateway, key, tools=[tool(YES_OR_NO)], response_format={"type": "json_object"})
    assert reply.json()["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({}, "has no tools"),
        (
            {"tools": [tool(YES_OR_NO)], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "names the tool",
        ),
        ({"tools": [tool(YES_OR_NO)], "tool_choice": {"type": "function", "function": {}}}, "names the tool"),
        ({"tools": [tool(YES_OR_NO)], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "not supported"),
        ({"tools": [tool(YES_OR_NO)], "tool_choice": 5}, "not supported"),
    ],
)
def test_a_choice_that_cannot_be_honoured_is_refused(gateway: Gateway, fields: Any, culprit: str) -> None:
    _, key = gateway.create_session()
    reply = post(gateway, key, **fields)
    assert reply.status_code == 400
    assert culprit in reply.json()["error"]["message"]


STRANGE_SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"yes": {"enum": []}}},
    {"type": "nope", "properties": 5, "required": "a"},
    {"$ref": "#/$defs/missing"},
    {"$ref": "#"},
    {"$ref": "https://example.org/schema"},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "((((", "format": "no such format"}}},
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 1}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"type": "array", "minItems": 10**9, "uniqueItems": True}}},
    {"type": "object", "properties": {"a": {"type": "string", "minLength": 10**9}}},
    {"type": "object", "properties": {"\x00\"\\\n🙂</tool_call>": {"const": "\x00\"\\\n🙂</tool_call>"}}},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
    {"type": "array", "items": {"type": "string"}},
    {"anyOf": []},
    {"not": {}},
)  # fmt: skip

NUL = 9
"""Index of the schema with a NUL."""


def test_schemas_that_no_grammar_has_do_no_harm(gateway: Gateway) -> None:
    """Each turn is a call or was cut off, and the server still runs."""
    _, key = gateway.create_session(sampling_params={**SAMPLING, "max_new_tokens": 60})
    for schema in STRANGE_SCHEMAS:
        reply = post(gateway, key, tools=[tool(schema, 'a "strange" \n tool')])
        if schema is STRANGE_SCHEMAS[NUL]:  # xgrammar takes no NUL
            assert (reply.status_code, "NUL" in reply.text) == (400, True)
            continue
        assert reply.status_code == 200, (schema, reply.text)
        (choice,) = reply.json()["choices"]
        assert choice["finish_reason"] in ("tool_calls", "length"), choice
    _, key = gateway.create_session(sampling_params=SAMPLING)
    require_valid(ask_chat(gateway, key, "decide", False)[0])


def test_a_grammar_that_the_server_refuses_is_an_error_of_the_request(gateway: Gateway) -> None:
    """For example the structured output of an agent."""
    _, key = gateway.create_session(sampling_params=SAMPLING)
    schema = {"name": "x", "schema": {"type": "nope"}}
    for is_stream in (False, True):
        reply = post(
            gateway,
            key,
            tool_choice="auto",
            stream=is_stream,
            response_format={"type": "json_schema", "json_schema": schema},
        )
        assert reply.status_code == (200 if is_stream else 400)
        assert "invalid_request_error" in reply.text
    require_valid(ask_chat(gateway, key, "decide", False)[0])


UNUSABLE_SCHEMAS: tuple[Any, ...] = (
    {"$ref": "#"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}},
    {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}, {"$ref": "#/properties/a"}]}}},
    {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}, "$ref": "#/$defs/a"},
    {"$ref": "#/$defs/missing"},
    {"type": "nope"},
    {"enum": []},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "string", "pattern": "(((("},
)  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_schema_that_no_grammar_has_is_refused_at_once(gateway: Gateway, dialect: str) -> None:
    """Also with tools: then the schema is a part of a larger grammar."""
    _, key = gateway.create_session(sampling_params={**SAMPLING, "max_new_tokens": 60})
    for schema in UNUSABLE_SCHEMAS:
        for tools in ({}, {"decide": YES_OR_NO}):
            start = time.monotonic()
            reply = send(gateway, key, dialect, schema=schema, tools=tools)
            assert reply.status_code == 400, (schema, reply.text)
            assert "invalid" in reply.text
            assert time.monotonic() - start < 8.0, "a request takes milliseconds on an idle machine"
    recursive = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    assert send(gateway, key, dialect, schema=recursive).status_code == 200


# -- prompts with an open thought, and families of models --------------------------------------------


@pytest.fixture
def thinking(shared_engine: VerlEngine, tiny: Callable[..., Path], tmp_path: Path) -> Iterator[Gateway]:
    """A gateway with a chat template that opens a thought."""
    template = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert template != CHAT_TEMPLATE
    renderer = renderer_with_template(AutoTokenizer.from_pretrained(tiny("qwen3")), template)
    limits = RolloutLimits(max_context_tokens=2000, max_turns=1000)
    with Gateway(RecordingGenerateFn(shared_engine), tmp_path, renderer=renderer, limits=limits) as gateway:
        yield gateway


def test_a_thought_that_the_prompt_has_opened_is_the_first_part_of_the_turn(thinking: Gateway) -> None:
    """The policy is free until the end of the thought, which a tiny model does not reach."""
    info, key = thinking.create_session(sampling_params={"max_new_tokens": 40, "temperature": 1.0})
    reply = post(thinking, key, tools=[tool(YES_OR_NO)]).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"]
    assert graph_of(thinking, info.id).nodes[-1].sampled


@pytest.mark.parametrize("dialect", DIALECTS)
def test_structured_output_begins_after_the_thought(thinking: Gateway, dialect: str) -> None:
    """The policy thinks until it ends the thought, which a tiny model does not: it writes no JSON into the thought."""
    for tools in ({}, {"decide": YES_OR_NO}):
        _, key = thinking.create_session(sampling_params={"max_new_tokens": 60, "temperature": 1.0})
        reply = send(thinking, key, dialect, schema=YES_OR_NO, tools=tools)
        thought, text, calls = parts_of(reply, dialect)
        assert (text, calls) == ("", [])
        assert thought
        assert not re.match(r'\s*\{\s*"|<tool_call>', thought), "a grammar of the JSON or of a call has no other start"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    made.chat_template = QWEN
    return made


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> ChatRenderer:
    return ChatRenderer(tokenizer)


def accepts(structural_tag: str, text: str, tokenizer: Any) -> bool:
    """Whether the grammar allows exactly this text."""
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(structural_tag)
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text)) and bool(matcher.is_terminated() or matcher.is_completed())


def test_the_grammar_has_what_is_parsed(tokenizer: Any) -> None:
    for renderer in (ChatRenderer(tokenizer), FamilyRenderer(tokenizer, "qwen3")):
        request = TurnRequest("m", HELLO, [tool(YES_OR_NO)], forced_tools=["decide"], allows_parallel_calls=False)
        for prompt, thought in (("<|im_start|>assistant\n", ""), ("<think>\n", "So.</think>\n\n")):
            preceding = renderer.encode(prompt)
            tag = turn_params(renderer, request, preceding, {})["structural_tag"]
            text = thought + '<tool_call>\n{"name": "decide", "arguments": {"yes": true}}\n</tool_call>'
            assert accepts(tag, text, tokenizer)
            assert not accepts(tag, text.replace("true", "1"), tokenizer)
            assert not accepts(tag, "Hello", tokenizer)
            parts = split_turn(renderer, renderer.encode(text), preceding, request.tools, "t")
            assert [(call.name, call.arguments) for call in parts.tool_calls] == [("decide", '{"yes":true}')]
            assert (parts.reasoning, parts.text) == (thought and "So.", "")


CALL = '<tool_call>\n{"name": "decide", "arguments": {"yes": true}}\n</tool_call>'
ANSWER = '{"yes": true}'


@pytest.mark.parametrize("kind", ["ChatRenderer", "FamilyRenderer"])
@pytest.mark.parametrize(
    ("prompt", "thoughts"),
    [
        ("<|im_start|>assistant\n", ["", "<think>\nSo.\n</think>\n\n"]),
        ("<|im_start|>assistant\n<think>\n", ["So.\n</think>\n\n", "</think>\n\n"]),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", [""]),
    ],
)
def test_a_grammar_takes_no_thought_and_no_call_away(
    tokenizer: Any, kind: str, prompt: str, thoughts: list[str]
) -> None:
    """The templates of Qwen3 (which may think), of Qwen3-Thinking and Qwen3.5, and of Qwen3 without thoughts."""
    thinking = tokenizer.chat_template.replace("<|im_start|>assistant\n{% endif", f"{prompt}{{% endif")
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = f"{thinking}{{# <think> #}}"
    made: Any = ChatRenderer(tokenizer) if kind == "ChatRenderer" else FamilyRenderer(tokenizer, "qwen3")
    for tools, forced, answers in (
        ([], None, [ANSWER]),
        ([tool(YES_OR_NO)], None, [ANSWER, CALL, f"{CALL}\n{CALL}"]),
        ([tool(YES_OR_NO)], (), [ANSWER]),
        ([tool(YES_OR_NO)], ["decide"], [CALL, f"{CALL}\n{CALL}"]),
    ):
        schema = {"json_schema": json.dumps(YES_OR_NO)}
        request = TurnRequest("m", HELLO, tools, sampling_params=schema, forced_tools=forced)
        params, preceding = turn_params(made, request, made.encode(prompt), {}), made.encode(prompt)
        if "json_schema" in params:
            assert (thoughts, answers) == ([""], [ANSWER]), "no structural tag is needed"
            continue
        for answer in (ANSWER, CALL, f"{CALL}\n{CALL}", "Hello"):
            for thought in ("", "So.\n</think>\n\n", "</think>\n\n", "<think>\nSo.\n</think>\n\n"):
                is_allowed = answer in answers and thought in thoughts
                if thought.startswith("<think>") and thoughts[0] == "So.\n</think>\n\n":
                    is_allowed = answer in answers  # a thought may have any text
                assert accepts(params["structural_tag"], thought + answer, tokenizer) == is_allowed, (thought, answer)
                if is_allowed and thought in thoughts:
                    parts = split_turn(made, made.encode(thought + answer), preceding, tools, "t")
                    assert parts.reasoning == ("So." if "So." in thought else "")
                    assert (parts.text, len(parts.tool_calls)) == (
                        (ANSWER, 0) if answer == ANSWER else ("", answer.count(CALL))
                    )


def test_one_call_is_the_limit_of_structured_output_too(renderer: ChatRenderer, tokenizer: Any) -> None:
    schema = {"json_schema": json.dumps(YES_OR_NO)}
    request = TurnRequest("m", HELLO, [tool(YES_OR_NO)], sampling_params=schema, allows_parallel_calls=False)
    tag = turn_params(renderer, request, [], {})["structural_tag"]
    assert accepts(tag, CALL, tokenizer)
    assert not accepts(tag, f"{CALL}\n{CALL}", tokenizer)


def test_the_grammar_of_a_session_replaces_that_of_the_request(renderer: ChatRenderer) -> None:
    """Servers take one grammar."""
    request = TurnRequest("m", HELLO, sampling_params={"json_schema": "{}", "temperature": 0.5})
    assert turn_params(renderer, request, [], {"regex": "a"}) == {"regex": "a", "temperature": 0.5}


A = {"a": {"type": "boolean"}}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (
            {"properties": A},
            ["{}", '{"a": true}', '{"b": 1}', '{"a": true, "b": [1]}'],
            ['{"a": 1}', '{"a": 1, "b": 1}'],
        ),
        (
            {"properties": A, "required": ["a", "z"]},
            ['{"a": true, "z": 1}', '{"a": true, "b": 1, "z": 1}'],
            ['{"z": 1}'],
        ),
        ({"properties": A, "required": ["z"]}, ['{"z": 1}', '{"a": true, "z": 1}'], ['{"a": 1, "z": 1}']),
        ({"properties": A, "additionalProperties": {"type": "integer"}}, ['{"b": 1}'], ['{"b": "c"}']),
        ({"properties": A, "additionalProperties": False}, ["{}", '{"a": true}'], ['{"b": 1}']),
        ({"properties": A, "additionalProperties": False, "patternProperties": {"b": {}}}, ['{"b": 1}'], []),
        ({"properties": A, "allOf": [{"properties": {"b": {}}, "required": ["b"]}]}, ['{"a": true, "b": 1}'], []),
        ({"allOf": [{"properties": A}]}, ['{"a": true, "b": 1}'], ["1"]),
        ({"properties": {"a": {"allOf": [{"type": "integer"}]}}}, ['{"a": 1}'], []),
        (
            {"properties": {"a": {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}}}},
            ['{"a": ["b", 1]}'],
            ['{"a": 1}'],
        ),
    ],
)
def test_the_grammar_allows_what_the_schema_allows(
    tokenizer: Any, schema: Any, allowed: list[str], refused: list[str]
) -> None:
    renderer, tools = ChatRenderer(tokenizer), [tool({"type": "object", **schema})]
    tag = turn_params(renderer, TurnRequest("m", HELLO, tools, forced_tools=["decide"]), [], {})["structural_tag"]
    for arguments in (*allowed, *refused):
        text = f'<tool_call>\n{{"name": "decide", "arguments": {arguments}}}\n</tool_call>'
        assert accepts(tag, text, tokenizer) == (arguments in allowed), arguments


def test_a_family_with_other_calls_is_refused_with_the_cure(tokenizer: Any) -> None:
    request = TurnRequest("m", HELLO, [tool(YES_OR_NO)], forced_tools=["decide"])
    with pytest.raises(GatewayError, match=r"renderer=ChatRenderer\(tokenizer\)") as caught:
        turn_params(FamilyRenderer(tokenizer, "llama-3"), request, [], {})
    assert caught.value.kind.status == 400
    session = {"regex": "a", "temperature": 0.5}
    assert turn_params(FamilyRenderer(tokenizer, "llama-3"), request, [], session) == session


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(NAMES, values, max_size=3),
    max_leaves=5,
)
KEYWORDS = st.sampled_from((
    "type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "pattern",
    "format", "minimum", "maxItems", "additionalProperties", "not", "prefixItems",
))  # fmt: skip
TYPES = st.sampled_from(["object", "array", "string", "number", "integer", "boolean", "null", "no", ["string", "null"]])
ANY_SCHEMA = st.recursive(
    st.builds(lambda kind: {"type": kind}, TYPES) | st.dictionaries(KEYWORDS, JSON | TYPES, max_size=3),
    lambda schemas: (
        st.fixed_dictionaries({"type": TYPES, "properties": st.dictionaries(NAMES, schemas, max_size=3)})
        | st.fixed_dictionaries({"anyOf": st.lists(schemas, max_size=3), "items": schemas})
        | st.dictionaries(KEYWORDS, schemas, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=200)
@given(schema=ANY_SCHEMA, name=NAMES)
def test_each_schema_of_a_stranger_becomes_a_grammar(renderer: ChatRenderer, schema: Any, name: str) -> None:
    request = TurnRequest("m", HELLO, [tool(schema, name)], forced_tools=[name])
    xgrammar.Grammar.from_structural_tag(turn_params(renderer, request, [], {})["structural_tag"])


def test_a_huge_schema_has_a_bounded_grammar(tokenizer: Any) -> None:
    schema: Any = {"type": "object"}
    for _ in range(40):
        schema = {"type": "object", "properties": {f"p{number}": schema for number in range(2)}, "required": ["p0"]}
    tools = [tool({"type": "object", "properties": {f"q{i}": {"enum": list(range(500))} for i in range(50)}})]
    repeated = [_repeated({"const": "a" * 1000}), _repeated({"enum": ["a" * 1000]})]
    names = _repeated({"type": "object", "properties": {"a" * 1000: {}}})
    for given_tools in ([tool(schema)], tools, *([tool(item)] for item in (*repeated, names))):
        request = TurnRequest("m", HELLO, given_tools, forced_tools=["decide"])
        tag = turn_params(ChatRenderer(tokenizer), request, [], {})["structural_tag"]
        assert len(tag) < 300_000
        xgrammar.Grammar.from_structural_tag(tag)


def _repeated(schema: Any) -> Any:
    """The schema of an object with 600 references to one schema."""
    properties = {f"p{number}": {"$ref": "#/$defs/x"} for number in range(600)}
    return {"type": "object", "$defs": {"x": schema}, "properties": properties}
