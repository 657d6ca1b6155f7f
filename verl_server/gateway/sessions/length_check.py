"""Finds texts that are too long for a context without the work for all of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.agent.episodes.episode_state import MAX_JOINED_TOKENS
from verl_server.gateway.worker_threads import run_aside
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.foreign_text import texts_of
from verl_server.trajectory.rendering.messages import Message

CHARS_PER_TOKEN = 8
"""Texts with fewer characters for each token of the context are not checked: nearly all of them are rendered anyway."""
PIECE_CHARS = 1 << 16
MAX_CUT_TOKENS = 64
"""Tokens that a long text may have less than its pieces, for each piece."""


async def is_certainly_longer(renderer: ChatRenderer, prompt: Sequence[Message] | str, num_tokens: int) -> bool:
    """Whether a prompt has more than `num_tokens` tokens for certain. False: the prompt has to be rendered.

    A worker thread counts the tokens of the texts, piece by piece, until there are too many. Messages of the assistant
    do not count: some chat templates leave out their thoughts.
    """
    if isinstance(prompt, str):
        texts = [prompt]
    else:
        texts = [text for message in prompt if message["role"] != "assistant" for text in texts_of(message)]
    if sum(map(len, texts)) <= CHARS_PER_TOKEN * num_tokens:
        return False
    return await run_aside(False, _are_longer, renderer, texts, num_tokens)


def _are_longer(renderer: ChatRenderer, texts: Sequence[str], num_tokens: int) -> bool:
    count = 0
    for text in texts:
        pieces = [text[start : start + PIECE_CHARS].strip() for start in range(0, len(text), PIECE_CHARS)]
        for piece in pieces:
            count += max(len(renderer.encode(piece)) - (MAX_JOINED_TOKENS if len(pieces) == 1 else MAX_CUT_TOKENS), 0)
            if count > num_tokens:
                return True
    return False
