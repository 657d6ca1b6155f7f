"""Rendering of chat messages to token ids. The tokens of earlier turns are never decoded and tokenized again.

A chat template renders whole conversations. `ChatRenderer` renders only the part after an assistant turn, with a short
placeholder for the history, and appends it to the recorded token ids. The cost of a turn grows with its new messages
only. A template that removes thoughts from earlier turns cannot change the recorded token ids.

This is valid only if the rendered part does not depend on the history. `ChatRenderer` checks this property on the
template when it is constructed. A template without the property is refused with UnsupportedError.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.errors import BadInputError, UnsupportedError
from verl_server.trajectory.rendering.call_turns import CallTurns
from verl_server.trajectory.rendering.foreign_text import (
    ControlTokens,
    encode_parts,
    require_shown,
    require_tools_shown,
    without_mark,
)
from verl_server.trajectory.rendering.messages import (
    ASSISTANT_PLACEHOLDER,
    SURROGATE_CURE,
    Message,
    ParsedTurn,
    as_json,
    user_hint,
    validate_messages,
    with_call_ids,
)
from verl_server.trajectory.rendering.probes import (
    FIRST_HISTORY,
    OTHER_HISTORIES,
    PROBE_MESSAGES,
    PROBE_RESULTS,
    PROBE_TURN_ENDS,
)
from verl_server.trajectory.rendering.prompt_cache import PromptCache, key_of
from verl_server.trajectory.rendering.token_codec import TokenCodec
from verl_server.trajectory.rendering.tokenizer import IDENTITY_TEXT, require_tokenizer
from verl_server.trajectory.rendering.truncation import truncate_parts, truncate_text
from verl_server.trajectory.rendering.turn_ends import length_of_overlap, without_end
from verl_server.types import Json
from verl_server.validation import did_you_mean

MAX_CHECKED_TOOLS = 64
"""Maximum number of remembered lists of tools. All are forgotten when there are more."""
MAX_VARIANTS = 16
"""Maximum number of remembered renderers with other template arguments. All are forgotten when there are more."""
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of templates that the renderer sets."""


class ChatRenderer:
    """Renders chat messages to token ids with the chat template of a Hugging Face tokenizer.

    `tokenizer`: an object with `chat_template`, `apply_chat_template`, `encode` and `decode`. `template_arguments`:
    variables of the template, for example `enable_thinking=False`. Raises BadInputError for an object that is no
    tokenizer and for a variable that the template does not have, and UnsupportedError if there is no chat template, if
    the text that the template renders after an assistant turn depends on earlier turns, or if the tokenizer merges
    characters across the end of an assistant turn. A template that refuses the conversations with which it is checked
    raises BadInputError.
    """

    appends_assistant_messages = True
    """Whether `render_next_turn` takes messages of the assistant, and whether there is `render_new_turn`."""

    def __init__(self, tokenizer: Any, **template_arguments: Any) -> None:
        require_tokenizer(tokenizer)
        self._template_arguments = template_arguments
        self._tokenizer, self._codec, self._control_tokens = tokenizer, TokenCodec(tokenizer), ControlTokens(tokenizer)
        self._call_turns = CallTurns(self._apply_template, self._control_tokens)
        self._white_space: dict[int, bool] = {}
        """Whether a token is white space only."""
        self._prompts = PromptCache()
        self._checked_tools: set[bytes] = set()
        """Lists of tools with which the template was checked, as JSON."""
        self._variants: dict[bytes, ChatRenderer] = {}
        if not getattr(tokenizer, "chat_template", None):
            raise UnsupportedError("this tokenizer has no chat template; set tokenizer.chat_template")
        for name in template_arguments:
            if not self.has_template_argument(name):
                words = set(filter(self.has_template_argument, re.findall(r"\w+", str(tokenizer.chat_template))))
                hint = did_you_mean(name, sorted(words))
                raise BadInputError(f"the chat template has no variable {name!r} that can be set{hint}")
        self._check_template(())
        self._control_tokens.learn_turn_tokens(
            lambda messages, is_prompt: self._apply_template(messages, None, is_prompt),
            self.decode_all(sorted(self.end_ids)),
        )

    def _check_template(self, tools: Sequence[Json]) -> None:
        """Raise UnsupportedError if the template or the tokenizer does not allow rendering of single turns."""
        for messages in (*PROBE_MESSAGES, PROBE_RESULTS) if tools else PROBE_MESSAGES:
            rendered: set[str] = set()
            for history in (FIRST_HISTORY, *OTHER_HISTORIES):
                try:
                    rendered.add(self._render_after_turn(history, messages, tools))
                except BadInputError:
                    if messages is PROBE_MESSAGES[0] and history is FIRST_HISTORY:
                        raise  # the template refuses a simple conversation
            if not rendered:
                continue
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

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self._tokenizer

    @property
    def template_arguments(self) -> Json:
        """The variables of the template that were given."""
        return dict(self._template_arguments)

    def has_template_argument(self, name: str) -> bool:
        """Whether the template, or the model family, has a variable of this name that can be set."""
        reserved = (*RESERVED_VARIABLES, *inspect.signature(self._tokenizer.apply_chat_template).parameters)
        found = re.search(rf"\b{re.escape(name)}\b", str(self._tokenizer.chat_template))
        return name not in reserved and found is not None

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatRenderer:
        """The renderer with other template arguments beside its own. Raises the errors of its constructor."""
        if not arguments:
            return self
        key = as_json(dict(arguments))
        if (variant := self._variants.get(key)) is None:
            variant = self._construct({**self._template_arguments, **arguments})
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            self._variants[key] = variant
        return variant

    def _construct(self, arguments: Json) -> ChatRenderer:
        return type(self)(self._tokenizer, **arguments)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Json] | None = None) -> list[int]:
        """Token ids of the first prompt of a conversation. `tools`: JSON schemas of the tools.

        The text of a control token in a message or in a tool is tokenized as ordinary text. In an assistant message
        this holds for tokens that end or begin a message: others belong to a thought or a call. Prompts are cached for
        one minute, so the samples of a group get the same prompt even if the template writes the current time. Raises
        BadInputError for messages that are invalid, that the template refuses or whose content it does not show, for an
        assistant message at the end if the template has no header of a turn after it, and for a tool whose name the
        prompt does not contain. Raises UnsupportedError if the text that the template renders
        after an assistant turn depends on earlier turns when the template gets these tools.
        """
        validate_messages(messages)
        self._require_header_after(messages)
        key = key_of(messages, tools)
        if (cached := self._prompts.get(key)) is not None:
            return cached
        messages, marked_tools, mark = self._control_tokens.mark_prompt(messages, tools or ())
        text = self._apply_template(messages, marked_tools)
        require_shown(messages, text)
        require_tools_shown(tools or (), without_mark(text, mark))
        self._require_usable_with(tools or ())
        token_ids = encode_parts(self.encode, text, mark)
        self._prompts.put(key, token_ids)
        return token_ids

    def _require_usable_with(self, tools: Sequence[Json]) -> None:
        """Check the template with these tools, once for each list of tools."""
        if tools and (key := as_json(tools)) not in self._checked_tools:
            self._check_template(tools)
            if len(self._checked_tools) >= MAX_CHECKED_TOOLS:
                self._checked_tools.clear()
            self._checked_tools.add(key)

    def render_next_turn(
        self,
        messages: Sequence[Message],
        turn_ids: Sequence[int],
        preceding_ids: Sequence[int] = (),
        tools: Sequence[Json] | None = None,
    ) -> list[int]:
        """Token ids between an assistant turn and the first token of the next assistant turn.

        They contain `messages`, the header of the next turn, and the end marker of the finished turn if the policy has
        not generated it. `turn_ids`: token ids of the finished turn. `preceding_ids`: token ids of the messages before
        that turn, in which a model family may have opened a thought. `tools`: JSON schemas of the tools, which some
        templates write again. Texts of control tokens are tokenized as in `render_prompt`. Raises BadInputError for
        messages that are invalid, that the template or the model family refuses or does not show after a turn, and for
        results that the template writes differently after tool calls.
        """
        validate_messages(messages)
        return self._render_next(messages, turn_ids, tools)

    def render_new_turn(self, turn_ids: Sequence[int], tools: Sequence[Json] | None = None) -> list[int]:
        """As `render_next_turn`, for a turn that follows an assistant turn without a message between.

        Raises BadInputError if the template has no header of a turn there.
        """
        return self._render_next((), turn_ids, tools)

    def _render_next(
        self, messages: Sequence[Message], turn_ids: Sequence[int], tools: Sequence[Json] | None
    ) -> list[int]:
        self._require_header_after(messages)
        messages, tools, mark = self._control_tokens.mark_prompt(with_call_ids(messages), tools or ())
        text = self._render_after_turn(FIRST_HISTORY, messages, tools)
        require_shown(messages, text)
        token_ids = encode_parts(self.encode, text, mark)
        return token_ids[length_of_overlap(turn_ids, token_ids, self._is_white_space) :]

    def _require_header_after(self, messages: Sequence[Message]) -> None:
        """Raise BadInputError if the policy would generate directly after the end of an assistant message."""
        if all(message["role"] == "assistant" for message in messages[-1:]) and not self._has_header_after_assistant:
            raise BadInputError(
                "the chat template has no header of an assistant turn after an assistant message, so the policy would "
                "generate after its end. Let the messages end with a message of another role"
            )

    @functools.cached_property
    def _has_header_after_assistant(self) -> bool:
        """Whether a prompt that ends with an assistant message goes on as one that ends with a user message."""
        after_assistant, after_user = (
            self._render_after_turn(FIRST_HISTORY, messages, None) for messages in ((), PROBE_MESSAGES[0])
        )
        pairs = enumerate(zip(after_assistant, after_user, strict=False))
        end = next((place for place, (one, other) in pairs if one != other), len(after_assistant))
        header = after_assistant[end:]  # without the end marker
        return bool(header.strip()) and after_user.endswith(header)

    def _is_white_space(self, token_id: int) -> bool:
        if token_id not in self._white_space:
            self._white_space[token_id] = not self.decode_all([token_id]).strip()
        return self._white_space[token_id]

    def parse_turn(
        self, turn_ids: Sequence[int], preceding_ids: Sequence[int], tools: Sequence[Json]
    ) -> ParsedTurn | None:
        """Text, thoughts and tool calls of a turn. None if this renderer does not know the model family's tokens."""
        return None

    @property
    def identity(self) -> Json:
        """What the token ids of messages depend on, as plain values: the chat template, and how a text is tokenized."""
        identity = {"chat_template": self._tokenizer.chat_template, "token_ids": self.encode(IDENTITY_TEXT)}
        return identity | {f"template argument {name!r}": value for name, value in self._template_arguments.items()}

    @property
    def pad_token_id(self) -> int:
        """Token with which batches are filled: the padding token of the tokenizer, or its token for the end of a text.

        0 if the tokenizer has neither of them. The attention mask excludes the padding.
        """
        ids = (getattr(self._tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        return int(next((token for token in ids if token is not None), 0))

    @functools.cached_property
    def stop_token_ids(self) -> list[int]:
        """The special token with which the template ends an assistant turn. Empty if the turn ends with other text."""
        text = self._render_after_turn(FIRST_HISTORY, [{"role": "user", "content": "a"}], None).lstrip()
        first = self.encode(text)[:1]
        return first if self.decode_all(first) and not self.decode(first) else []

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without added special tokens. Raises BadInputError for a text with a lone surrogate."""
        try:
            _ = text.isascii() or text.encode()
        except UnicodeEncodeError as error:
            reason = f"{error.reason}; {SURROGATE_CURE}"
            raise BadInputError(f"the text {text!r:.80} cannot be tokenized: {reason}") from None
        return self._codec.encode(text)

    def encode_foreign(self, text: str, *, prefix: str = "", suffix: str = "") -> list[int]:
        """Token ids of `prefix`, `text` and `suffix`. The text of a control token in `text` becomes ordinary tokens."""
        text, mark = self._control_tokens.mark_text(text)
        return encode_parts(self.encode, prefix + text + suffix, mark)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._codec.decode(token_ids, skip_special_tokens=True)

    def decode_raw(self, turn_ids: Sequence[int], text: str) -> str:
        """Text of the token ids of a turn with special tokens such as `[TOOL_CALLS]`, but without its end marker.

        `text`: what `decode` returns for the turn.
        """
        kept = without_end(turn_ids, self.end_ids)
        special_ids = self._control_tokens.special_ids
        if special_ids.isdisjoint(kept) and special_ids.issuperset(turn_ids[len(kept) :]):
            return text
        return self.decode_all(kept)

    @functools.cached_property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end a turn. Some models also end turns with the token for the end of a text, the padding."""
        others = (getattr(self._tokenizer, name, None) for name in ("eos_token_id", "pad_token_id"))
        return frozenset((*self.stop_token_ids, *(int(token) for token in others if token is not None)))

    def truncate(self, text: str, max_tokens: int, cut: str = "end") -> str:
        """The text, or `max_tokens` tokens of it, without a part of a character, with `TRUNCATION_MARK` at the cut.

        `cut`: the part that is cut out of a longer text, "start", "middle" or "end".
        """
        return truncate_text(text, max_tokens, cut, self.encode_foreign, self.decode_all)

    def truncate_content(self, content: str | Sequence[Any], max_tokens: int, cut: str = "end") -> str | list[Any]:
        """The content of a message (a string or a list of parts) whose text is truncated to `max_tokens` tokens.

        Each cut adds `TRUNCATION_MARK`. The text parts share `max_tokens` in their order. Other parts are unchanged.
        """
        if isinstance(content, str):
            return self.truncate(content, max_tokens, cut)
        return truncate_parts(
            content,
            max_tokens,
            lambda text, limit: self.truncate(text, limit, cut),
            lambda text: len(self.encode_foreign(text)),
        )

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, with special tokens."""
        return self._codec.decode(token_ids, skip_special_tokens=False)

    def _render_after_turn(
        self, history: Sequence[Message], messages: Sequence[Message], tools: Sequence[Json] | None
    ) -> str:
        """The text that the template renders after an assistant turn that follows `history`."""
        placeholder, with_calls = {"role": "assistant", "content": ASSISTANT_PLACEHOLDER}, ""
        if messages and messages[0]["role"] == "tool":
            with contextlib.suppress(BadInputError):
                with_calls, end = self._call_turns.render(history, messages, tools)
                if end is not None:
                    return with_calls[end:]
        text = self._apply_template([*history, placeholder, *messages], tools)
        _, found, after_turn = text.rpartition(ASSISTANT_PLACEHOLDER)
        if not found:
            raise UnsupportedError("this chat template does not show assistant messages that precede other messages")
        if with_calls and not with_calls.endswith(after_turn.lstrip()):
            raise BadInputError("the chat template renders results differently after tool calls; use another template")
        return after_turn

    def _apply_template(
        self, messages: Sequence[Message], tools: Sequence[Json] | None, add_generation_prompt: bool = True
    ) -> str:
        is_dict = isinstance(self._tokenizer.chat_template, dict)  # a list of tools, also an empty one, selects one
        needs_tools = tools or (is_dict and any(message["role"] == "tool" for message in messages))
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools or ()) if needs_tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._template_arguments,
            )
        except Exception as error:
            raise BadInputError(f"the chat template refuses these messages: {error}{user_hint(messages)}") from error
        return str(text)
