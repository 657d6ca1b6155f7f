"""`check_template` checks a chat template with a fixed set of conversations."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from verl_server.errors import BadInputError, UnsupportedError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.families import FamilyRenderer, get_renderer
from verl_server.trajectory.rendering.foreign_text import texts_of
from verl_server.trajectory.rendering.messages import Message
from verl_server.trajectory.rendering.tokenizer import require_tokenizer
from verl_server.trajectory.template_check.reference import (
    ARGUMENT_CONVERSATION,
    CONVERSATIONS,
    Conversation,
    TemplateReference,
    with_text,
)
from verl_server.types import Json

# -- Comparison -------------------------------------------------------------------------------------
# Compares a prompt that grew by turns with what a template renders for the whole conversation.

SHOWN_CHARACTERS = 40
"""Number of characters of each text in the description of a difference."""

CONTROL_TOKEN_STARTS = ("<", "[")
"""First characters of control tokens."""


class Verdict(enum.Enum):
    """How a prompt that grew by turns compares with the template's rendering of the whole conversation."""

    EQUAL = "equal"
    """Both are the same, with the same token ids."""
    KEPT = "kept"
    """They differ only in earlier tokens, which the prompt keeps: turns of the policy, or the first prompt."""
    REFUSED = "refused"
    """The renderer refuses the conversation."""
    UNVERIFIED = "unverified"
    """The template refuses the whole conversation, which the renderer accepts. There is nothing to compare."""
    DIFFERENT = "different"
    """The first prompt or an appended part differs from what the template writes, or a text in a message became control
    tokens. With the generic renderer this is a defect. With a family, the package `renderers` implements another
    revision of the template."""


@dataclass(frozen=True)
class Finding:
    """A verdict and its reason. The reason is empty for equal prompts."""

    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class TurnText:
    """A turn in a grown prompt, with the parts of the prompt before and after the turn."""

    header: str
    """What the template writes before a turn of the policy. The part before the turn ends with it."""
    text: str
    content: str
    """The text that the turn shows, which is a part of `text`."""
    thought: str
    after: str
    """What the renderer appended after the turn, with the header of the next turn."""


@dataclass(frozen=True)
class GrownPrompt:
    """The text of a prompt that grew by turns."""

    first: str
    """The first prompt, as the template renders it."""
    turns: tuple[TurnText, ...]
    next_header: str
    """What the template writes before the turn that would follow."""
    foreign: tuple[str, ...]
    """Contents of the messages that are not of the policy. No turn may contain them."""

    @property
    def text(self) -> str:
        """The whole prompt."""
        return self.first + "".join(turn.text + turn.after for turn in self.turns)


def compare(grown: GrownPrompt, whole: str) -> Finding:
    """Compare a grown prompt with `whole`, what the template renders for the whole conversation."""
    if grown.text == whole:
        return Finding(Verdict.EQUAL)
    first = grown.first.removesuffix(grown.turns[0].header)
    whole, reason = _restore_first(first, whole, grown)
    if not whole.startswith(first):
        return Finding(Verdict.DIFFERENT, f"first prompt: {describe_difference(first, whole)}")
    reasons, at = [reason], len(first)
    headers = [*(turn.header for turn in grown.turns[1:]), grown.next_header]
    for number, (turn, header) in enumerate(zip(grown.turns, headers, strict=True), 1):
        is_last = turn is grown.turns[-1]
        appended = turn.after if is_last else turn.after.removesuffix(header)
        whole, reason = _remove_moved(number, turn, appended, whole, at)
        found = whole.find(appended, at)
        is_complete = not is_last or found + len(appended) == len(whole)
        if found < 0 or not is_complete or any(text in whole[at:found] for text in grown.foreign):
            return Finding(Verdict.DIFFERENT, f"after turn {number}: {_describe_missing(appended, whole[at:])}")
        reasons.append(reason or _describe_kept(number, turn, whole[at:found]))
        at = found + len(appended)
    return Finding(Verdict.KEPT, next(filter(None, reasons), ""))


def describe_difference(rendered: str, expected: str) -> str:
    """The first place at which what the renderer writes is not what the template writes."""
    return _describe_at(rendered, expected, _common_length(rendered, expected))


def _restore_first(first: str, whole: str, grown: GrownPrompt) -> tuple[str, str]:
    """`whole` with the part of the first prompt that the template removed or moved, and the description of the part.

    Some templates write the tools before the last message of a user, or leave out their own system message.
    """
    start = _common_length(first, whole)
    for end in range(start + 1, len(first)):
        if whole.startswith(first[end:], start):
            part, rest = first[start:end], whole[start:]
            if any(text in part for text in grown.foreign):
                break
            shown = _excerpt(_rotated(first[:start], part), 0)
            if part in rest and any(part in turn.after for turn in grown.turns):
                reason = f"the template moves {shown} of the first prompt, and the prompt has it in both places"
                return whole[:start] + part + rest, reason
            verb = "moves" if part in rest else "removes"
            reason = f"the template {verb} {shown} of the first prompt, which stays as it was"
            return whole[:start] + part + rest.replace(part, "", 1), reason
    return whole, ""


def _remove_moved(number: int, turn: TurnText, appended: str, whole: str, at: int) -> tuple[str, str]:
    """`whole` without the content of a turn, if the template writes it after the results, and the description."""
    length, found = _longest_prefix_in(appended, whole[at:])
    rest = whole[at + found + length :]
    if not turn.content or not rest.startswith(turn.content):
        return whole, ""
    end = rest.find(appended[length:]) if appended[length:] else len(rest)
    reason = f"the template moves the text of turn {number} behind the results, and the prompt keeps it as sampled"
    return (whole[: at + found + length] + rest[end:], reason) if end > 0 else (whole, "")


def _longest_prefix_in(text: str, other: str) -> tuple[int, int]:
    """The length of the longest beginning of `text` that `other` contains, and its offset there."""
    for length in range(len(text), 0, -1):
        if (found := other.find(text[:length])) >= 0:
            return length, found
    return 0, 0


def _describe_kept(number: int, turn: TurnText, written: str) -> str:
    """Why a kept turn differs from what the template writes for it. Empty if it does not differ."""
    sampled = turn.header + turn.text
    if sampled == written:
        return ""
    if turn.thought and turn.thought in sampled and turn.thought not in written:
        return f"the template removes the thought of turn {number}, which the prompt keeps"
    at = _common_length(sampled, written)
    if sampled.endswith(written[at:]):
        removed = _rotated(sampled[:at], sampled[at : len(sampled) - len(written) + at])
        return f"the template removes {_excerpt(removed, 0)} from turn {number}, which the prompt keeps"
    return (
        f"turn {number} is kept as it was sampled: {_excerpt(sampled, at)}; the template writes {_excerpt(written, at)}"
    )


def _describe_missing(appended: str, rest: str) -> str:
    """The first place at which what the renderer has appended is not in `rest`, what the template writes."""
    length, found = _longest_prefix_in(appended, rest)
    return _describe_at(appended, rest[found:], length)


def _describe_at(rendered: str, expected: str, at: int) -> str:
    before = rendered[max(at - SHOWN_CHARACTERS, 0) : at]
    return f"after {before!r} the renderer writes {_excerpt(rendered, at)}, the template {_excerpt(expected, at)}"


def _excerpt(text: str, at: int) -> str:
    return repr(text[at : at + SHOWN_CHARACTERS]) if text[at:] else "nothing"


def _rotated(before: str, removed: str) -> str:
    """The removed text, beginning with a control token if its place is ambiguous: `<a><b>` without `<b>`, or `b><`."""
    for length in range(len(removed)):
        end = removed[len(removed) - length :]
        if before.endswith(end) and (end + removed)[:1] in CONTROL_TOKEN_STARTS:
            return end + removed[: len(removed) - length]
    return removed


def _common_length(one: str, other: str) -> int:
    """Number of characters at the beginning that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


# -- Check ------------------------------------------------------------------------------------------

KNOWN_ARGUMENTS = ("enable_thinking", "thinking")
"""Arguments of released templates that are checked with True and with False, if a template has them."""
MAX_CONTROL_TOKENS = 8
"""Maximum number of control tokens in a text from outside."""


@dataclass(frozen=True)
class CheckedConversation:
    """A kind of conversation, and how its grown prompt compares with the template."""

    name: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class TemplateReport:
    """The result of `check_template`."""

    renderer: str
    """The renderer that `get_renderer` selects: `"generic"`, or `"family NAME"`."""
    refusal: str
    """Why there is no renderer for the template. Empty if there is one."""
    conversations: tuple[CheckedConversation, ...]

    @property
    def is_usable(self) -> bool:
        """Whether there is a renderer, it accepts a conversation of one turn, and no grown prompt is wrong."""
        verdicts = [conversation.verdict for conversation in self.conversations]
        return bool(verdicts) and verdicts[0] is not Verdict.REFUSED and Verdict.DIFFERENT not in verdicts


def check_template(tokenizer: Any, family: str | None = None, **template_arguments: Any) -> TemplateReport:
    """Compare prompts that grow by turns with what the chat template renders for whole conversations.

    Takes the arguments of `get_renderer`. Raises BadInputError for an object that is no tokenizer.
    """
    require_tokenizer(tokenizer)
    try:
        renderer = get_renderer(tokenizer, family, **template_arguments)
    except (BadInputError, UnsupportedError) as error:
        return TemplateReport(f"family {family}" if family else "generic", error.message, ())
    checked = [
        _check(tokenizer, renderer, conversation, template_arguments, conversation.name)
        for conversation in CONVERSATIONS
    ]
    for name in _arguments_of(tokenizer, renderer):
        for value in (True, False):
            arguments = {**template_arguments, name: value}
            title = f"{name}={value}"
            try:
                changed = get_renderer(tokenizer, family, **arguments)
            except (BadInputError, UnsupportedError) as error:
                checked.append(CheckedConversation(title, Verdict.REFUSED, error.message))
            else:
                checked.append(_check(tokenizer, changed, ARGUMENT_CONVERSATION, arguments, title))
    kind = f"family {renderer.identity['family']}" if isinstance(renderer, FamilyRenderer) else "generic"
    return TemplateReport(kind, "", tuple(checked))


def _arguments_of(tokenizer: Any, renderer: ChatRenderer) -> list[str]:
    """The known arguments that change what the template renders."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    found = []
    for name in (name for name in KNOWN_ARGUMENTS if name in template):
        references = [TemplateReference(tokenizer, renderer, {name: value}) for value in (True, False)]
        with contextlib.suppress(BadInputError):
            if len({reference.render(ARGUMENT_CONVERSATION.first, ()) for reference in references}) > 1:
                found.append(name)
    return found


def _check(
    tokenizer: Any, renderer: ChatRenderer, conversation: Conversation, arguments: Json, name: str
) -> CheckedConversation:
    reference = TemplateReference(tokenizer, renderer, arguments)
    if conversation.has_foreign_text:
        finding = _check_foreign(tokenizer, renderer, reference, conversation)
    else:
        finding = _grow(renderer, reference, conversation)[0]
    return CheckedConversation(name, finding.verdict, finding.reason)


def _grow(
    renderer: ChatRenderer, reference: TemplateReference, conversation: Conversation
) -> tuple[Finding, list[int]]:
    """Let a prompt grow by the turns of a conversation, and compare it with the template. Also its token ids."""
    try:
        token_ids = renderer.render_prompt(conversation.first, conversation.tools or None)
    except (BadInputError, UnsupportedError) as error:
        return Finding(Verdict.REFUSED, error.message), []
    first, preceding_ids = reference.decode(token_ids), token_ids
    rounds, messages = reference.play(conversation)
    turns: list[TurnText] = []
    for each in rounds:
        turn_ids = renderer.encode(each.text)
        try:
            next_ids = renderer.render_next_turn(each.messages, turn_ids, preceding_ids, conversation.tools or None)
        except (BadInputError, UnsupportedError) as error:
            return Finding(Verdict.REFUSED, error.message), []
        turns.append(TurnText(each.header, each.text, each.turn.content, each.turn.thought, reference.decode(next_ids)))
        token_ids, preceding_ids = [*token_ids, *turn_ids, *next_ids], next_ids
    if (expected := reference.render(conversation.first, conversation.tools)) != first:
        return Finding(Verdict.DIFFERENT, f"first prompt: {describe_difference(first, expected)}"), token_ids
    try:
        whole = reference.render(messages, conversation.tools)
        next_header = whole.removeprefix(reference.render(messages, conversation.tools, header=False))
    except BadInputError as error:
        return Finding(Verdict.UNVERIFIED, error.message), token_ids
    foreign = (text for message in messages if message["role"] != "assistant" for text in texts_of(message))
    grown = GrownPrompt(first, tuple(turns), next_header, tuple(foreign))
    finding = compare(grown, whole)
    if finding.verdict is Verdict.DIFFERENT:
        finding = (
            _compare_closed(renderer, reference, grown, whole)
            or _compare_rounds(reference, conversation, grown, messages)
            or finding
        )
    if finding.verdict is Verdict.EQUAL and not conversation.has_foreign_text and renderer.encode(whole) != token_ids:
        finding = Finding(Verdict.KEPT, "the text is equal, but tokens at the ends of turns are kept as sampled")
    return finding, token_ids


def _compare_closed(
    renderer: ChatRenderer, reference: TemplateReference, grown: GrownPrompt, whole: str
) -> Finding | None:
    """Compare a grown prompt in which the renderer closed turns with a stop token. None if it is different."""
    for stop in map(reference.decode, ([token] for token in renderer.stop_token_ids)):
        turns = tuple(
            dataclasses.replace(turn, text=turn.text + stop, after=turn.after.removeprefix(stop))
            if turn.after.startswith(stop)
            else turn
            for turn in grown.turns
        )
        if compare(dataclasses.replace(grown, turns=turns), whole).verdict is not Verdict.DIFFERENT:
            return Finding(Verdict.KEPT, f"the renderer closes the turn with {stop!r}, and the template does not")
    return None


def _compare_rounds(
    reference: TemplateReference, conversation: Conversation, grown: GrownPrompt, messages: list[Message]
) -> Finding | None:
    """Compare each appended part with the conversation up to it. None if the template has written something else.

    Some templates change what they have written before when more messages follow.
    """
    length = len(conversation.first)
    for turn, (_, answers) in zip(grown.turns, conversation.rounds, strict=True):
        length += 1 + len(answers)
        if not reference.render(messages[:length], conversation.tools).endswith(turn.after):
            return None
    return Finding(Verdict.KEPT, "the template changes an earlier message, which the prompt keeps as it was rendered")


def _check_foreign(
    tokenizer: Any, renderer: ChatRenderer, reference: TemplateReference, conversation: Conversation
) -> Finding:
    """Compare a conversation with control tokens in a text from outside with one without them.

    The texts are compared with the template. Both prompts must have the same number of control tokens. Tokens such as
    `<think>`, which tokenizers do not call special, count only in the result of a tool: a user may write them.
    """
    is_of_tool = bool(conversation.tools)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    control = {int(number) for number, token in added.items() if is_of_tool or token.special}
    harmless = with_text(conversation, "")
    calm, calm_ids = _grow(renderer, reference, harmless)
    if calm.verdict is Verdict.REFUSED:
        return calm
    shown = [token for token in dict.fromkeys(calm_ids) if token in control][:MAX_CONTROL_TOKENS]
    text = "".join(f"{reference.decode([token])}x" for token in shown)
    finding, token_ids = _grow(renderer, reference, with_text(conversation, text))
    if finding.verdict is Verdict.REFUSED:
        return finding
    counts = [sum(token in control for token in ids) for ids in (calm_ids, token_ids)]
    if counts[0] != counts[1]:
        return Finding(
            Verdict.DIFFERENT, f"the text {text!r} of a message became {counts[1] - counts[0]} control tokens"
        )
    return finding


# -- Table ------------------------------------------------------------------------------------------
# The report of `check_template` as a table for a terminal and as JSON.

STYLES = {
    Verdict.EQUAL: "green",
    Verdict.KEPT: "green",
    Verdict.REFUSED: "yellow",
    Verdict.UNVERIFIED: "yellow",
    Verdict.DIFFERENT: "bold red",
}


def as_json(report: TemplateReport) -> Json:
    """`{"usable", "renderer", "refusal", "conversations": [{"name", "verdict", "reason"}, ...]}`."""
    rows = [{**dataclasses.asdict(row), "verdict": row.verdict.value} for row in report.conversations]
    return {
        "usable": report.is_usable,
        "renderer": report.renderer,
        "refusal": report.refusal,
        "conversations": rows,
    }


def show(report: TemplateReport, console: Console) -> None:
    """Print a row for each conversation, and a summary."""
    console.print(Text(f"Renderer: {report.renderer}"))
    if report.refusal:
        console.print(Text(f"Refused: {report.refusal}"))
        return
    table = Table("conversation", "verdict", Column("reason", overflow="fold"))
    for row in report.conversations:
        table.add_row(Text(row.name), Text(row.verdict.value, STYLES[row.verdict]), Text(row.reason))
    console.print(table)
    counts = Counter(row.verdict for row in report.conversations)
    console.print(Text(", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])))
    console.print(Text("usable" if report.is_usable else "not usable"))
