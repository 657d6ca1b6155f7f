"""What a chat template renders for a whole conversation, and what a policy samples in the turns of the conversation."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.foreign_text import ControlTokens
from verl_server.trajectory.rendering.messages import Message, with_call_ids
from verl_server.types import Json

# -- Conversations ----------------------------------------------------------------------------------
# The conversations with which a chat template is checked. Each content is a text that no other content contains.

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


# -- Reference --------------------------------------------------------------------------------------

THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of an assistant message from which templates read its thought. Other templates read it from the content."""

OPEN, CLOSE = "<think>", "</think>"
"""Tags around a thought."""


@dataclass(frozen=True)
class Round:
    """A turn of the policy in a conversation, and the messages after the turn."""

    turn: AssistantTurn
    header: str
    """What the template writes before the turn."""
    text: str
    """What the policy samples."""
    messages: tuple[Message, ...]


class TemplateReference:
    """The renderings of whole conversations by the chat template of a tokenizer.

    A tokenizer without a chat template has those of its family's `renderer`. They always have the header of the next
    turn, so that the turns of the policy are not taken from them.
    """

    def __init__(self, tokenizer: Any, renderer: ChatRenderer, template_arguments: Json) -> None:
        self._tokenizer, self._renderer, self._arguments = tokenizer, renderer, template_arguments
        self._control_tokens = ControlTokens(tokenizer)
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._stop = self.decode(renderer.stop_token_ids[:1])

    def render(self, messages: Sequence[Message], tools: Sequence[Json], *, header: bool = True) -> str:
        """The text of a whole conversation. Raises BadInputError if the template refuses the conversation.

        `header`: whether the header of the next turn follows.
        """
        if not self._has_template:
            return self.decode(self._renderer.render_prompt(messages, tools or None))
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=header,
                tokenize=False,
                **self._arguments,
            )
        except Exception as error:
            raise BadInputError(f"the chat template refuses the whole conversation: {error}") from error
        return str(text)

    def play(self, conversation: Conversation) -> tuple[list[Round], list[Message]]:
        """The rounds of a conversation, and the messages of the whole conversation."""
        messages, rounds = list(conversation.first), []
        for turn, answers in conversation.rounds:
            message, header, text = self._sample(messages, turn, with_call_ids(answers), conversation.tools)
            if conversation.is_cut_off:
                text = text[: text.find(turn.content) + len(turn.content)]
            if CLOSE not in text and self._closes_thought(messages, message, conversation.tools):
                text = f"{CLOSE}\n\n{text}"
            rounds.append(Round(turn, header, text, answers))
            messages += [message, *with_call_ids(answers)]
        return rounds, messages

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, with special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _sample(
        self, messages: Sequence[Message], turn: AssistantTurn, answers: Sequence[Message], tools: Sequence[Json]
    ) -> tuple[Message, str, str]:
        """An assistant message, the header before it, and the text that a policy samples for it.

        The template gives the text: what it renders for the message beyond the header. Without a template, or if it
        refuses, the text has no calls.
        """
        for message in _forms(turn) if self._has_template else ():
            with contextlib.suppress(BadInputError):
                prompt, both = self.render(messages, tools), self.render([*messages, message], tools, header=False)
                header, rendered = self._split(prompt, both, self.render(messages, tools, header=False))
                if turn.thought in rendered and (turn.content in rendered or turn.calls):
                    return (
                        message,
                        header,
                        self._with_end(rendered, turn)
                        or self._with_next_token(rendered, messages, turn, answers, tools),
                    )
        *_, message = _forms(turn)
        return message, self._header(messages, tools), f"{message['content']}{self._stop}"

    def _header(self, messages: Sequence[Message], tools: Sequence[Json]) -> str:
        """What the template writes before a turn. Empty if the template refuses the messages."""
        with contextlib.suppress(BadInputError):
            prompt = self.render(messages, tools)
            if self._has_template:
                return prompt.removeprefix(self.render(messages, tools, header=False))
            return prompt[prompt.rfind(OPEN) :] if prompt.rstrip().endswith(OPEN) else ""
        return ""

    def _closes_thought(self, messages: Sequence[Message], message: Message, tools: Sequence[Json]) -> bool:
        """Whether a policy closes a thought in the turn: the prompt opens it, or a family without template shows it."""
        with contextlib.suppress(BadInputError):
            prompt = self.render(messages, tools)
            both = "" if self._has_template else self.render([*messages, message], tools)
            return prompt.rstrip().endswith(OPEN) or both.count(CLOSE) > prompt.count(CLOSE)
        return False

    def _split(self, prompt: str, both: str, without_header: str) -> tuple[str, str]:
        """The header at the end of a prompt, and what `both`, the prompt with a turn, has beyond the header.

        The header of a turn can be longer than what the template writes when it renders the turn: the beginning of a
        thought. Some templates write the header also where none was asked for.
        """
        prompt_ids, both_ids = self._renderer.encode(prompt), self._renderer.encode(both)
        pairs = zip(prompt_ids, both_ids, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        header, rendered = self.decode(prompt_ids[shared:]), self.decode(both_ids[shared:])
        if prompt != without_header and prompt.startswith(without_header):
            header = prompt[len(without_header) :]
            if not both.startswith(without_header) and header in rendered:  # the template changes earlier messages
                rendered = rendered.partition(header)[2]
        return header, rendered

    def _with_end(self, text: str, turn: AssistantTurn) -> str:
        """A rendered turn up to its end marker: the policy does not sample the white space after the marker.

        The marker is the stop token after the content or the calls, or the last control token. Empty without a marker.
        """
        shown = text.rfind(turn.calls[-1][1] if turn.calls else turn.content)
        if self._stop and (at := text.find(self._stop, shown)) >= 0:
            return text[: at + len(self._stop)]
        return text.rstrip() if self._control_tokens.find_end(text) > shown else ""

    def _with_next_token(
        self,
        text: str,
        messages: Sequence[Message],
        turn: AssistantTurn,
        answers: Sequence[Message],
        tools: Sequence[Json],
    ) -> str:
        """A rendered turn without an end marker, with the stop token with which the next message begins, if it does."""
        before = [*messages, next(_forms(dataclasses.replace(turn, thought="")))]
        both = self.render(before, tools, header=False)
        following = self.render([*before, *answers], tools)
        first_ids = self._renderer.encode(following[len(both) :])[:1] if following.startswith(both) else []
        is_stop = bool(first_ids) and first_ids[0] in self._renderer.stop_token_ids
        return text + self.decode(first_ids) if is_stop else text.rstrip()


def _as_message(turn: AssistantTurn, *, as_text: bool, **fields: Any) -> dict[str, Any]:
    """The turn as an assistant message. `as_text`: whether the arguments of calls are JSON text, as in OpenAI's API."""
    arguments = [json.dumps({"fruit": fruit}) if as_text else {"fruit": fruit} for _, fruit in turn.calls]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "count_fruit", "arguments": value}}
        for (call_id, _), value in zip(turn.calls, arguments, strict=True)
    ]
    return {"role": "assistant", "content": turn.content, **({"tool_calls": calls} if calls else {}), **fields}


def _forms(turn: AssistantTurn) -> Iterator[dict[str, Any]]:
    """The messages with which different templates are told of a turn."""
    inline = {"content": f"{OPEN}\n{turn.thought}\n{CLOSE}\n\n{turn.content}"}
    thoughts = [*({key: turn.thought} for key in THOUGHT_KEYS), inline] if turn.thought else [{}]
    for as_text in (False, True) if turn.calls else (False,):
        for fields in thoughts:
            yield _as_message(turn, as_text=as_text, **fields)


# -- Call turn --------------------------------------------------------------------------------------
# A turn with a tool call, as a policy samples it after the chat template has written such turns in its training.

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
