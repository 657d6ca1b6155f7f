"""The kinds of the conversations of a session: the main conversation, and the side calls of an agent program.

An agent program asks for more than its main conversation: for a title, for a summary before it shortens its history,
and for the turns of sub-agents. The rules look at the structure of a conversation: its tools, its system prompt, its
first message, its number of turns, and texts of the policy that come back in it. They are pure; `conversation_labels`
applies them to a token graph.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_TITLE_TOKENS = 128
"""Largest `max_tokens` of a request for a title by an agent that has no tools: its other calls look the same."""
PROBE_TOKENS = 1
"""The `max_tokens` of a request that only asks whether the API works."""


class ConversationKind(enum.StrEnum):
    """What a conversation, or a branch of a conversation, is for."""

    MAIN = "main"
    """The task of the agent. Also another conversation of the same agent, after a command such as `/clear`."""
    SUB_AGENT = "sub_agent"
    """Another agent, with a system prompt of its own, whose result goes to the main conversation."""
    SUMMARY = "summary"
    """The request for a summary of a conversation, with which the conversation goes on (`COMPACTED`)."""
    COMPACTED = "compacted"
    """The conversation after its history was replaced by a summary that the policy has written."""
    EDITED = "edited"
    """The conversation after its history was edited."""
    OTHER_TOOLS = "other_tools"
    """The conversation after the list of its tools has changed."""
    SAMPLE = "sample"
    """Another turn after the same prompt. The agent went on with a different one, or with none of them."""
    TITLE = "title"
    """One question without tools about the first message: the title or the topic of the conversation."""
    SIDE_CALL = "side_call"
    """Any other single question without tools: whether the API works, what a web page says."""


TRAINED_KINDS = frozenset(ConversationKind) - {ConversationKind.TITLE, ConversationKind.SIDE_CALL}
"""The kinds that are trained by default."""


@dataclass(frozen=True)
class Opening:
    """The first prompt of a conversation, and how the conversation went on."""

    system: str = ""
    """Text of the system prompt."""
    users: Sequence[str] = ()
    """Text of each message of the user in the first prompt."""
    tools: str | None = None
    """Digest of the tools. None without tools."""
    num_turns: int = 1
    """Number of turns of the policy in the conversation."""
    has_foreign_turns: bool = False
    """Whether the first prompt has turns of the assistant: a conversation that the session knows in another form."""
    max_new_tokens: int | None = None
    """Maximum number of tokens of the first turn, as the agent asked for it."""
    is_raw: bool = False
    """Whether the prompt is no chat."""

    @property
    def first_user(self) -> str:
        """Text of the first message of the user."""
        return self.users[0] if self.users else ""

    @property
    def is_question(self) -> bool:
        """Whether this is one question without tools."""
        return self.tools is None and self.num_turns <= 1 and not self.has_foreign_turns

    @property
    def is_probe(self) -> bool:
        """Whether the reply is too short for an answer."""
        return self.max_new_tokens == PROBE_TOKENS


def find_main(openings: Sequence[Opening]) -> int:
    """Index of the main conversation. A title can be asked for before the main conversation begins.

    The first conversation with tools. Without tools: the first conversation of several turns, or else the first.
    """
    groups = (
        [index for index, opening in enumerate(openings) if opening.tools is not None],
        [index for index, opening in enumerate(openings) if opening.num_turns > 1],
        [index for index, opening in enumerate(openings) if not opening.is_probe],
        range(len(openings)),
    )
    return next(group[0] for group in groups if group)


def kind_of(opening: Opening, main: Opening, has_summary: bool) -> ConversationKind:
    """The kind of a conversation that begins with a prompt of its own, beside the main conversation.

    `has_summary`: whether its first prompt contains a text that the policy wrote at the end of another conversation.
    """
    is_same_system, is_same_tools = opening.system == main.system, opening.tools == main.tools
    is_same_agent = is_same_system or (is_same_tools and main.tools is not None)
    if opening.is_raw or main.is_raw:
        return ConversationKind.MAIN
    is_title = opening.is_question and _share_text("\n".join(opening.users), main.first_user)
    is_short_title = is_title and PROBE_TOKENS < (opening.max_new_tokens or math.inf) <= MAX_TITLE_TOKENS
    is_side_question = opening.is_question and main.tools is not None
    has_same_start = opening.first_user == main.first_user
    if is_short_title and not has_same_start and opening.max_new_tokens != main.max_new_tokens:
        return ConversationKind.TITLE
    if has_summary and is_same_agent and not is_side_question:
        return ConversationKind.COMPACTED
    if has_same_start and (is_same_agent or opening.has_foreign_turns):
        return ConversationKind.EDITED if is_same_tools else ConversationKind.OTHER_TOOLS
    if is_same_system and is_same_tools and not opening.is_probe:
        return ConversationKind.EDITED if opening.has_foreign_turns else ConversationKind.MAIN
    if is_same_system and opening.has_foreign_turns:
        return ConversationKind.OTHER_TOOLS
    if opening.is_probe and opening.is_question:
        return ConversationKind.SIDE_CALL
    if is_side_question:
        return ConversationKind.TITLE if is_title else ConversationKind.SIDE_CALL
    if is_short_title:
        return ConversationKind.TITLE
    return ConversationKind.SUB_AGENT


def _share_text(first: str, second: str) -> bool:
    """Whether one of two texts contains the other."""
    return bool(first.strip() and second.strip()) and (first in second or second in first)
