"""Parsing of tool calls from the turns of a policy.

A call that cannot be parsed becomes a `ToolResult` with the error type `malformed`. It tells the policy what is wrong.
"""

from __future__ import annotations

import orjson

from verl_server.agent.tools import ToolCall, ToolResult
from verl_server.trajectory.rendering import ParsedToolCall


def parse_hermes_tool_calls(text: str) -> list[ToolCall | ToolResult]:
    """Tool calls in the format of Hermes' and Qwen's chat templates.

    The format is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A call that cannot be parsed is a
    `ToolResult` with the error type `malformed`.
    """
    return [parse_json_tool_call(part.partition("</tool_call>")[0]) for part in text.split("<tool_call>")[1:]]


def parse_json_tool_call(text: str) -> ToolCall | ToolResult:
    """One tool call of the form `{"name": ..., "arguments": {...}}`."""
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return ToolResult("", f"Error: this tool call is not valid JSON: {error}", "malformed")
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolResult("", 'Error: a tool call must be {"name": "...", "arguments": {...}}', "malformed")
    return ToolCall(name, arguments)


def as_tool_call(call: ParsedToolCall) -> ToolCall | ToolResult:
    """Convert a tool call that a renderer has parsed."""
    if call.parse_error is None and call.name is not None and call.arguments is not None:
        return ToolCall(call.name, call.arguments)
    return ToolResult(call.name or "", f"Error: this tool call cannot be parsed: {call.parse_error}", "malformed")
