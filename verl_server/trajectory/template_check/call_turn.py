"""A turn with a tool call, as a policy samples it after the chat template has written such turns in its training."""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.template_check.conversations import CONVERSATIONS
from verl_server.trajectory.template_check.reference import TemplateReference
from verl_server.types import Json

NAME, ARGUMENTS = "count_fruit", {"fruit": "apple"}
"""The call in the turn of `sample_call_turn`."""


def sample_call_turn(renderer: ChatRenderer) -> tuple[list[int], Sequence[Json]] | None:
    """Token ids of a turn with the call of a tool as the chat template writes it, and the JSON schemas of the tools.

    None if there is no chat template, or if it refuses or does not show such a turn: the form of a call is then not
    known.
    """
    conversation = next(each for each in CONVERSATIONS if each.name == "tool result")
    reference = TemplateReference(renderer.tokenizer, renderer, renderer.template_arguments)
    first, *_ = reference.play(conversation)[0]
    if NAME not in first.text or ARGUMENTS["fruit"] not in first.text:
        return None
    return renderer.encode(first.text), conversation.tools
