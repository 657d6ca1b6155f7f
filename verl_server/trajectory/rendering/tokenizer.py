"""What a renderer needs of a tokenizer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_server.errors import BadInputError

# -- Token codec ------------------------------------------------------------------------------------
# `TokenCodec`: encodes and decodes with a Hugging Face tokenizer, without the work of each call around its Rust code.
#
# `PreTrainedTokenizerFast` checks and copies for each text what is always the same here. That takes most of the time
# of a short text, and its batch call wakes the worker threads of the Rust library.

MAX_SHORT_CHARS = 4096
"""Number of characters that are tokenized while Python's other threads wait: about a millisecond."""
WRAPPERS = ("encode", "_encode_plus", "decode", "_decode")
"""Methods of `PreTrainedTokenizerFast` that `TokenCodec` replaces."""


class TokenCodec:
    """Token ids of texts, and texts of token ids, exactly as the tokenizer gives them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_fast = _has_rust_tokenizer(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without added special tokens."""
        tokenizer = self._tokenizer
        if not self._is_fast or not _is_set_up(rust := tokenizer.backend_tokenizer, tokenizer):
            return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
        if len(text) <= MAX_SHORT_CHARS:
            encoded = rust.encode(text, add_special_tokens=False)
        else:
            (encoded,) = rust.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        ids = list(token_ids)
        if not self._is_fast or self._tokenizer.clean_up_tokenization_spaces:
            return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        return str(self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def _has_rust_tokenizer(tokenizer: Any) -> bool:
    """Whether the tokenizer is of the library Transformers, and does nothing of its own around its Rust code."""
    transformers = sys.modules.get("transformers")
    fast = getattr(transformers, "PreTrainedTokenizerFast", None)
    if fast is None or not isinstance(tokenizer, fast):
        return False
    methods = [getattr(getattr(tokenizer, name, None), "__func__", None) for name in WRAPPERS]
    return methods == [getattr(fast, name, None) for name in WRAPPERS] and hasattr(
        tokenizer.backend_tokenizer, "encode_batch_fast"
    )


def _is_set_up(rust: Any, tokenizer: Any) -> bool:
    """Whether the Rust code neither truncates nor pads, and splits special tokens as the tokenizer says."""
    splits = bool(rust.encode_special_tokens)
    return rust.truncation is None and rust.padding is None and splits == tokenizer.split_special_tokens


# -- Tokenizer --------------------------------------------------------------------------------------

IDENTITY_TEXT = "The tokenizer splits 1234 words, also d\u00e9j\u00e0 vu.\n\n\u4f60\u597d"
"""Text by whose token ids tokenizers are told apart."""
TOKENIZER_METHODS = ("apply_chat_template", "encode", "decode")
"""Methods of a tokenizer that a renderer calls."""


def require_tokenizer(tokenizer: object) -> None:
    """Raise BadInputError unless `tokenizer` has the methods of a Hugging Face tokenizer."""
    if isinstance(tokenizer, (str, os.PathLike)):
        path = os.fspath(tokenizer)
        raise BadInputError(
            f"a renderer needs a tokenizer, got the path or name {path!r}; pass "
            f"transformers.AutoTokenizer.from_pretrained({path!r})"
        )
    if missing := [name for name in TOKENIZER_METHODS if not callable(getattr(tokenizer, name, None))]:
        inner = "; pass its attribute `tokenizer`" if hasattr(tokenizer, "tokenizer") else ""
        raise BadInputError(
            f"a renderer needs a Hugging Face tokenizer, but {type(tokenizer).__name__} has no {missing[0]}(){inner}"
        )


# -- Truncation -------------------------------------------------------------------------------------
# Truncation of long texts to a number of tokens.

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
