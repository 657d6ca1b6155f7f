"""`check_template` checks a chat template with a fixed set of conversations.

A policy plays each conversation turn by turn. The prompt that grew is compared with what the template renders for the
whole conversation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from verl_server.errors import BadInputError, UnsupportedError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.families import FamilyRenderer, get_renderer
from verl_server.trajectory.rendering.foreign_text import ControlTokens, texts_of
from verl_server.trajectory.rendering.messages import Message, with_call_ids
from verl_server.trajectory.rendering.tokenizer import require_tokenizer
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
    return dataclasses.replace(conversation, first=change(conversation.first), rounds=rounds)


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


# -- Comparison -------------------------------------------------------------------------------------
# Compares a prompt that grew by turns with what a template renders for the whole conversation.

SHOWN_CHARACTERS = 40
"""Number of characters of each text in the description of a difference."""

CONTROL_TOKEN_STARTS = ("<", "[")
"""First characters of control tokens."""


class Verdict(enum.Enum):
    """How a prompt that grew by turns compares with the template's rendering of the whole conversation."""

    EQUAL = "equal"
    """Both are the same, with the same token ids."""
    KEPT = "kept"
    """They differ only in earlier tokens, which the prompt keeps: turns of the policy, or the first prompt."""
    REFUSED = "refused"
    """The renderer refuses the conversation."""
    UNVERIFIED = "unverified"
    """The template refuses the whole conversation, which the renderer accepts. There is nothing to compare."""
    DIFFERENT = "different"
    """The first prompt or an appended part differs from what the template writes, or a text in a message became control
    tokens. With the generic renderer this is a defect. With a family, the package `renderers` implements another
    revision of the template."""


@dataclass(frozen=True)
class Finding:
    """A verdict and its reason. The reason is empty for equal prompts."""

    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True)
class TurnText:
    """A turn in a grown prompt, with the parts of the prompt before and after the turn."""

    header: str
    """What the template writes before a turn of the policy. The part before the turn ends with it."""
    text: str
    content: str
    """The text that the turn shows, which is a part of `text`."""
    thought: str
    after: str
    """What the renderer appended after the turn, with the header of the next turn."""


@dataclass(frozen=True)
class GrownPrompt:
    """The text of a prompt that grew by turns."""

    first: str
    """The first prompt, as the template renders it."""
    turns: tuple[TurnText, ...]
    next_header: str
    """What the template writes before the turn that would follow."""
    foreign: tuple[str, ...]
    """Contents of the messages that are not of the policy. No turn may contain them."""

    @property
    def text(self) -> str:
        """The whole prompt."""
        return self.first + "".join(turn.text + turn.after for turn in self.turns)


def compare(grown: GrownPrompt, whole: str) -> Finding:
    """Compare a grown prompt with `whole`, what the template renders for the whole conversation."""
    if grown.text == whole:
        return Finding(Verdict.EQUAL)
    first = grown.first.removesuffix(grown.turns[0].header)
    whole, reason = _restore_first(first, whole, grown)
    if not whole.startswith(first):
        return Finding(Verdict.DIFFERENT, f"first prompt: {describe_difference(first, whole)}")
    reasons, at = [reason], len(first)
    headers = [*(turn.header for turn in grown.turns[1:]), grown.next_header]
    for number, (turn, header) in enumerate(zip(grown.turns, headers, strict=True), 1):
        is_last = turn is grown.turns[-1]
        appended = turn.after if is_last else turn.after.removesuffix(header)
        whole, reason = _remove_moved(number, turn, appended, whole, at)
        found = whole.find(appended, at)
        is_complete = not is_last or found + len(appended) == len(whole)
        if found < 0 or not is_complete or any(text in whole[at:found] for text in grown.foreign):
            return Finding(Verdict.DIFFERENT, f"after turn {number}: {_describe_missing(appended, whole[at:])}")
        reasons.append(reason or _describe_kept(number, turn, whole[at:found]))
        at = found + len(appended)
    return Finding(Verdict.KEPT, next(filter(None, reasons), ""))


def describe_difference(rendered: str, expected: str) -> str:
    """The first place at which what the renderer writes is not what the template writes."""
    return _describe_at(rendered, expected, _common_length(rendered, expected))


def _restore_first(first: str, whole: str, grown: GrownPrompt) -> tuple[str, str]:
    """`whole` with the part of the first prompt that the template removed or moved, and the description of the part.

    Some templates write the tools before the last message of a user, or leave out their own system message.
    """
    start = _common_length(first, whole)
    for end in range(start + 1, len(first)):
        if whole.startswith(first[end:], start):
            part, rest = first[start:end], whole[start:]
            if any(text in part for text in grown.foreign):
                break
            shown = _excerpt(_rotated(first[:start], part), 0)
            if part in rest and any(part in turn.after for turn in grown.turns):
                reason = f"the template moves {shown} of the first prompt, and the prompt has it in both places"
                return whole[:start] + part + rest, reason
            verb = "moves" if part in rest else "removes"
            reason = f"the template {verb} {shown} of the first prompt, which stays as it was"
            return whole[:start] + part + rest.replace(part, "", 1), reason
    return whole, ""


def _remove_moved(number: int, turn: TurnText, appended: str, whole: str, at: int) -> tuple[str, str]:
    """`whole` without the content of a turn, if the template writes it after the results, and the description."""
    length, found = _longest_prefix_in(appended, whole[at:])
    rest = whole[at + found + length :]
    if not turn.content or not rest.startswith(turn.content):
        return whole, ""
    end = rest.find(appended[length:]) if appended[length:] else len(rest)
    reason = f"the template moves the text of turn {number} behind the results, and the prompt keeps it as sampled"
    return (whole[: at + found + length] + rest[end:], reason) if end > 0 else (whole, "")


def _longest_prefix_in(text: str, other: str) -> tuple[int, int]:
    """The length of the longest beginning of `text` that `other` contains, and its offset there."""
    for length in range(len(text), 0, -1):
        if (found := other.find(text[:length])) >= 0:
            return length, found
    return 0, 0


def _describe_kept(number: int, turn: TurnText, written: str) -> str:
    """Why a kept turn differs from what the template writes for it. Empty if it does not differ."""
    sampled = turn.header + turn.text
    if sampled == written:
        return ""
    if turn.thought and turn.thought in sampled and turn.thought not in written:
        return f"the template removes the thought of turn {number}, which the prompt keeps"
    at = _common_length(sampled, written)
    if sampled.endswith(written[at:]):
        removed = _rotated(sampled[:at], sampled[at : len(sampled) - len(written) + at])
        return f"the template removes {_excerpt(removed, 0)} from turn {number}, which the prompt keeps"
    return (
        f"turn {number} is kept as it was sampled: {_excerpt(sampled, at)}; the template writes {_excerpt(written, at)}"
    )


def _describe_missing(appended: str, rest: str) -> str:
    """The first place at which what the renderer has appended is not in `rest`, what the template writes."""
    length, found = _longest_prefix_in(appended, rest)
    return _describe_at(appended, rest[found:], length)


def _describe_at(rendered: str, expected: str, at: int) -> str:
    before = rendered[max(at - SHOWN_CHARACTERS, 0) : at]
    return f"after {before!r} the renderer writes {_excerpt(rendered, at)}, the template {_excerpt(expected, at)}"


def _excerpt(text: str, at: int) -> str:
    return repr(text[at : at + SHOWN_CHARACTERS]) if text[at:] else "nothing"


def _rotated(before: str, removed: str) -> str:
    """The removed text, beginning with a control token if its place is ambiguous: `<a><b>` without `<b>`, or `b><`."""
    for length in range(len(removed)):
        end = removed[len(removed) - length :]
        if before.endswith(end) and (end + removed)[:1] in CONTROL_TOKEN_STARTS:
            return end + removed[: len(removed) - length]
    return removed


def _common_length(one: str, other: str) -> int:
    """Number of characters at the beginning that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


# -- Check ------------------------------------------------------------------------------------------

KNOWN_ARGUMENTS = ("enable_thinking", "thinking")
"""Arguments of released templates that are checked with True and with False, if a template has them."""
MAX_CONTROL_TOKENS = 8
"""Maximum number of control tokens in a text from outside."""


@dataclass(frozen=True)
class CheckedConversation:
    """A kind of conversation, and how its grown prompt compares with the template."""

    name: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class TemplateReport:
    """The result of `check_template`."""

    renderer: str
    """The renderer that `get_renderer` selects: `"generic"`, or `"family NAME"`."""
    refusal: str
    """Why there is no renderer for the template. Empty if there is one."""
    conversations: tuple[CheckedConversation, ...]

    @property
    def is_usable(self) -> bool:
        """Whether there is a renderer, it accepts a conversation of one turn, and no grown prompt is wrong."""
        verdicts = [conversation.verdict for conversation in self.conversations]
        return bool(verdicts) and verdicts[0] is not Verdict.REFUSED and Verdict.DIFFERENT not in verdicts

    @property
    def has_tools(self) -> bool:
        """Whether at least one conversation with tools is not refused."""
        names = {conversation.name for conversation in CONVERSATIONS if conversation.tools}
        return any(row.name in names and row.verdict is not Verdict.REFUSED for row in self.conversations)


def check_template(tokenizer: Any, family: str | None = None, **template_arguments: Any) -> TemplateReport:
    """Compare prompts that grow by turns with what the chat template renders for whole conversations.

    Takes the arguments of `get_renderer`. Raises BadInputError for an object that is no tokenizer.
    """
    require_tokenizer(tokenizer)
    try:
        renderer = get_renderer(tokenizer, family, **template_arguments)
    except (BadInputError, UnsupportedError) as error:
        return TemplateReport(f"family {family}" if family else "generic", error.message, ())
    checked = [
        _check(tokenizer, renderer, conversation, template_arguments, conversation.name)
        for conversation in CONVERSATIONS
    ]
    for name in _arguments_of(tokenizer, renderer):
        for value in (True, False):
            arguments = {**template_arguments, name: value}
            title = f"{name}={value}"
            try:
                changed = get_renderer(tokenizer, family, **arguments)
            except (BadInputError, UnsupportedError) as error:
                checked.append(CheckedConversation(title, Verdict.REFUSED, error.message))
            else:
                checked.append(_check(tokenizer, changed, ARGUMENT_CONVERSATION, arguments, title))
    kind = f"family {renderer.identity['family']}" if isinstance(renderer, FamilyRenderer) else "generic"
    return TemplateReport(kind, "", tuple(checked))


def _arguments_of(tokenizer: Any, renderer: ChatRenderer) -> list[str]:
    """The known arguments that change what the template renders."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    found = []
    for name in (name for name in KNOWN_ARGUMENTS if name in template):
        references = [TemplateReference(tokenizer, renderer, {name: value}) for value in (True, False)]
        with contextlib.suppress(BadInputError):
            if len({reference.render(ARGUMENT_CONVERSATION.first, ()) for reference in references}) > 1:
                found.append(name)
    return found


def _check(
    tokenizer: Any, renderer: ChatRenderer, conversation: Conversation, arguments: Json, name: str
) -> CheckedConversation:
    reference = TemplateReference(tokenizer, renderer, arguments)
    if conversation.has_foreign_text:
        finding = _check_foreign(tokenizer, renderer, reference, conversation)
    else:
        finding = _grow(renderer, reference, conversation)[0]
    return CheckedConversation(name, finding.verdict, finding.reason)


def _grow(
    renderer: ChatRenderer, reference: TemplateReference, conversation: Conversation
) -> tuple[Finding, list[int]]:
    """Let a prompt grow by the turns of a conversation, and compare it with the template. Also its token ids."""
    try:
        token_ids = renderer.render_prompt(conversation.first, conversation.tools or None)
    except (BadInputError, UnsupportedError) as error:
        return Finding(Verdict.REFUSED, error.message), []
    first, preceding_ids = reference.decode(token_ids), token_ids
    rounds, messages = reference.play(conversation)
    turns: list[TurnText] = []
    for each in rounds:
        turn_ids = renderer.encode(each.text)
        try:
            next_ids = renderer.render_next_turn(each.messages, turn_ids, preceding_ids, conversation.tools or None)
        except (BadInputError, UnsupportedError) as error:
            return Finding(Verdict.REFUSED, error.message), []
        turns.append(TurnText(each.header, each.text, each.turn.content, each.turn.thought, reference.decode(next_ids)))
        token_ids, preceding_ids = [*token_ids, *turn_ids, *next_ids], next_ids
    if (expected := reference.render(conversation.first, conversation.tools)) != first:
        return Finding(Verdict.DIFFERENT, f"first prompt: {describe_difference(first, expected)}"), token_ids
    try:
        whole = reference.render(messages, conversation.tools)
        next_header = whole.removeprefix(reference.render(messages, conversation.tools, header=False))
    except BadInputError as error:
        return Finding(Verdict.UNVERIFIED, error.message), token_ids
    foreign = (text for message in messages if message["role"] != "assistant" for text in texts_of(message))
    grown = GrownPrompt(first, tuple(turns), next_header, tuple(foreign))
    finding = compare(grown, whole)
    if finding.verdict is Verdict.DIFFERENT:
        finding = (
            _compare_closed(renderer, reference, grown, whole)
            or _compare_rounds(reference, conversation, grown, messages)
            or finding
        )
    if finding.verdict is Verdict.EQUAL and not conversation.has_foreign_text and renderer.encode(whole) != token_ids:
        finding = Finding(Verdict.KEPT, "the text is equal, but tokens at the ends of turns are kept as sampled")
    return finding, token_ids


def _compare_closed(
    renderer: ChatRenderer, reference: TemplateReference, grown: GrownPrompt, whole: str
) -> Finding | None:
    """Compare a grown prompt in which the renderer closed turns with a stop token. None if it is different."""
    for stop in map(reference.decode, ([token] for token in renderer.stop_token_ids)):
        turns = tuple(
            dataclasses.replace(turn, text=turn.text + stop, after=turn.after.removeprefix(stop))
            if turn.after.startswith(stop)
            else turn
            for turn in grown.turns
        )
        if compare(dataclasses.replace(grown, turns=turns), whole).verdict is not Verdict.DIFFERENT:
            return Finding(Verdict.KEPT, f"the renderer closes the turn with {stop!r}, and the template does not")
    return None


def _compare_rounds(
    reference: TemplateReference, conversation: Conversation, grown: GrownPrompt, messages: list[Message]
) -> Finding | None:
    """Compare each appended part with the conversation up to it. None if the template has written something else.

    Some templates change what they have written before when more messages follow.
    """
    length = len(conversation.first)
    for turn, (_, answers) in zip(grown.turns, conversation.rounds, strict=True):
        length += 1 + len(answers)
        if not reference.render(messages[:length], conversation.tools).endswith(turn.after):
            return None
    return Finding(Verdict.KEPT, "the template changes an earlier message, which the prompt keeps as it was rendered")


def _check_foreign(
    tokenizer: Any, renderer: ChatRenderer, reference: TemplateReference, conversation: Conversation
) -> Finding:
    """Compare a conversation with control tokens in a text from outside with one without them.

    The texts are compared with the template. Both prompts must have the same number of control tokens. Tokens such as
    `<think>`, which tokenizers do not call special, count only in the result of a tool: a user may write them.
    """
    is_of_tool = bool(conversation.tools)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    control = {int(number) for number, token in added.items() if is_of_tool or token.special}
    harmless = with_text(conversation, "")
    calm, calm_ids = _grow(renderer, reference, harmless)
    if calm.verdict is Verdict.REFUSED:
        return calm
    shown = [token for token in dict.fromkeys(calm_ids) if token in control][:MAX_CONTROL_TOKENS]
    text = "".join(f"{reference.decode([token])}x" for token in shown)
    finding, token_ids = _grow(renderer, reference, with_text(conversation, text))
    if finding.verdict is Verdict.REFUSED:
        return finding
    counts = [sum(token in control for token in ids) for ids in (calm_ids, token_ids)]
    if counts[0] != counts[1]:
        return Finding(
            Verdict.DIFFERENT, f"the text {text!r} of a message became {counts[1] - counts[0]} control tokens"
        )
    return finding


# -- Table ------------------------------------------------------------------------------------------
# The report of `check_template` as a table for a terminal and as JSON.

STYLES = {
    Verdict.EQUAL: "green",
    Verdict.KEPT: "green",
    Verdict.REFUSED: "yellow",
    Verdict.UNVERIFIED: "yellow",
    Verdict.DIFFERENT: "bold red",
}


def as_json(report: TemplateReport) -> Json:
    """`{"usable", "renderer", "refusal", "conversations": [{"name", "verdict", "reason"}, ...]}`."""
    rows = [{**dataclasses.asdict(row), "verdict": row.verdict.value} for row in report.conversations]
    return {
        "usable": report.is_usable,
        "renderer": report.renderer,
        "refusal": report.refusal,
        "conversations": rows,
    }


def show(report: TemplateReport, console: Console) -> None:
    """Print a row for each conversation, and a summary."""
    console.print(Text(f"Renderer: {report.renderer}"))
    if report.refusal:
        console.print(Text(f"Refused: {report.refusal}"))
        return
    table = Table("conversation", "verdict", Column("reason", overflow="fold"))
    for row in report.conversations:
        table.add_row(Text(row.name), Text(row.verdict.value, STYLES[row.verdict]), Text(row.reason))
    console.print(table)
    counts = Counter(row.verdict for row in report.conversations)
    console.print(Text(", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])))
    usable = "usable" if report.has_tools else "usable without tools only"
    console.print(Text(usable if report.is_usable else "not usable"))
