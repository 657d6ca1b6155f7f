"""`WrittenTexts`: finds the texts of the policy that come back in later messages of the user. Pure.

The rule compares each line of a text with a whole message. Most lines are ruled out by hashes of pieces of the message,
so the work for a message grows with its length, and hardly with the number of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MIN_SUMMARY_CHARS = 40
"""Minimum number of characters of a text that is recognised when it comes back. Shorter texts come back by chance."""
MAX_PIECE_CHARS = 64
"""Length of the longest pieces that are hashed, a power of 2. The lengths are the powers of 2 up to this length."""
SLOTS_PER_CHAR = 4
"""Minimum number of slots per character for the hashes of a message. More slots rule out more lines."""
FACTOR, MIX = 0x01000193, 0x9E3779B1
"""Odd factors of the hashes: the prime of FNV-1a, and that of Fibonacci hashing for 32 bits."""

Hashes = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class _Lines:
    """The stripped lines of a text. The arrays have an entry for each line."""

    texts: list[str]
    lengths: npt.NDArray[np.int64]
    """Number of characters."""
    levels: npt.NDArray[np.intp]
    """Index of the length of the longest piece that fits into the line, see `_piece_hashes`."""
    starts: Hashes
    """Hash of the first piece of this length."""
    ends: Hashes
    """Hash of the last piece of this length."""


class WrittenTexts:
    """Texts that the policy wrote, in their order."""

    def __init__(self, num_texts: int, text_of: Callable[[int], str]) -> None:
        """`text_of`: the text with an index. Each text is read once, when it is compared for the first time."""
        self._num_texts, self._text_of = num_texts, text_of
        self._lines = dict[int, _Lines]()

    def last_in(self, message: str, end: int | None = None, max_texts: int | None = None) -> int | None:
        """Index of the last text that comes back in a message of the user. None if no text does.

        A text comes back if the message has most of its characters, line by line: agents change the lines around a
        summary, for example the tags that they asked for. `end`: index after the last text that is compared.
        `max_texts`: maximum number of texts that are compared.
        """
        end = self._num_texts if end is None else end
        first = 0 if max_texts is None else max(end - max_texts, 0)
        lines = [self._lines_of(index) for index in range(first, end)]
        if not any(known.texts for known in lines):
            return None
        are_possible = _may_have(message, lines)
        for index, known, possible in zip(range(end - 1, first - 1, -1), lines[::-1], are_possible[::-1], strict=True):
            if _is_most(int(possible @ known.lengths), known):
                found = (known.texts[line] for line in np.flatnonzero(possible))
                if _is_most(sum(len(line) for line in found if line in message), known):
                    return index
        return None

    def _lines_of(self, index: int) -> _Lines:
        if index not in self._lines:
            self._lines[index] = _split(self._text_of(index))
        return self._lines[index]


def _is_most(num_chars: int, lines: _Lines) -> bool:
    """Whether a number of characters is at least half of a text, if the text is not too short."""
    return bool(lines.texts) and 2 * num_chars >= int(lines.lengths.sum())


def _split(text: str) -> _Lines:
    """The lines of a text, with their hashes. No lines for a text that is too short to be recognised."""
    texts = [line for part in text.splitlines() if (line := part.strip())]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    if lengths.sum() < MIN_SUMMARY_CHARS:
        texts, lengths = [], lengths[:0]
    levels, starts, ends = (
        np.zeros(len(texts), np.intp),
        np.zeros(len(texts), np.uint32),
        np.zeros(len(texts), np.uint32),
    )
    first_chars = np.cumsum(lengths + 1) - lengths - 1
    for level, size, hashes in _piece_hashes("\n".join(texts)):
        fits = np.flatnonzero(lengths >= size)  # longer pieces, which come later, replace shorter pieces
        levels[fits] = level
        starts[fits] = hashes[first_chars[fits]]
        ends[fits] = hashes[first_chars[fits] + lengths[fits] - size]
    return _Lines(texts, lengths, levels, starts, ends)


def _piece_hashes(text: str) -> Iterator[tuple[int, int, Hashes]]:
    """Index and value of each length of pieces, and the hash of the piece that begins at each character."""
    hashes: Hashes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    size = 1
    while len(hashes) and size <= MAX_PIECE_CHARS:
        yield size.bit_length() - 1, size, hashes * np.uint32(MIX)
        longer = hashes[:-size] * np.uint32(pow(FACTOR, size, 1 << 32))
        longer += hashes[size:]
        hashes, size = longer, 2 * size


def _may_have(message: str, texts: list[_Lines]) -> list[npt.NDArray[np.bool_]]:
    """For each line of each text, whether a message may have the line. False is certain."""
    levels, starts, ends = (
        np.concatenate([getattr(lines, name) for lines in texts]) for name in ("levels", "starts", "ends")
    )
    num_bits = min(max((SLOTS_PER_CHAR * len(message)).bit_length(), 1), 32)
    are_possible, has_slot = np.zeros(len(levels), np.bool_), np.zeros(1 << num_bits, np.bool_)
    for level, _, hashes in _piece_hashes(message):
        compared = np.flatnonzero(levels == level)
        if len(compared):
            has_slot[:] = False
            has_slot[_slots(hashes, num_bits)] = True
            has_start, has_end = (has_slot[_slots(pieces[compared], num_bits)] for pieces in (starts, ends))
            are_possible[compared] = has_start & has_end
    return np.split(are_possible, np.cumsum([len(lines.texts) for lines in texts])[:-1])


def _slots(hashes: Hashes, num_bits: int) -> npt.NDArray[np.intp]:
    """The first bits of hashes."""
    return (hashes >> np.uint32(32 - num_bits)).astype(np.intp)  # numpy is faster with indices of this type
