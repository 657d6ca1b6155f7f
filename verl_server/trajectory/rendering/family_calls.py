"""Tool calls that the package `renderers` has parsed."""

from __future__ import annotations

from typing import Any

from renderers import ToolCallParseStatus

from verl_server.trajectory.rendering.messages import ParsedToolCall

TOO_DEEP = ParsedToolCall(None, None, "the arguments have too many levels")
"""Stands for the calls of a turn whose arguments have so many levels that Python cannot parse them."""


def as_parsed_tool_call(call: Any) -> ParsedToolCall:
    """Convert a tool call of the package."""
    if call.status is not ToolCallParseStatus.OK:
        return ParsedToolCall(call.name, None, str(call.status.value))
    if not isinstance(call.arguments, dict):
        return ParsedToolCall(call.name, None, "the arguments are not a JSON object")
    return ParsedToolCall(call.name, call.arguments, None)
