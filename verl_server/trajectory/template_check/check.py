"""`check_template` checks a chat template with a fixed set of conversations."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError, UnsupportedError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.families import FamilyRenderer, get_renderer
from verl_server.trajectory.rendering.foreign_text import texts_of
from verl_server.trajectory.rendering.messages import Message
from verl_server.trajectory.rendering.tokenizer import require_tokenizer
from verl_server.trajectory.template_check.comparison import (
    Finding,
    GrownPrompt,
    TurnText,
    Verdict,
    compare,
    describe_difference,
)
from verl_server.trajectory.template_check.conversations import (
    ARGUMENT_CONVERSATION,
    CONVERSATIONS,
    Conversation,
    with_text,
)
from verl_server.trajectory.template_check.reference import TemplateReference
from verl_server.types import Json

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
