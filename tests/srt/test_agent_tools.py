"""Tools: schemas, failures, and parsing of tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_helpers import (
    add,
    block_forever,
    exit_process,
    raise_runtime_error,
    raise_stop_iteration,
    return_long_text,
    wait_a_minute,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from verl_server.agent import FunctionTool, ToolCall, ToolRegistry, ToolResult, parse_hermes_tool_calls
from verl_server.errors import BadInputError
from verl_server.trajectory import ChatRenderer


@pytest.mark.parametrize(
    ("call", "error_type", "expected"),
    [
        (
            ToolCall("unknown", {}),
            "unknown_tool",
            "available tools: add, block_forever, exit_process",
        ),
        (ToolCall("add", {"a": "x"}), "bad_arguments", "wrong arguments: a:"),
        (ToolCall("add", {"a": 1, "c": 2}), "bad_arguments", "c:"),
        (ToolCall("add", {}), "bad_arguments", "a: Field required"),
        (ToolCall("wait_a_minute", {}), "timeout", "no result within 0.2 s"),
        (ToolCall("block_forever", {}), "timeout", "no result within 0.2 s"),
        (ToolCall("raise_runtime_error", {}), "raised", "RuntimeError: no"),
        (ToolCall("exit_process", {}), "raised", "SystemExit: 3"),
        (ToolCall("raise_stop_iteration", {}), "raised", "StopIteration"),
    ],
)
def test_failing_tools_return_errors_as_results(call: ToolCall, error_type: str, expected: str) -> None:
    slow = (FunctionTool(function, timeout_s=0.2) for function in (wait_a_minute, block_forever))
    tools = ToolRegistry([add, *slow, raise_runtime_error, exit_process, raise_stop_iteration, return_long_text])
    result = asyncio.run(tools.call(call))
    assert result.error_type == error_type
    assert expected in result.content


def test_tools_return_results_and_schemas(tiny: Callable[..., Path]) -> None:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    tools = ToolRegistry([add, return_long_text])
    assert asyncio.run(tools.call(ToolCall("add", {"a": 2}))) == ToolResult("add", "3")
    schema = tools.schemas[0]["function"]
    assert (schema["name"], schema["description"]) == ("add", "The sum of two numbers.")
    assert schema["parameters"]["required"] == ["a"]
    text = asyncio.run(tools.call(ToolCall("return_long_text", {}))).content
    assert renderer.truncate(text, 50) == "x" * 50 + " [cut]"
    image = {"type": "image", "image": "https://example.org/a.png"}
    parts = [{"type": "text", "text": "y" * 20}, image, {"type": "text", "text": text}, {"type": "text", "text": "z"}]
    assert renderer.truncate_content(parts, 50) == [
        {"type": "text", "text": "y" * 20}, image, {"type": "text", "text": "x" * 30 + " [cut]"},
        {"type": "text", "text": " [cut]"},
    ]  # fmt: skip
    assert renderer.truncate_content(parts[:2], 20) == parts[:2]
    assert renderer.truncate_content("short", 50) == "short"
    with pytest.raises(BadInputError, match="two tools"):
        ToolRegistry([add, add])


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text().map(lambda text: f"<tool_call>{text}</tool_call>") | st.just("<tool_call>{}</tool_call>"))
def test_any_text_can_be_parsed_for_tool_calls(text: str) -> None:
    for call in parse_hermes_tool_calls(text):
        result = asyncio.run(ToolRegistry([add]).call(call)) if isinstance(call, ToolCall) else call
        assert isinstance(result.content, str)
