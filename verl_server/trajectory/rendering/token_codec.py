"""`TokenCodec`: encodes and decodes with a Hugging Face tokenizer, without the work of each call around its Rust code.

`PreTrainedTokenizerFast` checks and copies for each text what is always the same here. That takes most of the time of
a short text, and its batch call wakes the worker threads of the Rust library.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

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
