"""A tool for verl's tool agent loop: `multi_turn.function_tool_path` names this file. See docs/verl.md."""

from __future__ import annotations

from verl.tools.function_tool import function_tool


@function_tool  # type: ignore[untyped-decorator]
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)
