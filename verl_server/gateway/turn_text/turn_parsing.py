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
from verl_server.trajectory.rendering.families import FamilyRenderer
from verl_server.trajectory.rendering.messages import ParsedToolCall
from verl_server.types import Json

THOUGHT_START, THOUGHT_END = "<think>", "</think>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
SPLIT_FAMILIES = frozenset({"qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8", "prime-qwen3"})
"""Families of models whose thoughts and tool calls have these marks."""
HERMES_FAMILIES = frozenset({"qwen3", "qwen3-vl"})
"""Those of them whose calls have the format of Hermes."""
MAX_START_TOKENS = 32
"""Number of tokens at the end of a prompt in which the beginning of a thought is looked for."""


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

    The generic renderer, and the families of models that are split by their text, have thoughts between `<think>` and
    `</think>` at the beginning of the turn. The prompt may have opened the thought. The generic renderer reads tool
    calls in the format of Hermes. The renderer of a family parses the tool calls of the family, and the whole turn if
    the family is not split by its text. A call that cannot be parsed stays in the text.
    """
    parsed = renderer.parse_turn(token_ids, preceding_ids, tools)
    raw = decode_turn(renderer, token_ids)
    reasoning, text = split_thought(raw, is_open=opens_thought(renderer, preceding_ids))
    calls = [] if parsed is None else parsed.tool_calls
    if not calls and reads_hermes_calls(renderer):  # a family looks for the tokens of the marks only
        calls = _parse_calls(raw)
    uses = as_tool_uses(calls, turn_id)
    if parsed is not None and not is_split_by_text(renderer):
        if len(uses) < len(calls) or (not uses and CALL_START in text):
            return TurnParts(text, reasoning, ())
        return TurnParts(parsed.text, parsed.reasoning, uses)
    uses = [] if len(uses) < len(calls) else uses
    before, found, rest = text.partition(CALL_START)
    if uses and found:
        text = "\n".join(filter(None, (before.rstrip("\n"), rest.rpartition(CALL_END)[2].strip())))
    elif uses:  # the calls ended the thought
        reasoning = reasoning.partition(CALL_START)[0].rstrip()
    return TurnParts(text.strip() if is_text_stripped(renderer) else text, reasoning, uses)


def is_split_by_text(renderer: ChatRenderer) -> bool:
    """Whether thoughts and tool calls of a turn are where their marks are in the text."""
    return not isinstance(renderer, FamilyRenderer) or renderer.family in SPLIT_FAMILIES


def reads_hermes_calls(renderer: ChatRenderer) -> bool:
    """Whether a turn may have tool calls in the format of Hermes."""
    return not isinstance(renderer, FamilyRenderer) or renderer.family in HERMES_FAMILIES


def is_text_stripped(renderer: ChatRenderer) -> bool:
    """Whether the text of a turn has no white space at its ends."""
    return isinstance(renderer, FamilyRenderer)


def decode_turn(renderer: ChatRenderer, token_ids: Sequence[int]) -> str:
    """The text of a turn, with special tokens except its end marker."""
    return renderer.decode_raw(token_ids, renderer.decode(token_ids))


def opens_thought(renderer: ChatRenderer, preceding_ids: Sequence[int]) -> bool:
    """Whether the prompt ends within a thought. `preceding_ids`: last token ids of the prompt."""
    return renderer.decode_all(preceding_ids[-MAX_START_TOKENS:]).rstrip().endswith(THOUGHT_START)


def split_thought(text: str, *, is_open: bool) -> tuple[str, str]:
    """The thought at the beginning of a turn, and the text after it. `is_open`: the prompt has opened the thought."""
    first = text.lstrip()
    if not is_open and not first.startswith(THOUGHT_START):
        return "", text
    thought, _, after = first.removeprefix(THOUGHT_START).partition(THOUGHT_END)
    return thought.strip(), after.lstrip("\n")


def _parse_calls(text: str) -> list[ParsedToolCall]:
    found = parse_hermes_tool_calls(text) if CALL_START in text else []
    return [
        ParsedToolCall(call.name, dict(call.arguments), None)
        if isinstance(call, ToolCall)
        else ParsedToolCall(None, None, "malformed")
        for call in found
    ]


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
