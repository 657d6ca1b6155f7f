"""Decodes the tokens of a turn while the turn is generated."""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.gateway.turn_text.turn_parsing import decode_turn
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer

INCOMPLETE = "\ufffd"
"""What tokenizers write for bytes that are no whole character: further tokens may complete the character."""
SPACED_TEXT = "a . b ? c , d ' e n't f 's g"
"""Text from which some tokenizers remove spaces when they decode it."""
RETRY_SHARE = 8
"""A text that cannot be decoded up to its end is decoded again when it has grown by this part of its tokens."""


def decodes_in_parts(renderer: ChatRenderer) -> bool:
    """Whether the text of a turn begins with the text of its first tokens: the tokenizer removes no spaces later."""
    return renderer.decode(renderer.encode(SPACED_TEXT)) == SPACED_TEXT


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
        token.
        """
        self._token_ids += token_ids
        if len(self._token_ids) < self._min_tokens:
            return ""
        known = self._token_ids[: self._num_decoded]
        before, text = decode_turn(self._renderer, known), decode_turn(self._renderer, self._token_ids)
        is_whole = bool(decode_turn(self._renderer, self._token_ids[-1:])) and not text.endswith(INCOMPLETE)
        if not is_whole or not text.startswith(before):
            self._min_tokens = len(self._token_ids) + 1 + len(self._token_ids) // RETRY_SHARE
            return ""
        self._token_ids, self._min_tokens = self._token_ids[self._num_decoded :], 0
        self._num_decoded = len(self._token_ids)
        return text[len(before) :]
