"""The conversation in a request to OpenAI's `/v1/responses`: items of several types become chat messages.

The reply of a turn has several items: a thought, a message, and one `function_call` for each call. An agent sends them
again one after the other. `normalize_messages` joins them to one assistant message, as the turn was generated.
"""

from __future__ import annotations

from typing import Any

import orjson

from verl_server.gateway.conversation import AssistantTurn, as_template_call
from verl_server.gateway.dialects.content import parse_arguments, read_content, tool_schema
from verl_server.gateway.dialects.dialect import IssuedTurns
from verl_server.gateway.dialects.fields import bad_request, find_last, join_texts, read_objects, read_text
from verl_server.gateway.dialects.known_items import derive
from verl_server.gateway.dialects.responses_stream import output_items
from verl_server.gateway.errors import GatewayError
from verl_server.trajectory.rendering.messages import Message
from verl_server.types import Json

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles of chat messages by the roles of the API."""
CALLS = ("function_call", "custom_tool_call")
CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def _parse_item(item: Json) -> list[Json]:
    kind = item.get("type") or ("message" if "role" in item else None)
    if not isinstance(kind, str):
        raise bad_request("an item needs a 'type'")
    if kind == "message":
        role = ROLES.get(read_text(item, "role"))
        if role is None:
            raise bad_request(f"'role' must be one of {', '.join(ROLES)}")
        return [{"role": role, **read_content(item.get("content"), role)}]
    if kind in CALLS:
        is_custom = kind == "custom_tool_call"
        arguments = {"input": item.get("input")} if is_custom else parse_arguments(item.get("arguments"))
        call = as_template_call(read_text(item, "call_id"), read_text(item, "name"), arguments)
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind in CALL_OUTPUTS:
        content = read_content(item.get("output"), "tool", "output")
        return [{"role": "tool", **content, "tool_call_id": read_text(item, "call_id")}]
    if kind == "reasoning":
        return []
    return [{"role": "user", **read_content([item], "user")}]  # such as a web search, or a type that is not known


def resolve_ids(body: Json, issued: IssuedTurns) -> Json:
    """A body with the items of earlier turns in place of `previous_response_id` and of items that only name an item.

    Raises GatewayError for an id that the gateway has not sent in this session.
    """
    previous, items = body.get("previous_response_id"), body.get("input")
    if isinstance(items, list):
        items = [_resolve_item(item, issued) if _is_reference(item) else item for item in items]
    if previous is None:
        return {**body, "input": items}
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages = issued.conversation_to(_find_turn(previous, issued))
    if body.get("instructions") and messages[0]["role"] == "system":
        del messages[0]
    earlier = [item for message in messages for item in _as_items(message)]
    return {**body, "input": [*earlier, *items] if isinstance(items, list) else items}


def _is_reference(item: Any) -> bool:
    """Whether an item only names an item. OpenAI's clients may leave out the type."""
    return isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})


def _find_turn(issued_id: Any, issued: IssuedTurns) -> AssistantTurn:
    turn = issued.find_turn(issued_id.partition("_")[2]) if isinstance(issued_id, str) else None
    if turn is None:
        raise bad_request(
            f"'previous_response_id' or an 'item_reference' has the id {str(issued_id)[:80]!r}, which the gateway has "
            "not sent in this session; send the whole conversation in 'input'"
        )
    return turn


def _resolve_item(reference: Json, issued: IssuedTurns) -> Json:
    turn, item_id = _find_turn(reference.get("id"), issued), str(reference.get("id"))
    items = output_items(turn, item_id.partition("_")[2])
    return next((item for item in items if item["id"] == item_id), {"type": "reasoning", "id": item_id})


def _as_items(message: Message) -> list[Json]:
    """The items of a chat message."""
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()
    ]
    for call in calls:
        if not isinstance(call["arguments"], str):
            call["arguments"] = orjson.dumps(call["arguments"]).decode()
    return [{"type": "message", "role": message["role"], "content": message["content"]}, *calls]


def parse_conversation(body: Json) -> list[Json]:
    """The chat messages of `instructions` and `input`. Raises GatewayError."""
    instructions = read_text(body, "instructions", default="")
    system = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(body.get("input"), str):
        return [*system, {"role": "user", "content": body["input"]}]
    if not isinstance(body.get("input"), list):
        raise bad_request("'input' must be a string or a list of items")
    messages = list[Json]()
    for index, item in enumerate(read_objects(body, "input", is_needed=True)):
        try:
            messages += derive(_parse_item, item)
        except GatewayError as error:
            raise bad_request(f"'input[{index}]': {error.message}") from None
    if not messages:
        raise bad_request("'input' must have a message")
    return [*system, *messages]


def last_thought(body: Json) -> str:
    """The thought of the last turn in `input`, if the agent repeats it, or that of an earlier turn."""
    if isinstance(body["input"], str):
        return ""
    return join_texts(find_last(body["input"], "type", "reasoning").get("content"), "reasoning_text", "text")


def parse_tool(tool: Json) -> Json | None:
    """The schema of a tool of the type `function`. None for other types, which Codex sends with every request."""
    if tool.get("type") not in (None, "function"):
        return None
    if "type" not in tool or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise bad_request(
            "'tools' must have a 'name': a tool is "
            '{"type": "function", "name": ..., "description": ..., "parameters": {...}}'
        )
    return tool_schema(tool["name"], tool.get("description"), tool.get("parameters"))
