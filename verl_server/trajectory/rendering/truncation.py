"""Truncation of long texts to a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_CHARACTERS_PER_TOKEN = 16
"""Assumed maximum number of characters of one token. A text of longer tokens is truncated to fewer tokens."""
REPLACEMENT_CHARACTER = "\ufffd"
"""Character that tokenizers decode for an incomplete character."""
TRUNCATION_MARK = " [cut]"
"""Text at the cut of a truncated text."""


def truncate_text(
    text: str,
    max_tokens: int,
    cut: str,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """The text, or `max_tokens` tokens of it and `TRUNCATION_MARK`. See `ChatRenderer.truncate`.

    Only the parts that are kept are tokenized: ten megabytes would take seconds.
    """
    if len(text) < max_tokens and text.isascii():  # a token has at least one byte; a tokenizer may add a space
        return text
    if len(text) <= MAX_CHARACTERS_PER_TOKEN * max_tokens and len(encode(text)) <= max_tokens:
        return text
    num_last = {"start": max_tokens, "middle": max_tokens // 2, "end": 0}[cut]
    first = _first_tokens(text, max_tokens - num_last, encode, decode)
    last = _last_tokens(text, num_last, encode, decode)
    return f"{first}{TRUNCATION_MARK} {last}".strip() if last else first + TRUNCATION_MARK


def truncate_parts(
    parts: Sequence[Any], max_tokens: int, truncate: Callable[[str, int], str], count: Callable[[str], int]
) -> list[Any]:
    """Content parts whose texts share `max_tokens` in their order. Images and other parts are kept unchanged."""
    kept: list[Any] = []
    for part in parts:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            text = truncate(part["text"], max_tokens)
            max_tokens = max(max_tokens - count(text), 0)
            part = {**part, "text": text}
        kept.append(part)
    return kept


def _first_tokens(
    text: str, count: int, encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str]
) -> str:
    kept = decode(encode(text[: MAX_CHARACTERS_PER_TOKEN * count])[:count]) if count else ""
    while kept.endswith(REPLACEMENT_CHARACTER) and not text.startswith(kept):
        kept = kept[:-1]
    return kept


def _last_tokens(
    text: str, count: int, encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str]
) -> str:
    kept = decode(encode(text[-MAX_CHARACTERS_PER_TOKEN * count :])[-count:]) if count else ""
    while kept.startswith(REPLACEMENT_CHARACTER) and not text.endswith(kept):
        kept = kept[1:]
    return kept
