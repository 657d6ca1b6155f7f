"""Parsing of tool calls from the turns of a policy.

A call that cannot be parsed becomes a `ToolResult` with the error type `malformed`. It tells the policy what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from verl_server.agent.tools.tool import ToolCall, ToolResult
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.messages import ParsedToolCall

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
"""Marks of a call in the format of Hermes."""
THOUGHT_START, THOUGHT_END = "<think>", "</think>"
MARK = re.compile("<tool_call>|</?think>")
SPACED_CALL_END = re.compile(r"\s*</tool_call>")
FUNCTION = re.compile(r"\s*<function=(?:(?!<tool_call>).)*?</function>(?=\s*</tool_call>)", re.DOTALL)
"""A call in the format of Qwen3.5, whose parameters may contain the marks of thoughts."""
END_OF_BAD_CALL = re.compile("</tool_call>|</think>")
"""A call that is no JSON ends here. In a thought, the policy may only speak of the mark."""
SPACE = re.compile(r"\s*")
DECODER = json.JSONDecoder()
MAX_START_TOKENS = 32
"""Number of tokens at the end of a prompt in which the beginning of a thought is looked for."""
MAX_SCANNED_CHARACTERS = 16_384
"""Characters after which the parsed beginning of a text is removed: errors of JSON count the lines before them."""


@dataclass(frozen=True)
class CallSpan:
    """The place of a call in a text, with its marks."""

    start: int
    end: int


def parse_hermes_tool_calls(text: str, *, is_open: bool | None = None) -> list[ToolCall | ToolResult]:
    """Tool calls in the format of Hermes' and Qwen's chat templates.

    The format is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. A call that cannot be parsed is a
    `ToolResult` with the error type `malformed`. Calls inside of a thought (`<think>...</think>`) do not count.
    `is_open`: whether the prompt has opened a thought, which the text continues (`Turn.begins_in_thought`). None: it is
    not known, and a `</think>` without a `<think>` before it is the end of such a thought.
    """
    spans, _ = find_calls(text, is_open=is_open)
    return [
        parse_json_tool_call(text[span.start + len(CALL_START) : span.end].removesuffix(CALL_END)) for span in spans
    ]


def find_calls(text: str, *, is_open: bool | None) -> tuple[list[CallSpan], int | None]:
    """The calls outside of thoughts, and the place of the first `</think>` outside of calls. None without one.

    `is_open`: as in `parse_hermes_tool_calls`. Calls in an open thought that does not end count: they have ended it.
    """
    spans, first_end, is_thought = list[CallSpan](), None, False
    for mark, start, end in _find_marks(text):
        if mark == THOUGHT_END:
            if (is_open and first_end is None) or (is_open is None and not is_thought):
                spans = []  # they are inside of the thought that the prompt has opened
            first_end = start if first_end is None else first_end
        elif mark == CALL_START and not is_thought:
            spans.append(CallSpan(start, end))
        is_thought = mark == THOUGHT_START or (is_thought and mark == CALL_START)
    return spans, first_end


def opens_thought(renderer: ChatRenderer, preceding_ids: Sequence[int]) -> bool:
    """Whether the prompt ends within a thought. `preceding_ids`: last token ids of the prompt."""
    return renderer.decode_all(preceding_ids[-MAX_START_TOKENS:]).rstrip().endswith(THOUGHT_START)


def closes_thought(renderer: ChatRenderer, preceding_ids: Sequence[int]) -> bool:
    """Whether the prompt ends with a whole thought, as with `enable_thinking=False`: the policy writes no other."""
    return renderer.decode_all(preceding_ids[-MAX_START_TOKENS:]).rstrip().endswith(THOUGHT_END)


def _find_marks(text: str) -> Iterator[tuple[str, int, int]]:
    """The marks, their places, and their ends. The end of `<tool_call>` is the end of the call."""
    position = num_removed = 0
    while (mark := MARK.search(text, position)) is not None:
        start, position = num_removed + mark.start(), mark.end()
        if mark[0] == CALL_START:
            if position > MAX_SCANNED_CHARACTERS:
                text, position, num_removed = text[position:], 0, num_removed + position
            position = _end_of_call(text, position)
            if (call_end := SPACED_CALL_END.match(text, position)) is not None:
                position = call_end.end()
        yield mark[0], start, num_removed + position


def _end_of_call(text: str, start: int) -> int:
    """The end of the call at `start`: of its JSON value, whose strings may contain marks, or of text without JSON."""
    try:
        end = DECODER.raw_decode(text, SPACE.match(text, start).end())[1]  # type: ignore[union-attr]
        if text.startswith((CALL_END, CALL_START), SPACE.match(text, end).end()):  # type: ignore[union-attr]
            return end
    except (ValueError, RecursionError):
        pass
    if (function := FUNCTION.match(text, start)) is not None:
        return function.end()
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
