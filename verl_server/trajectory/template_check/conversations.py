"""The conversations with which a chat template is checked. Each content is a text that no other content contains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_server.trajectory.rendering.messages import Message
from verl_server.types import Json

TOOLS: tuple[Json, ...] = (
    {
        "type": "function",
        "function": {
            "name": "count_fruit",
            "description": "The number of fruits.",
            "parameters": {
                "type": "object",
                "properties": {"fruit": {"type": "string", "description": "Name of the fruit."}},
                "required": ["fruit"],
            },
        },
    },
)
SYSTEM: Message = {"role": "system", "content": "You are a gardener."}
USERS: tuple[Message, ...] = tuple(
    {"role": "user", "content": text}
    for text in ("How many apples?", "And the pears then?", "Now the plums.", "Then all cherries.", "Last, the figs.")
)
FOREIGN_SLOT = "Read this note"
"""Content after which `with_text` inserts a text."""


@dataclass(frozen=True)
class AssistantTurn:
    """A turn of the policy: the text that it shows, its thought, and its calls of the tool."""

    content: str
    thought: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Id and fruit of each call."""


@dataclass(frozen=True)
class Conversation:
    """A first prompt, and rounds: a turn of the policy and the messages after it. Then the policy would go on."""

    name: str
    first: tuple[Message, ...]
    rounds: tuple[tuple[AssistantTurn, tuple[Message, ...]], ...]
    tools: tuple[Json, ...] = ()
    is_cut_off: bool = False
    """Whether the turns end without the end marker, as turns that reached their maximum number of tokens."""
    has_foreign_text: bool = False
    """Whether a text with control tokens is inserted after `FOREIGN_SLOT`."""


def _result(content: str, call_id: str | None = None) -> Message:
    """The result of a tool as an agent loop appends it. The renderer gives it an id if it has none."""
    return {"role": "tool", "name": "count_fruit", "content": content, **({"tool_call_id": call_id} if call_id else {})}


FIRST, SECOND, THIRD, FOURTH = (
    AssistantTurn(text) for text in ("There are seven.", "Only eleven.", "It is thirteen.", "About seventeen.")
)
CALL = AssistantTurn("", calls=(("call00000", "apple"),))
SECOND_CALL = AssistantTurn("", calls=(("call00007", "pear"),))
CALLS = AssistantTurn("", calls=(("call00000", "apple"), ("call00001", "pear")))
TEXT_AND_CALL = AssistantTurn("I look it up.", calls=(("call00000", "apple"),))
THINKING = AssistantTurn("There are seven.", thought="The basket holds them.")
THINKING_CALL = AssistantTurn("", thought="The list will tell.", calls=(("call00000", "apple"),))
NOTE: Message = {"role": "user", "content": FOREIGN_SLOT}

CONVERSATIONS: tuple[Conversation, ...] = (
    Conversation("one turn", USERS[:1], ((FIRST, USERS[1:2]),)),
    Conversation(
        "several turns",
        USERS[:1],
        ((FIRST, USERS[1:2]), (SECOND, USERS[2:3]), (THIRD, USERS[3:4]), (FOURTH, USERS[4:5])),
    ),
    Conversation("system message", (SYSTEM, USERS[0]), ((FIRST, USERS[1:2]), (SECOND, USERS[2:3]))),
    Conversation("later system message", USERS[:1], ((FIRST, (SYSTEM, USERS[1])),)),
    Conversation("two user messages", USERS[:1], ((FIRST, USERS[1:3]),)),
    Conversation("cut-off turn", USERS[:1], ((FIRST, USERS[1:2]),), is_cut_off=True),
    Conversation("tool result", USERS[:1], ((CALL, (_result("12 fruits"),)),), TOOLS),
    Conversation("text and call", USERS[:1], ((TEXT_AND_CALL, (_result("12 fruits"),)),), TOOLS),
    Conversation(
        "two tool rounds",
        USERS[:1],
        ((CALL, (_result("12 fruits"),)), (SECOND_CALL, (_result("34 fruits", "call00007"),))),
        TOOLS,
    ),
    Conversation("two results", USERS[:1], ((CALLS, (_result("12 fruits"), _result("34 fruits"))),), TOOLS),
    Conversation("result and user", USERS[:1], ((CALL, (_result("12 fruits"), USERS[1])),), TOOLS),
    Conversation("answer after result", USERS[:1], ((CALL, (_result("12 fruits"),)), (FIRST, USERS[1:2])), TOOLS),
    Conversation("thinking", USERS[:1], ((THINKING, USERS[1:2]), (SECOND, USERS[2:3]))),
    Conversation("thinking and tool", USERS[:1], ((THINKING_CALL, (_result("12 fruits"),)),), TOOLS),
    Conversation("control tokens of a user", (NOTE,), ((FIRST, (NOTE,)),), has_foreign_text=True),
    Conversation(
        "control tokens of a tool", USERS[:1], ((CALL, (_result(FOREIGN_SLOT),)),), TOOLS, has_foreign_text=True
    ),
)
ARGUMENT_CONVERSATION = Conversation("argument", USERS[:1], ((THINKING, USERS[1:2]), (SECOND, USERS[2:3])))
"""The conversation with which each template argument is checked."""


def with_text(conversation: Conversation, text: str) -> Conversation:
    """The conversation with `text` after each `FOREIGN_SLOT`."""

    def change(messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(
            {**message, "content": FOREIGN_SLOT + text} if message["content"] == FOREIGN_SLOT else message
            for message in messages
        )

    rounds = tuple((turn, change(messages)) for turn, messages in conversation.rounds)
    return Conversation(
        conversation.name,
        change(conversation.first),
        rounds,
        conversation.tools,
        conversation.is_cut_off,
        conversation.has_foreign_text,
    )
