"""The tokens at the end of a turn: the end marker, which the policy generates or the chat template adds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

MAX_END_MARKER_TOKENS = 16
"""Maximum number of tokens of the marker at the end of a turn."""


def length_of_overlap(turn_ids: Sequence[int], token_ids: Sequence[int], is_white_space: Callable[[int], bool]) -> int:
    """Number of tokens after a turn that the policy has generated already: the end marker, which may be several.

    The template may have white space before the end marker. The policy need not generate it.
    """
    best = start = 0
    while start < len(token_ids):
        for length in range(min(len(turn_ids), len(token_ids) - start, MAX_END_MARKER_TOKENS), 0, -1):
            if turn_ids[-length] != token_ids[start]:
                continue
            if list(turn_ids[-length:]) == list(token_ids[start : start + length]):
                best = max(best, start + length)
                break
        if not is_white_space(token_ids[start]):
            break
        start += 1
    return best


def without_end(turn_ids: Sequence[int], end_ids: Collection[int]) -> Sequence[int]:
    """The tokens of a turn without the tokens `end_ids` at its end."""
    length = len(turn_ids)
    while length and turn_ids[length - 1] in end_ids:
        length -= 1
    return turn_ids[:length]
