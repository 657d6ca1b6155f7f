"""Truncation of long texts to a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

MARGIN = 64
"""Tokens at the cut of a part of a text that are not used: with the rest of the text they could be other tokens."""
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
    size, token_ids = _encode_end(text, max_tokens, encode)
    if size == len(text) and len(token_ids) <= max_tokens:
        return text
    num_last = {"start": max_tokens, "middle": max_tokens // 2, "end": 0}[cut]
    first = decode(token_ids[: max_tokens - num_last]) if max_tokens > num_last else ""
    while first.endswith(REPLACEMENT_CHARACTER) and not text.startswith(first):
        first = first[:-1]
    last = _last_tokens(text, num_last, encode, decode) if num_last else ""
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


def _encode_end(
    text: str, count: int, encode: Callable[[str], Sequence[int]], *, last: bool = False
) -> tuple[int, Sequence[int]]:
    """Tokens of the beginning of a text, or of its end with `last`: at least `count` of them if the text has so many.

    Returns the number of characters, and the token ids.
    """
    size = 2 * count + MARGIN
    while True:
        size = min(size, len(text))
        token_ids = encode(text[-size:] if last and size else text[:size])
        if size == len(text) or len(token_ids) > count + MARGIN:
            return size, token_ids
        size *= 2


def _last_tokens(
    text: str, count: int, encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str]
) -> str:
    _, token_ids = _encode_end(text, count, encode, last=True)
    kept = decode(token_ids[-count:])
    while kept.startswith(REPLACEMENT_CHARACTER) and not text.endswith(kept):
        kept = kept[1:]
    return kept
