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
SPACE = re.compile(r"\s*")
DECODER = json.JSONDecoder()
MAX_SCANNED_CHARACTERS = 16_384
"""Characters after which the parsed beginning of a text is removed: errors of JSON count the lines before them."""


def parse_hermes_tool_calls(text: str) -> list[ToolCall | ToolResult]:
    """Tool calls in the format of Hermes' and Qwen's chat templates.

    The format is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A call that cannot be parsed is a
    `ToolResult` with the error type `malformed`. Calls inside of a thought (`<think>...</think>`) do not count.
    """
    calls: list[ToolCall | ToolResult] = []
    position = 0
    while (mark := MARK.search(text, position)) is not None:
        position = mark.end()
        if mark[0] == "</think>":
            calls = []  # they were inside of a thought that the prompt had opened
        elif mark[0] == "<think>":
            end = text.find("</think>", position)
            position = len(text) if end < 0 else end + len("</think>")
        else:
            if position > MAX_SCANNED_CHARACTERS:
                text, position = text[position:], 0
            end = _end_of_call(text, position)
            calls.append(parse_json_tool_call(text[position:end]))
            position = end
    return calls


def _end_of_call(text: str, start: int) -> int:
    """The end of the call at `start`: of its JSON value, whose strings may contain marks, or of text without JSON."""
    try:
        end = DECODER.raw_decode(text, SPACE.match(text, start).end())[1]  # type: ignore[union-attr]
        if text.startswith((CALL_END, CALL_START), SPACE.match(text, end).end()):  # type: ignore[union-attr]
            return end
    except (ValueError, RecursionError):
        pass
    stop = END_OF_BAD_CALL.search(text, start)
    return len(text) if stop is None else stop.start()


def parse_json_tool_call(text: str) -> ToolCall | ToolResult:
    """One tool call of the form `{"name": ..., "arguments": {...}}`."""
    try:
        call = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return ToolResult("", f"Error: this tool call is not valid JSON: {error}", "malformed")
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if isinstance(name, str) and isinstance(arguments, dict) and not ("parameters" in call and not arguments):
        return ToolCall(name, arguments)
    hint = ""
    if isinstance(name, str) and "parameters" in call:
        hint = '; the key is "arguments", not "parameters"'
    elif isinstance(arguments, str):
        hint = '; the value of "arguments" is an object, not a string'
    return ToolResult("", f'Error: a tool call must be {{"name": "...", "arguments": {{...}}}}{hint}', "malformed")


def as_tool_call(call: ParsedToolCall) -> ToolCall | ToolResult:
    """Convert a tool call that a renderer has parsed."""
    if call.parse_error is None and call.name is not None and call.arguments is not None:
        return ToolCall(call.name, call.arguments)
    return ToolResult(call.name or "", f"Error: this tool call cannot be parsed: {call.parse_error}", "malformed")
