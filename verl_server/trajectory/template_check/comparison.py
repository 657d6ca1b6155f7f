"""Compares a prompt that grew by turns with what a template renders for the whole conversation."""

from __future__ import annotations

import enum
from dataclasses import dataclass

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
