"""A tool for verl's tool agent loop, and a format of its calls that a random model writes, too. See docs/verl.md.

`multi_turn.function_tool_path` names this file, and `multi_turn.format=capitals` the format.
"""

from __future__ import annotations

import json
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


@function_tool  # type: ignore[untyped-decorator]
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)


@ToolParser.register("capitals")
class CapitalsParser(ToolParser):  # type: ignore[misc]
    """An answer ends at the first capital letter. It calls `add` with its numbers of letters and of digits."""

    @property
    def stop_token_ids(self) -> list[int]:
        return [self.tokenizer.convert_tokens_to_ids(letter) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(responses_ids)
        if not text[-1:].isupper():
            return text, []
        arguments = {"a": sum(map(str.isalpha, text)), "b": sum(map(str.isdigit, text))}
        return text, [FunctionCall(name="add", arguments=json.dumps(arguments))]
