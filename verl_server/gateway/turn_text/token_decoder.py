"""Decodes the tokens of a turn while the turn is generated, and single tokens."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Sequence

from verl_server.gateway.turn_text.turn_parsing import decode_turn
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.turn_ends import without_end

INCOMPLETE = "\ufffd"
"""What tokenizers write for bytes that are no whole character: further tokens may complete the character."""
SPACED_TEXT = "a . b ? c , d ' e n't f 's g"
"""Text from which some tokenizers remove spaces when they decode it."""
RETRY_SHARE = 8
"""A text that cannot be decoded up to its end is decoded again when it has grown by this part of its tokens."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token that is one byte, in vocabularies of SentencePiece."""
_KNOWN_BYTES = weakref.WeakKeyDictionary[ChatRenderer, dict[int, bytes]]()
"""Bytes of the tokens of each renderer that were decoded after another token. At most the tokens of its vocabulary."""


def decodes_in_parts(renderer: ChatRenderer) -> bool:
    """Whether the text of a turn begins with the text of its first tokens: the tokenizer removes no spaces later."""
    return renderer.decode(renderer.encode(SPACED_TEXT)) == SPACED_TEXT


def bytes_of_tokens(renderer: ChatRenderer, turn_ids: Sequence[int], start: int = 0) -> list[bytes]:
    """The bytes of each token of a turn from the index `start` on, which may be a part of a character.

    The bytes of all tokens, one after the other, are the text of the turn. The end marker is no text.
    """
    num_kept = len(without_end(turn_ids, renderer.end_ids))
    before = renderer.encode("a")[-1:]  # some tokenizers write the first token of a text without its space
    known = _KNOWN_BYTES.setdefault(renderer, {})
    for token in set(turn_ids[max(start, 1) : num_kept]) - known.keys():
        known[token] = _bytes_of_token(renderer, before, token)
    return [
        b"" if index >= num_kept else known[token] if index else _bytes_of_token(renderer, [], token)
        for index, token in enumerate(turn_ids[start:], start)
    ]


def _bytes_of_token(renderer: ChatRenderer, before: list[int], token_id: int) -> bytes:
    """The bytes of a token after the tokens `before`. Special tokens have their text."""
    prefix, text = renderer.decode_all(before), renderer.decode_all([*before, token_id])
    text = text[len(prefix) :] if text.startswith(prefix) else renderer.decode_all([token_id])
    if INCOMPLETE not in text:
        return text.encode()
    name = _name_of(renderer, token_id)
    if (byte := BYTE_TOKEN.fullmatch(name)) is not None:
        return bytes.fromhex(byte[1])
    try:
        return bytes(_byte_by_letter()[letter] for letter in name)
    except KeyError:  # the name of the token does not tell its bytes
        return text.encode()


@functools.cache
def _byte_by_letter() -> dict[str, int]:
    """The bytes by the letters with which byte-level BPE writes them in its vocabulary.

    Printable characters of Latin-1 stand for themselves, and the other bytes are the letters from U+0100 on in their
    order (`bytes_to_unicode` of GPT-2).
    """
    printable = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _is_byte(renderer: ChatRenderer, token_id: int) -> bool:
    """Whether a token is one byte, in vocabularies of SentencePiece."""
    return BYTE_TOKEN.fullmatch(_name_of(renderer, token_id)) is not None


def _name_of(renderer: ChatRenderer, token_id: int) -> str:
    """The token in the vocabulary. Empty if the tokenizer does not tell it."""
    names = getattr(renderer.tokenizer, "convert_ids_to_tokens", None)
    return str(names(token_id)) if names is not None else ""


class TokenDecoder:
    """The text of tokens that arrive one after the other. The texts are the beginning of `decode_turn` of all tokens.

    The work for a token does not depend on the number of tokens before it. The tokens of the last text are decoded
    again with the new ones: some tokenizers write a token at the beginning of a text in another way.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._token_ids = list[int]()
        """Tokens of the last text, and tokens that have no text yet."""
        self._num_decoded = 0
        """Number of `_token_ids` that have a text."""
        self._min_tokens = 0
        """Number of `_token_ids` from which on they are decoded."""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that is certain after these tokens, without the text that `add` has returned before.

        A character whose last bytes are missing is not certain, and an end marker, which is no text if it is the last
        token. Tokens that are bytes are certain when another token follows: some tokenizers write a whole run of them
        in another way if its last byte makes no character.
        """
        self._token_ids += token_ids
        if len(self._token_ids) < self._min_tokens:
            return ""
        known = self._token_ids[: self._num_decoded]
        before, text = decode_turn(self._renderer, known), decode_turn(self._renderer, self._token_ids)
        is_open = text.endswith(INCOMPLETE) or _is_byte(self._renderer, self._token_ids[-1])
        is_whole = bool(decode_turn(self._renderer, self._token_ids[-1:])) and not is_open
        if not is_whole or not text.startswith(before):
            self._min_tokens = len(self._token_ids) + 1 + len(self._token_ids) // RETRY_SHARE
            return ""
        self._token_ids, self._min_tokens = self._token_ids[self._num_decoded :], 0
        self._num_decoded = len(self._token_ids)
        return text[len(before) :]
