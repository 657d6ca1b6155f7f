"""Splits the tokens of a turn into thoughts, text and tool calls."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from verl_server.agent.tools.parsing import parse_hermes_tool_calls
from verl_server.agent.tools.tool import ToolCall
from verl_server.gateway.conversation import ToolUse
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.messages import ParsedToolCall, ParsedTurn
from verl_server.types import Json

THOUGHT_START, THOUGHT_END = "<think>", "</think>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class TurnParts:
    """The parts of a turn."""

    text: str
    reasoning: str
    tool_calls: Sequence[ToolUse]


def split_turn(
    renderer: ChatRenderer,
    token_ids: Sequence[int],
    preceding_ids: Sequence[int],
    tools: Sequence[Json],
    turn_id: str,
) -> TurnParts:
    """The parts of a turn. `preceding_ids`: token ids before the turn. `turn_id`: what the ids of calls depend on.

    The renderer of the model family parses the turn. The generic renderer reads thoughts between `<think>` and
    `</think>`, and tool calls in the format of Hermes. A call that cannot be parsed stays in the text.
    """
    parsed = renderer.parse_turn(token_ids, preceding_ids, tools)
    raw = renderer.decode_raw(token_ids, renderer.decode(token_ids))
    reasoning, text = split_thought(raw)
    if parsed is None:
        found = parse_hermes_tool_calls(raw) if CALL_START in raw else []
        calls = [ParsedToolCall(call.name, dict(call.arguments), None) for call in found if isinstance(call, ToolCall)]
        before, _, rest = text.partition(CALL_START)
        outside = "\n".join(filter(None, (before.strip("\n"), rest.rpartition(CALL_END)[2].strip())))
        parsed = ParsedTurn(outside if calls else text, reasoning, calls if len(calls) == len(found) else ())
    uses = as_tool_uses(parsed.tool_calls, turn_id)
    if len(uses) < len(parsed.tool_calls) or (not uses and CALL_START in text):
        return TurnParts(text, reasoning, ())
    return TurnParts(parsed.text, parsed.reasoning, uses)


def split_thought(text: str) -> tuple[str, str]:
    """The thought at the beginning of a turn, and the text after it. The prompt may have opened the thought."""
    before, found, after = text.partition(THOUGHT_END)
    if found:
        return before.replace(THOUGHT_START, "", 1).strip(), after.lstrip("\n")
    if text.lstrip().startswith(THOUGHT_START):  # the turn ended within the thought
        return text.lstrip().removeprefix(THOUGHT_START).strip(), ""
    return "", text


def as_tool_uses(calls: Sequence[ParsedToolCall], turn_id: str) -> list[ToolUse]:
    """The well-formed calls, with ids that only this turn gives.

    A call is left out if JSON cannot give its arguments back: they have too many levels, a NaN or a huge integer.
    """
    uses = list[ToolUse]()
    for number, call in enumerate(calls):
        if call.name is not None and call.arguments is not None and call.parse_error is None:
            with contextlib.suppress(TypeError, RecursionError):
                arguments = orjson.dumps(call.arguments)
                if orjson.loads(arguments) == call.arguments:
                    uses.append(ToolUse(call_id(turn_id, number), call.name, arguments.decode()))
    return uses


def call_id(turn_id: str, number: int) -> str:
    """The id of a call: the same each time that the turn is parsed, also by another process."""
    return "call_" + hashlib.blake2b(f"{turn_id}:{number}".encode(), digest_size=12).hexdigest()
