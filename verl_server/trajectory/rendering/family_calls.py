"""Tool calls that the package `renderers` has parsed, and the results of these calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from renderers import ToolCallParseStatus

from verl_server.trajectory.rendering.messages import Message, ParsedToolCall

TOO_DEEP = ParsedToolCall(None, None, "the arguments have too many levels")
"""Stands for the calls of a turn whose arguments have so many levels that Python cannot parse them."""


def as_parsed_tool_call(call: Any) -> ParsedToolCall:
    """Convert a tool call of the package."""
    if call.status is not ToolCallParseStatus.OK:
        return ParsedToolCall(call.name, None, str(call.status.value), call.id)
    if not isinstance(call.arguments, dict):
        return ParsedToolCall(call.name, None, "the arguments are not a JSON object", call.id)
    return ParsedToolCall(call.name, call.arguments, None, call.id)


def with_sampled_calls(messages: Sequence[Message], parse: Callable[[], Sequence[ParsedToolCall]]) -> list[Message]:
    """The messages after a turn. Results that lack the name or the id of their call get those of a call of the turn.

    A result belongs to the first call that no result before it has, and that has its name and its id as far as they are
    known. `parse`: returns the calls of the turn, and is called if a result lacks one of them.
    """
    results = [message for message in messages if message["role"] == "tool"]
    if all(message.get("name") and message.get("tool_call_id") for message in results):
        return list(messages)
    calls = list(parse())
    return [_with_call(message, calls) if message["role"] == "tool" else message for message in messages]


def _with_call(result: Message, calls: list[ParsedToolCall]) -> Message:
    """The result with the name and the id of its call, which is removed from `calls`."""
    name, call_id = result.get("name"), result.get("tool_call_id")
    for index, call in enumerate(calls):
        if (not name or call.name == name) and (not call_id or call.id in (None, call_id)):
            del calls[index]
            return {**result, "name": name or call.name, "tool_call_id": call_id or call.id}
    return result
