"""Parsing of tool calls from the turns of a policy.

A call that cannot be parsed becomes a `ToolResult` with the error type `malformed`. It tells the policy what is wrong.
"""

from __future__ import annotations

import json
import re

import orjson

from verl_server.agent.tools.tool import ToolCall, ToolResult
from verl_server.trajectory.rendering.messages import ParsedToolCall

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
"""Marks of a call in the format of Hermes."""
MARK = re.compile("<tool_call>|</?think>")
END_OF_BAD_CALL = re.compile("</tool_call>|</think>")
"""A call that is no JSON ends here. In a thought, the policy may only speak of the mark."""


def parse_hermes_tool_calls(text: str) -> list[ToolCall | ToolResult]:
    """Tool calls in the format of Hermes' and Qwen's chat templates.

    The format is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A call that cannot be parsed is a
    `ToolResult` with the error type `malformed`. Calls inside of a thought (`<think>...</think>`) do not count.
    """
    calls: list[ToolCall | ToolResult] = []
    while (mark := MARK.search(text)) is not None:
        text = text[mark.end() :]
        if mark[0] == "</think>":
            calls = []  # they were inside of a thought that the prompt had opened
        elif mark[0] == "<think>":
            _, _, text = text.partition("</think>")
        else:
            end = _end_of_json(text)
            if end is None or not text[end:].lstrip().startswith((CALL_END, CALL_START)):
                stop = END_OF_BAD_CALL.search(text)
                end = stop.start() if stop is not None else -1
            content, text = (text, "") if end < 0 else (text[:end], text[end:])
            calls.append(parse_json_tool_call(content))
    return calls


def _end_of_json(text: str) -> int | None:
    """The end of the JSON value at the beginning of a text, whose strings may contain marks. None if there is none."""
    start = len(text) - len(text.lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return None


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
