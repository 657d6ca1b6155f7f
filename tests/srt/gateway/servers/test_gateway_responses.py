"""OpenAI's Responses API through the gateway, with the official SDK on a real server."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from agent_helpers import RecordingGenerateFn
from hypothesis import given
from json_mutations import mutated_bodies
from openai.types.responses import Response, ResponseStreamEvent
from test_gateway import ADD, FORCED_CALL, gateway, generate, graph_of, openai_client

from verl_server.gateway import Gateway
from verl_server.gateway.dialects.chat import ChatDialect
from verl_server.gateway.dialects.responses import ResponsesDialect
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.trajectory import TrajectoryGraph

__all__ = ["gateway", "generate"]

FLAT_ADD: Any = {"type": "function", "strict": False, **ADD["function"]}
CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": 1, "b": 2\}\}</tool_call>'
THOUGHT_TEXT_AND_TWO_CALLS = {
    "max_new_tokens": 400,
    "temperature": 0,
    "regex": rf"<think>hm</think>\n\nSure\.\n{CALL}\n{CALL}",
}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
CODEX_BODY: dict[str, Any] = {  # as codex-cli 0.169.0 sends it, with shorter texts
    "model": "policy",
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Help."}]},
        {"type": "message", "id": "msg_2", "role": "developer", "content": [{"type": "input_text", "text": "Skills"}]},
        {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/</cwd>"}]},
        {"type": "message", "id": "msg_4", "role": "user", "content": [{"type": "input_text", "text": "List them"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Sure."}],
            "internal_chat_message_metadata_passthrough": {"turn_id": "1"},
        },
        {"type": "function_call", "id": "fc_1", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "c1"},
        {"type": "function_call", "id": "fc_2", "name": "view_image", "arguments": '{"path":"a"}', "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.png"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "high"}],
        },
        {"type": "custom_tool_call", "status": "completed", "call_id": "c3", "name": "apply_patch", "input": "***"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "Done"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
        {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [FLAT_ADD]},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}},
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "client_metadata": {"turn_id": "1"},
}
SDK_BODY: dict[str, Any] = {
    "model": "m",
    "instructions": "Add.",
    "input": [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": [{"type": "text", "text": "Yes."}]},
    ],
    "text": {"format": {"type": "json_schema", "name": "sum", "schema": {"type": "object"}, "strict": True}},
    "max_output_tokens": 50,
    "temperature": 0.5,
    "top_p": 0.9,
    "truncation": "disabled",
}


def run_through_responses(client: openai.OpenAI) -> None:
    """Three turns; the agent sends all items again, also the thoughts."""
    items: list[Any] = [{"role": "user", "content": "1 + 2"}]
    for _ in range(3):
        reply = client.responses.create(model="m", instructions="Add.", input=items, tools=[FLAT_ADD])
        Response.model_validate(reply.to_dict(), strict=False)
        assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
            for item in reply.output
            if item.type == "function_call"
        ]


def run_through_chat(client: openai.OpenAI) -> None:
    """The same three turns."""
    messages: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2"}]
    for _ in range(3):
        reply = client.chat.completions.create(model="m", messages=messages, tools=[ADD])
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})


def only_path(graph: TrajectoryGraph) -> list[int]:
    (leaf,) = graph.leaves
    return graph.token_ids(leaf)


def test_a_conversation_is_one_path_and_equals_that_of_the_chat_dialect(
    gateway: Gateway, generate: RecordingGenerateFn
) -> None:
    paths = []
    for run in (run_through_responses, run_through_chat):
        info, key = gateway.create_session(sampling_params=THOUGHT_TEXT_AND_TWO_CALLS)
        generate.prompts.clear()
        run(openai_client(gateway, key))
        graph = graph_of(gateway, info.id)
        sampled = [node for node in graph.nodes if node.sampled]
        assert len(sampled) == 3
        assert [graph.token_ids(node.parent) for node in sampled if node.parent is not None] == generate.prompts
        paths.append(only_path(graph))
    assert paths[0] == paths[1]


def test_both_dialects_continue_the_same_conversation(gateway: Gateway) -> None:
    info, key = gateway.create_session(sampling_params=FORCED_CALL)
    client = openai_client(gateway, key)
    first = client.responses.create(model="m", instructions="Add.", input="1 + 2", tools=[FLAT_ADD])
    (call,) = first.output
    assert call.type == "function_call"
    as_message: Any = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": ""}}
    as_message["function"]["arguments"] = json.dumps(json.loads(call.arguments), indent=1)
    client.chat.completions.create(
        model="m",
        messages=[
            {"role": "developer", "content": "Add."},
            {"role": "user", "content": "1 + 2"},
            {"role": "assistant", "tool_calls": [as_message]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "3"},
        ],
        tools=[ADD],
    )
    graph = graph_of(gateway, info.id)
    assert [node.sampled for node in graph.path(graph.leaves[0])] == [False, True, False, True]
    only_path(graph)


def valid_events(stream: openai.Stream[Any]) -> Iterator[Any]:
    """The events, each of which has exactly the type of the SDK, and the number after that of the event before."""
    for number, event in enumerate(stream):
        assert event.sequence_number == number
        yield EVENT.validate_python(event.to_dict())


def test_a_stream_has_the_events_of_each_item_in_order(gateway: Gateway) -> None:
    _, key = gateway.create_session(sampling_params=THOUGHT_TEXT_AND_TWO_CALLS)
    client = openai_client(gateway, key)
    stream = client.responses.create(model="m", input="1 + 2", tools=[FLAT_ADD], stream=True)
    events = list(valid_events(stream))
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    calls = ["output_item.added", *call, "output_item.done"]
    items = [name.format("reasoning_text") for name in text] + [name.format("output_text") for name in text] + calls * 2
    kinds = ["created", "in_progress", *items, "completed"]
    assert [event.type for event in events] == [f"response.{kind}" for kind in kinds]
    response = events[-1].response
    assert [event.item for event in events if event.type == "response.output_item.done"] == response.output
    assert {event.response.id for event in (events[0], events[1])} == {response.id}
    assert response.output_text == "Sure."
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_the_stream_helper_of_the_sdk_continues_a_conversation(gateway: Gateway) -> None:
    info, key = gateway.create_session(sampling_params=THOUGHT_TEXT_AND_TWO_CALLS)
    client = openai_client(gateway, key)
    items: list[Any] = [{"role": "user", "content": "1 + 2"}]
    for _ in range(2):
        with client.responses.stream(model="m", input=items, tools=[FLAT_ADD]) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds.count("response.function_call_arguments.done") == 2
        # Agents drop thoughts that they cannot read.
        items += [item.to_dict() for item in final.output if item.type != "reasoning"]
        calls = [item for item in final.output if item.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls]
    assert [call.arguments for call in calls] == ['{"a":1,"b":2}'] * 2
    only_path(graph_of(gateway, info.id))


def test_a_turn_that_is_cut_off_is_incomplete(gateway: Gateway) -> None:
    info, key = gateway.create_session(sampling_params={"ignore_eos": True})
    client = openai_client(gateway, key)
    reply = client.responses.create(model="m", input="a", max_output_tokens=4, temperature=0.5)
    Response.model_validate(reply.to_dict())
    assert (reply.status, reply.max_output_tokens, reply.temperature) == ("incomplete", 4, 0.5)
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage is not None
    assert reply.usage.output_tokens == 4
    items: list[Any] = [{"role": "user", "content": "a"}, *(item.to_dict() for item in reply.output)]
    items.append({"role": "user", "content": "b"})
    stream = client.responses.create(model="m", input=items, max_output_tokens=4, stream=True)
    assert [event.type for event in valid_events(stream)][-1] == "response.incomplete"
    only_path(graph_of(gateway, info.id))


def test_structured_output(gateway: Gateway) -> None:
    class Answer(pydantic.BaseModel):
        is_even: bool

    _, key = gateway.create_session()
    reply = openai_client(gateway, key).responses.parse(
        model="m", input="Is 3 even?", text_format=Answer, max_output_tokens=200
    )
    assert isinstance(reply.output_parsed, Answer)


def test_a_session_that_ends_during_a_stream_is_a_failed_response(gateway: Gateway) -> None:
    info, key = gateway.create_session(sampling_params={"ignore_eos": True})
    stream = openai_client(gateway, key).responses.create(model="m", input="a", stream=True)
    events = []
    for event in valid_events(stream):
        events.append(event)
        if event.type == "response.in_progress":
            threading.Thread(target=gateway.end_session, args=(info.id,)).start()
    kinds = [event.type for event in events]
    assert (kinds[:2], kinds[-1]) == (["response.created", "response.in_progress"], "response.failed")
    assert events[-1].response.id == events[0].response.id
    assert events[-1].response.error.code == "server_error"


def test_errors_within_a_stream_have_the_codes_that_codex_knows() -> None:
    dialect = ResponsesDialect()
    request = dialect.parse({"model": "m", "input": "a"})
    for kind in ErrorKind:
        stream = dialect.open_stream(request, "1")
        event: Any = stream.fail(GatewayError(kind, "no", num_tokens=9, max_tokens=5)).data
        if kind is ErrorKind.CONTEXT_OVERFLOW:  # Codex shortens its conversation; the SDK's type lacks the code
            assert event["response"]["error"]["code"] == "context_length_exceeded"
            event["response"]["error"]["code"] = "server_error"
        EVENT.validate_python(event)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("prompt", {"id": "pmpt_1"}),
        ("background", True),
        ("truncation", "auto"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "name": "add"}),
        ("max_output_tokens", 0),
        ("temperature", "hot"),
        ("stream", "no"),
        ("text", {"format": {"type": "grammar"}}),
        ("tools", [{"type": "function", "function": {"name": "add"}}]),
        ("input", []),
        ("input", [{"type": "item_reference", "id": "msg_1"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": 5}]}]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(gateway: Gateway, name: str, value: Any) -> None:
    _, key = gateway.create_session()
    body = {"model": "m", "input": "a", name: value}
    reply = httpx.post(f"{gateway.openai_url}/responses", json=body, headers={"Authorization": f"Bearer {key}"})
    assert reply.status_code == 400
    assert name in reply.json()["error"]["message"]


def test_a_request_of_codex() -> None:
    request = ResponsesDialect().parse(CODEX_BODY)
    assert [tool["function"]["name"] for tool in request.tools] == ["exec_command"], "the others are left out"
    roles = [message["role"] for message in request.messages]
    assert roles == ["system", "user", "user", "assistant", "tool", "tool", "assistant", "tool"]
    turn, image, patch = request.messages[3], request.messages[5], request.messages[6]
    assert turn["content"] == "Sure."
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["exec_command", "view_image"]
    assert image["content"] == [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]
    assert patch["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": {"input": "***"}}


def test_conversations_are_those_of_the_chat_dialect() -> None:
    chat = ChatDialect().parse({
        "model": "m",
        "messages": [
            {"role": "system", "content": "Add."},
            {"role": "user", "content": "1 + 2"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": [{"type": "text", "text": "Yes."}]},
        ],
        "tools": [ADD],
        "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "object"}}},
    })  # fmt: skip
    request = ResponsesDialect().parse({**SDK_BODY, "tools": [FLAT_ADD]})
    assert (request.messages, request.tools) == (chat.messages, chat.tools)
    assert request.sampling_params["json_schema"] == chat.sampling_params["json_schema"]


def test_a_thought_is_a_part_of_its_turn() -> None:
    message = {"role": "assistant", "content": "a"}
    call = {"type": "function_call", "name": "add", "call_id": "c", "arguments": "{}"}
    request = ResponsesDialect().parse({"input": [message, {"type": "reasoning", "id": "r", "summary": []}, call]})
    assert [(item["content"], len(item["tool_calls"])) for item in request.messages] == [("a", 1)]


def test_a_sign_of_life_is_an_event() -> None:
    """Codex ends a stream that has no event for five minutes. Comments do not count."""
    dialect = ResponsesDialect()
    stream = dialect.open_stream(dialect.parse({"model": "m", "input": "a"}), "1")
    assert len(list(stream.begin(3))) == 2
    event, data = stream.keep_alive().decode().strip().splitlines()
    assert event == "event: keepalive"
    assert json.loads(data.removeprefix("data: ")) == {"type": "keepalive", "sequence_number": 1}


@given(mutated_bodies((CODEX_BODY, SDK_BODY)))
def test_malformed_bodies_are_refused(body: dict[str, Any]) -> None:
    with contextlib.suppress(GatewayError):
        assert ResponsesDialect().parse(body).messages
