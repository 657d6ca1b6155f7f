"""Text of each token of a sequence, decoded with a tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from verl_server.trajectory.rendering.truncation import REPLACEMENT_CHARACTER

DecodeFn = Callable[[Sequence[int]], str]
"""Decodes token ids to text, with special tokens."""
MAX_BYTES_PER_CHARACTER = 4
CACHE_SIZE = 100_000


def decoder_of(tokenizer: Any) -> DecodeFn:
    """A function that decodes token ids to text with special tokens, as a person wants to see them."""

    def decode(token_ids: Sequence[int]) -> str:
        text = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    return decode


class TokenTexts:
    """Decodes single tokens. The texts of the tokens of a sequence, joined, are the text of the sequence.

    The bytes of one character can be several tokens: then the last of them has the character, and the others have the
    text "". A token is decoded together with the tokens before it, because some tokenizers remove the space at the
    beginning of a text.
    """

    def __init__(self, decode: DecodeFn) -> None:
        self._decode = functools.lru_cache(CACHE_SIZE)(decode)

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        texts: list[str] = []
        known: tuple[int, ...] = ()
        """The last tokens that have a text together."""
        open_ids: tuple[int, ...] = ()
        """Tokens after it, which may be the beginning of a character."""
        for token in token_ids:
            open_ids += (token,)
            text = self._decode(known + open_ids)[len(self._decode(known)) :]
            if text.endswith(REPLACEMENT_CHARACTER) and len(open_ids) < MAX_BYTES_PER_CHARACTER:
                texts.append("")
                continue
            texts.append(text)
            known, open_ids = open_ids, ()
        if open_ids:
            texts[-1] = self._decode(known + open_ids)[len(self._decode(known)) :]
        return texts
