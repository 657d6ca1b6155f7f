"""Rendering of chat messages to token ids such that no token of an earlier turn is ever tokenized again.

A chat template renders whole conversations. `ChatRenderer` renders only the part after an assistant turn, with a short
placeholder for the history, and appends it to the recorded token ids. The cost of a turn grows with its new messages
only. A template that removes thoughts from earlier turns cannot change the recorded token ids.

This is valid only if the rendered part does not depend on the history. `ChatRenderer` checks this property on the
template when it is constructed. A template without the property is refused with UnsupportedError.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError, UnsupportedError
from verl_server.trajectory.messages import ASSISTANT_PLACEHOLDER, SURROGATE_CURE, Message, validate_messages
from verl_server.types import Json

logger = logging.getLogger(__name__)

PROBE_HISTORIES: tuple[tuple[Json, ...], ...] = (
    ({"role": "user", "content": "a"},),
    (
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ),
)
"""Conversations after which a template must render the same new messages in the same way."""
PROBE_MESSAGES: tuple[tuple[Json, ...], ...] = (
    ({"role": "user", "content": "f"},),
    ({"role": "user", "content": " \n g"}, {"role": "user", "content": "h"}),
)
"""New messages with which a template is checked."""
PROBE_TURN_ENDS = ("x", "x ", "y\n")
"""Ends of assistant turns after which the tokenizer must keep a token boundary."""
MAX_CHARACTERS_PER_TOKEN = 16
"""Upper bound of the characters of one token. Nearly all tokens of known vocabularies are shorter."""
IDENTITY_TEXT = "The tokenizer splits 1234 words, also d\u00e9j\u00e0 vu.\n\n\u4f60\u597d"
"""Text by whose token ids tokenizers are told apart."""
TOKENIZER_METHODS = ("apply_chat_template", "encode", "decode")
"""Methods of a tokenizer that a renderer calls."""
REPLACEMENT_CHARACTER = "\ufffd"
"""Character that tokenizers decode for an incomplete character."""
TRUNCATION_MARK = " [cut]"
"""Text at the end of a truncated tool result."""


@dataclass(frozen=True)
class ParsedToolCall:
    """A tool call that a renderer found in the tokens of a turn. The call can be malformed."""

    name: str | None
    arguments: Json | None
    parse_error: str | None
    """Reason why the call cannot be parsed. None for a well-formed call."""


@functools.cache
def _warn_of_ignored_tools(chat_template: str) -> None:
    """Log a warning. Cached: a program that makes a renderer for each training step gets one warning."""
    logger.warning(
        "the chat template ignores the tools, so the prompt does not tell the policy about them. Describe the tools in "
        "the messages, or set tokenizer.chat_template to a template that renders `tools`. The template begins with %r",
        chat_template[:40],
    )


def require_tokenizer(tokenizer: object) -> None:
    """Raise BadInputError unless `tokenizer` has the methods of a Hugging Face tokenizer."""
    if isinstance(tokenizer, (str, os.PathLike)):
        path = os.fspath(tokenizer)
        raise BadInputError(
            f"a renderer needs a tokenizer, got the path or name {path!r}; pass "
            f"transformers.AutoTokenizer.from_pretrained({path!r})"
        )
    missing = [name for name in TOKENIZER_METHODS if not callable(getattr(tokenizer, name, None))]
    if missing:
        inner = "; pass its attribute `tokenizer`" if hasattr(tokenizer, "tokenizer") else ""
        raise BadInputError(
            f"a renderer needs a Hugging Face tokenizer, but {type(tokenizer).__name__} has no {missing[0]}(){inner}"
        )


class ChatRenderer:
    """Renders chat messages to token ids with the chat template of a Hugging Face tokenizer.

    `tokenizer`: an object with `chat_template`, `apply_chat_template`, `encode` and `decode`. Raises BadInputError for
    an object that is no tokenizer, and UnsupportedError if there is no chat template, if the part that the template
    renders after a turn depends on earlier turns, or if the tokenizer joins the end of a turn with the text after it.
    A template that refuses the conversations with which it is checked raises BadInputError.
    """

    def __init__(self, tokenizer: Any) -> None:
        require_tokenizer(tokenizer)
        self._tokenizer = tokenizer
        self._has_compared_tools = False
        """Whether a prompt with tools was compared with the same prompt without tools."""
        if not getattr(tokenizer, "chat_template", None):
            raise UnsupportedError("this tokenizer has no chat template; set tokenizer.chat_template")
        self._check_template()

    def _check_template(self) -> None:
        """Raise UnsupportedError if the template or the tokenizer does not allow rendering of single turns."""
        for messages in PROBE_MESSAGES:
            rendered = {self._render_after_turn(history, messages) for history in PROBE_HISTORIES}
            if len(rendered) > 1:
                raise UnsupportedError(
                    f"this chat template renders {messages[0]['role']!r} messages differently after different "
                    f"histories: {sorted(rendered)}"
                )
            (text,) = rendered
            for turn_end in PROBE_TURN_ENDS:
                if self.encode(turn_end + text) != [*self.encode(turn_end), *self.encode(text)]:
                    raise UnsupportedError(
                        f"the tokenizer joins the end of an assistant turn with the text after it: {text[:40]!r}"
                    )

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Json] | None = None) -> list[int]:
        """Token ids of the first prompt of a conversation. `tools`: JSON schemas of the tools.

        Raises BadInputError for messages that are invalid or that the template refuses. If the template ignores
        `tools`, a warning is logged once for each template.
        """
        validate_messages(messages)
        text = self._apply_template(messages, tools)
        if tools and not self._has_compared_tools:
            self._has_compared_tools = True
            if text == self._apply_template(messages, None):
                _warn_of_ignored_tools(str(self._tokenizer.chat_template))
        return self.encode(text)

    def render_next_turn(
        self, messages: Sequence[Message], turn_ids: Sequence[int], preceding_ids: Sequence[int] = ()
    ) -> list[int]:
        """Token ids between an assistant turn and the first token of the next assistant turn.

        They contain `messages`, the header of the next turn, and the end marker of the finished turn if the policy has
        not generated it.
        `turn_ids`: token ids of the finished turn. `preceding_ids`: token ids of the messages before the finished
        turn, in which a model family may have opened a thought. Raises BadInputError for messages that are invalid or
        that the template or the model family refuses after a turn.
        """
        validate_messages(messages)
        token_ids = self.encode(self._render_after_turn(PROBE_HISTORIES[0], messages))
        if not turn_ids or turn_ids[-1] not in token_ids:
            return token_ids
        end = token_ids.index(turn_ids[-1])
        # The template may have white space between the content and the end marker, which the policy has generated too.
        before = str(self._tokenizer.decode(token_ids[:end], skip_special_tokens=False))
        return token_ids if before.strip() else token_ids[end + 1 :]

    def parse_tool_calls(
        self, turn_ids: Sequence[int], preceding_ids: Sequence[int], tools: Sequence[Json]
    ) -> list[ParsedToolCall] | None:
        """Tool calls in the token ids of a turn. None if this renderer does not know the model family's tool tokens."""
        return None

    @property
    def identity(self) -> Json:
        """What the token ids of messages depend on, as plain values: the chat template, and how a text is tokenized."""
        return {"chat_template": self._tokenizer.chat_template, "token_ids": self.encode(IDENTITY_TEXT)}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without added special tokens. Raises BadInputError for a text with a lone surrogate."""
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise BadInputError(
                    f"the text {text!r:.80} cannot be tokenized: {error.reason}; {SURROGATE_CURE}"
                ) from None
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def truncate(self, text: str, max_tokens: int) -> str:
        """The text, or its first `max_tokens` tokens, without a part of a character, followed by `TRUNCATION_MARK`."""
        max_characters = MAX_CHARACTERS_PER_TOKEN * max_tokens
        token_ids = self.encode(text[:max_characters])  # encoding ten megabytes would take seconds
        if len(token_ids) <= max_tokens and len(text) <= max_characters:
            return text
        kept = str(self._tokenizer.decode(token_ids[:max_tokens], skip_special_tokens=False))
        while kept.endswith(REPLACEMENT_CHARACTER) and not text.startswith(kept):
            kept = kept[:-1]
        return kept + TRUNCATION_MARK

    def truncate_content(self, content: str | Sequence[Any], max_tokens: int) -> str | list[Any]:
        """The content of a message with at most `max_tokens` tokens of text: a string, or a list of content parts.

        The text parts of a list share `max_tokens` in their order. Images and other parts are kept unchanged.
        """
        if isinstance(content, str):
            return self.truncate(content, max_tokens)
        parts: list[Any] = []
        for part in content:
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                text = self.truncate(part["text"], max_tokens)
                max_tokens = max(max_tokens - len(self.encode(text)), 0)
                part = {**part, "text": text}
            parts.append(part)
        return parts

    def _render_after_turn(self, history: Sequence[Message], messages: Sequence[Message]) -> str:
        """The text that the template renders after an assistant turn that follows `history`."""
        placeholder = {"role": "assistant", "content": ASSISTANT_PLACEHOLDER}
        text = self._apply_template([*history, placeholder, *messages], None)
        _, found, after_turn = text.rpartition(ASSISTANT_PLACEHOLDER)
        if not found:
            raise UnsupportedError(
                "this chat template does not show the content of assistant messages that precede other messages"
            )
        return after_turn

    def _apply_template(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else list(tools),
                add_generation_prompt=True,
                tokenize=False,
            )
        except Exception as error:
            raise BadInputError(f"the chat template refuses these messages: {error}") from error
        return str(text)
