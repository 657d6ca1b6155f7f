"""The conversation in a request to OpenAI's `/v1/responses`: items of several types become chat messages.

The reply of a turn has several items: a thought, a message, and one `function_call` for each call. An agent sends them
again one after the other. They become one assistant message, as the turn was generated, so that the turn is recognised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_server.gateway.conversation import as_template_call
from verl_server.gateway.dialects.chat import parse_arguments, parse_content, tool_schema
from verl_server.gateway.dialects.fields import bad_request, find_last, join_texts, read_objects, read_text
from verl_server.gateway.dialects.known_items import derive
from verl_server.gateway.errors import GatewayError
from verl_server.types import Json

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles of chat messages by the roles of the API."""
TEXT_KEYS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Key of the text by the type of a content part."""
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Key of the arguments by the type of a call."""
CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")


@dataclass(frozen=True)
class _Part:
    """What an item adds to the conversation. Requests share it."""

    message: Json | None = None
    """A message of its own."""
    call: Json | None = None
    """A call of the turn that is open."""
    opens_turn: bool = False
    """Whether calls after this item belong to its message."""


class Conversation:
    """Chat messages that are made of items, one item after the other."""

    def __init__(self, instructions: str) -> None:
        self.messages: list[Json] = [{"role": "system", "content": instructions}] if instructions else []
        self._is_turn_open = False
        """Whether the last message is an assistant message to which the next call belongs."""

    def add(self, item: Json) -> None:
        """Add an item. Raises GatewayError."""
        part = derive(_parse_item, item)
        if part.call is not None:
            self._add_call(part.call)
            return
        if part.message is not None:
            self.messages.append(part.message)
        self._is_turn_open = part.opens_turn

    def _add_call(self, call: Json) -> None:
        if not self._is_turn_open:
            self.messages.append({"role": "assistant", "content": ""})
            self._is_turn_open = True
        if "tool_calls" not in self.messages[-1]:  # the message may be shared with other requests, its copy is not
            self.messages[-1] = {**self.messages[-1], "tool_calls": []}
        self.messages[-1]["tool_calls"].append(call)


def _parse_item(item: Json) -> _Part:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        return _parse_message(item)
    if kind == "reasoning":
        return _Part()  # the thought is the first item of a turn
    if isinstance(kind, str) and kind in CALLS:
        text = read_text(item, CALLS[kind], default="")
        arguments = parse_arguments(text) if kind == "function_call" else {"input": text}
        return _Part(call=as_template_call(read_text(item, "call_id"), read_text(item, "name"), arguments))
    if isinstance(kind, str) and kind in CALL_OUTPUTS:
        content = parse_item_content(item.get("output"), "output")
        return _Part({"role": "tool", "content": content, "tool_call_id": read_text(item, "call_id")})
    raise bad_request(f"'type' = {str(kind)[:40]!r} is not supported: the policy cannot be shown such an item")


def _parse_message(item: Json) -> _Part:
    role = ROLES.get(read_text(item, "role"))
    if role is None:
        raise bad_request(f"'role' must be one of {', '.join(ROLES)}")
    message = {"role": role, "content": parse_item_content(item.get("content"), "content")}
    return _Part(message, opens_turn=role == "assistant")


def parse_conversation(body: Json) -> list[Json]:
    """The chat messages of `instructions` and `input`. Raises GatewayError."""
    conversation = Conversation(read_text(body, "instructions", default=""))
    if isinstance(body.get("input"), str):
        return [*conversation.messages, {"role": "user", "content": body["input"]}]
    if not isinstance(body.get("input"), list):
        raise bad_request("'input' must be a string or a list of items")
    num_messages = len(conversation.messages)
    for index, item in enumerate(read_objects(body, "input", is_needed=True)):
        try:
            conversation.add(item)
        except GatewayError as error:
            raise bad_request(f"'input[{index}]': {error.message}") from None
    if len(conversation.messages) == num_messages:
        raise bad_request("'input' must have a message")
    return conversation.messages


def last_thought(body: Json) -> str:
    """The thought of the last turn in `input`, if the agent repeats it, or that of an earlier turn."""
    if isinstance(body["input"], str):
        return ""
    return join_texts(find_last(body["input"], "type", "reasoning").get("content"), "reasoning_text", "text")


def parse_item_content(content: Any, name: str) -> Any:
    """The content of a chat message: a text, or a list of parts if there are images. `name`: for errors."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad_request(f"{name!r} must be a string or a list of content parts")
    return parse_content([_parse_part(part, f"{name}[{index}]") for index, part in enumerate(content)])


def _parse_part(part: Json, name: str) -> Json:
    """A content part of OpenAI's chat dialect."""
    kind = part.get("type")
    if isinstance(kind, str) and kind in TEXT_KEYS:
        text = part.get(TEXT_KEYS[kind])
        if not isinstance(text, str):
            raise bad_request(f"'{name}.{TEXT_KEYS[kind]}' must be a string")
        return {"type": "text", "text": text}
    if kind == "input_image":
        url = part.get("image_url")
        if not isinstance(url, str) or not url.startswith("data:"):
            raise bad_request(f"'{name}.image_url' must be a data URL: the gateway downloads no images")
        return {"type": "image_url", "image_url": {"url": url}}
    raise bad_request(f"'{name}.type' = {str(kind)[:40]!r} is not supported: the policy takes texts and images")


def parse_tools(body: Json) -> list[Json]:
    """The schemas of the tools of type `function`.

    The policy can only call functions with JSON arguments. Tools of other types (`custom`, `web_search`, `namespace`,
    `local_shell`, ...), which Codex sends with every request, are left out.
    """
    tools = list[Json]()
    for index, tool in enumerate(read_objects(body, "tools")):
        if not isinstance(tool.get("type"), str):
            raise bad_request(f"'tools[{index}].type' must be a string")
        if tool["type"] != "function":
            continue
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise bad_request(
                f"'tools[{index}].name' must be a string; a tool is "
                '{"type": "function", "name": ..., "description": ..., "parameters": {...}}'
            )
        tools.append(derive(_parse_function, tool))
    return tools


def _parse_function(tool: Json) -> Json:
    return tool_schema(tool["name"], tool.get("description"), tool.get("parameters"))
