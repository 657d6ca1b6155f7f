"""Chat messages of recorded nodes in one form, from which both formats are made. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.errors import BadInputError
from verl_server.trajectory.nodes import Node
from verl_server.trajectory.rendering.messages import ROLES, Message
from verl_server.types import Json
from verl_server.validation import require_list

APPENDED_TEXT = "appended_text"
"""Key of a node's message whose tokens an agent loop appended to a turn (`Episode.append_text`)."""


def node_messages(node: Node) -> list[Message]:
    """The chat messages of a node, at least one.

    A turn has one message. Text that was appended to a turn is a message of the assistant. A node without chat messages
    gets an empty message.
    """
    message = node.message or {}
    messages = message.get("messages")
    if not node.sampled and isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return messages
    if node.sampled and _is_message(message) and message["role"] == "assistant":
        return [message]
    role = "assistant" if node.sampled or APPENDED_TEXT in message else "user"
    return [{"role": role, "content": str(message.get(APPENDED_TEXT, ""))}]


def derive_node_message(sampled: bool, messages: Sequence[Message]) -> Json:
    """The message that the recorder writes for a node with these chat messages."""
    return dict(messages[0]) if sampled else {"messages": [dict(message) for message in messages]}


def tool_calls(message: Message) -> list[Json]:
    """The tool calls of a message as `id`, `name` and `arguments` (JSON text). Calls of another form are left out."""
    calls = []
    entries = message.get("tool_calls")
    for entry in entries if isinstance(entries, list) else ():
        function = entry.get("function") if isinstance(entry, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            arguments = function.get("arguments") or {}
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append({"id": text_of(entry.get("id")), "name": function["name"], "arguments": text})
    return calls


def as_tool_call(call_id: str, name: str, arguments: str) -> Json:
    """A tool call as chat templates take it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def require_tool_schemas(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise BadInputError unless each tool is a schema as OpenAI's API takes it."""
    require_list("tools", tools, "pass ToolRegistry.schemas")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadInputError(
                'each of the tools must be a schema such as {"type": "function", "function": {"name": "add", ...}}, '
                f"got {tool!r:.80}; pass ToolRegistry.schemas"
            )


def text_of(value: Any) -> str:
    """The text of a message's content: the text itself, or the texts of its parts, one per line."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return value if isinstance(value, str) else "" if value is None else str(value)


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and message["role"] in ROLES
