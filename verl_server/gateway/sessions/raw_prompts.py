"""Prompts that are no chats: their tokens, and the turns after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl_server.agent.episodes.cursor import Cursor
from verl_server.agent.episodes.episode_state import EpisodeState
from verl_server.errors import BadInputError
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.sessions.history import Key, raw_prompt_key
from verl_server.gateway.turn_text.turn_parsing import TurnParts, decode_turn, until_stop
from verl_server.trajectory.nodes import ForkReason
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.vision_renderer import VisionRenderer


def encode_raw_prompt(renderer: ChatRenderer, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a raw prompt. May be called in any thread."""
    return renderer.encode(prompt) if isinstance(prompt, str) else list(prompt)


def append_raw_prompt(
    state: EpisodeState,
    branch: str,
    token_ids: Sequence[int],
    refuse: Callable[[int | None, str, int | None], GatewayError],
) -> tuple[Cursor, Key]:
    """Record a raw prompt after the longest recorded path with which the prompt begins.

    `refuse`: makes the error for a prompt that does not fit, of the end of this path, the name of the limit, and the
    number of tokens of the prompt. Returns the end of the prompt, and the key of the prompt. Raises this error, and
    GatewayError for tokens that the model cannot read.
    """
    leaf, num_known = state.graph.longest_prefix(token_ids)
    new_ids = token_ids[num_known:]
    reason = ForkReason.SUB_AGENT if leaf is None else ForkReason.EDITED if new_ids else ForkReason.SAMPLE
    cursor = Cursor(state, branch, leaf, reason)
    if new_ids or leaf is None:
        _require_readable(state.renderer, new_ids)
        remaining, limit = state.remaining_tokens(leaf)
        if leaf is None:  # a prompt at the beginning counts for the context only
            remaining, limit = state.limits.max_context_tokens or len(new_ids) + 1, "max_context_tokens"
        if len(new_ids) >= remaining:
            raise refuse(leaf, limit, len(token_ids))
        text = state.renderer.decode_all(new_ids)
        cursor.add_context(new_ids, {"appended_text": text})
    return cursor, raw_prompt_key(token_ids)


def _require_readable(renderer: ChatRenderer, token_ids: Sequence[int]) -> None:
    """Raise GatewayError unless the tokenizer has the tokens, and for tokens that stand for an image.

    A token that is too large ends the process of a server. The policy may sample such a token: the model can have more
    tokens than the tokenizer. These tokens are in the recorded path.
    """
    num_tokens = len(renderer.tokenizer)
    if not token_ids or max(token_ids) >= num_tokens:
        raise GatewayError(
            ErrorKind.INVALID_REQUEST, f"'prompt' must have token ids from 0 to {num_tokens - 1}, and at least one"
        )
    if isinstance(renderer, VisionRenderer):
        try:
            renderer.require_no_placeholder(token_ids)
        except BadInputError:
            message = "'prompt' has a token that stands for an image; send images as messages of a chat"
            raise GatewayError(ErrorKind.INVALID_REQUEST, message) from None


def unsplit_turn(
    renderer: ChatRenderer, token_ids: Sequence[int], *_: object, stop_sequence: str | None = None, **__: object
) -> TurnParts:
    """The turn after a raw prompt: thoughts and tool calls stay in the text. Takes the arguments of `split_turn`."""
    return TurnParts(until_stop(decode_turn(renderer, token_ids), stop_sequence), "", ())
