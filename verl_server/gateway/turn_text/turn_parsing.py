"""Splits the tokens of a turn into thoughts, text and tool calls."""

from __future__ import annotations

import contextlib
import hashlib
import string
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from verl_server.agent.tools.parsing import find_calls, opens_thought, parse_hermes_tool_calls
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

ID_CHARACTERS = string.ascii_letters + string.digits


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
    *,
    stop_sequence: str | None = None,
    allows_calls: bool = True,
) -> TurnParts:
    """The parts of a turn. `preceding_ids`: token ids before the turn. `turn_id`: what the ids of calls depend on.
    `stop_sequence`: the stop sequence that ended the turn, which belongs to no part. `allows_calls`: whether the
    request allows calls. Otherwise a call is text.

    The generic renderer, and the families of models that are split by their text, have thoughts between `<think>` and
    `</think>` at the beginning of the turn. The prompt may have opened the thought. The generic renderer reads tool
    calls in the format of Hermes. The renderer of a family parses the tool calls of the family, and the whole turn if
    the family is not split by its text. A call that cannot be parsed stays in the text. The parts of the text before,
    between and after the calls are joined with a line break.
    """
    parsed = renderer.parse_turn(token_ids, preceding_ids, tools)
    raw = until_stop(decode_turn(renderer, token_ids), stop_sequence)
    is_open = opens_thought(renderer, preceding_ids)
    reasoning, text = split_thought(raw, is_open=is_open)
    calls = [] if parsed is None else parsed.tool_calls
    uses = as_tool_uses(calls, turn_id) if allows_calls else []
    if allows_calls and reads_hermes_calls(
        renderer
    ):  # a family looks for the tokens of the marks only, also in the arguments of a call
        found = _parse_calls(raw, is_open=is_open)
        if len(uses) < max(len(calls), len(found)):
            calls, uses = found, as_tool_uses(found, turn_id)
    if parsed is not None and not is_split_by_text(renderer):
        if len(uses) < len(calls) or (not uses and CALL_START in text):
            return TurnParts(text, reasoning, ())
        return TurnParts(until_stop(parsed.text, stop_sequence), until_stop(parsed.reasoning, stop_sequence), uses)
    uses = [] if len(uses) < len(calls) else uses
    if uses and CALL_START in text:
        text = "\n".join(filter(None, _outside_of_calls(text)))
    elif uses:  # the calls ended the thought
        reasoning, *rest = _outside_of_calls(reasoning)
        reasoning, text = reasoning.rstrip(), "\n".join(filter(None, (*rest, text)))
    return TurnParts(text.strip() if is_text_stripped(renderer) else text, reasoning, uses)


def is_split_by_text(renderer: ChatRenderer) -> bool:
    """Whether thoughts and tool calls of a turn are where their marks are in the text."""
    return not isinstance(renderer, FamilyRenderer) or renderer.family in SPLIT_FAMILIES


def reads_hermes_calls(renderer: ChatRenderer) -> bool:
    """Whether a turn may have tool calls in the format of Hermes."""
    return not isinstance(renderer, FamilyRenderer) or renderer.family in HERMES_FAMILIES


def writes_thoughts(renderer: ChatRenderer) -> bool:
    """Whether the model family, or the model for which the chat template was written, may begin turns with thoughts."""
    if isinstance(renderer, FamilyRenderer):
        return renderer.family in SPLIT_FAMILIES
    return THOUGHT_START in str(renderer.tokenizer.chat_template)


def is_text_stripped(renderer: ChatRenderer) -> bool:
    """Whether the text of a turn has no white space at its ends."""
    return isinstance(renderer, FamilyRenderer)


def decode_turn(renderer: ChatRenderer, token_ids: Sequence[int]) -> str:
    """The text of a turn, with special tokens except its end marker."""
    return renderer.decode_raw(token_ids, renderer.decode(token_ids))


def split_thought(text: str, *, is_open: bool) -> tuple[str, str]:
    """The thought at the beginning of a turn, and the text after it. `is_open`: the prompt has opened the thought.

    A `</think>` in the arguments of a tool call ends no thought.
    """
    first = text.lstrip()
    if not is_open and not first.startswith(THOUGHT_START):
        return "", text
    first = first.removeprefix(THOUGHT_START)
    end = find_calls(first, is_open=True)[1]
    if end is None:
        return first.strip(), ""
    return first[:end].strip(), first[end + len(THOUGHT_END) :].lstrip("\n")


def until_stop(text: str, stop_sequence: str | None) -> str:
    """The text before the stop sequence that ended the turn. None: another reason ended the turn."""
    return text if stop_sequence is None else text.partition(stop_sequence)[0]


def _outside_of_calls(text: str) -> list[str]:
    """The parts of a text before its first call, between its calls, and after its last call."""
    spans, _ = find_calls(text, is_open=False)
    if not spans:  # the renderer of a family has found calls where there are no marks of whole calls
        return [text.partition(CALL_START)[0].rstrip("\n")]
    ends = [*(span.start for span in spans[1:]), len(text)]
    parts = [text[span.end : end].strip() for span, end in zip(spans, ends, strict=True)]
    return [text[: spans[0].start].rstrip("\n"), *parts]


def _parse_calls(text: str, *, is_open: bool) -> list[ParsedToolCall]:
    found = parse_hermes_tool_calls(text, is_open=is_open) if CALL_START in text else []
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
                    uses.append(ToolUse(call_id(turn_id, number), call.name, arguments.decode(), call.id))
    return uses


def call_id(turn_id: str, number: int) -> str:
    """The id of a call: the same each time that the turn is parsed, also by another process.

    Nine letters and digits: Mistral's API takes no other ids, and clients that shorten or clean ids leave them alone.
    """
    value = int.from_bytes(hashlib.blake2b(f"{turn_id}:{number}".encode(), digest_size=8).digest())
    return "".join(ID_CHARACTERS[value // len(ID_CHARACTERS) ** place % len(ID_CHARACTERS)] for place in range(9))
