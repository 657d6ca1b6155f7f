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
import hashlib
import inspect
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from verl_server.errors import BadInputError, UnsupportedError
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
    stand_in_calls,
    user_hint,
    validate_messages,
    with_call_ids,
)
from verl_server.trajectory.rendering.tokenizer import (
    IDENTITY_TEXT,
    TokenCodec,
    require_tokenizer,
    truncate_parts,
    truncate_text,
)
from verl_server.types import Json
from verl_server.validation import did_you_mean

# -- Call turns -------------------------------------------------------------------------------------
# Turns with tool calls in a chat template: where they end, and the text that the template renders after them.
#
# Some templates refuse results of tools without calls before them, or read the names of the tools from the calls. So
# the renderer renders results after a turn with calls. These calls only stand for those that the policy has written.

MAX_CACHED_TURNS = 64
ApplyTemplate = Callable[[Sequence[Message], Sequence[Json] | None, bool], str]
"""Renders messages with tools. The last argument: whether the header of the next turn is added."""


class CallTurns:
    """Renders results of tools after a turn with calls. Keeps rendered turns: most results are of a few tools."""

    def __init__(self, apply_template: ApplyTemplate, control_tokens: ControlTokens) -> None:
        self._apply_template, self._control_tokens = apply_template, control_tokens
        self._turns: dict[bytes, tuple[str, int | None]] = {}
        """Rendered turns, and where they end. The text is empty if the template does not show turns with calls."""

    def render(
        self, history: Sequence[Message], results: Sequence[Message], tools: Sequence[Json] | None
    ) -> tuple[str, int | None]:
        """The text of `history`, a turn with calls and `results`, and the offset of the end marker of the turn.

        The offset is None if the template has no end marker for all turns, or if the results change how the turn is
        rendered. The text is empty if the template does not show turns with calls. Raises BadInputError if the template
        refuses the messages.
        """
        plain = {"role": "assistant", "content": ASSISTANT_PLACEHOLDER}
        turns = [*history, plain | stand_in_calls(results)]
        key, text = as_json([turns, tools]), self._apply_template([*turns, *results], tools, True)
        turn, end = self._turns.get(key, (None, None))
        if turn is None or not text.startswith(turn):  # a template may write the present date
            turn, end = self._render_turn(turns, [*history, plain], tools)
            if len(self._turns) >= MAX_CACHED_TURNS:
                self._turns.clear()
            self._turns[key] = turn, end
        return text if turn else "", end if text.startswith(turn) else None

    def _render_turn(
        self, turns: Sequence[Message], without_calls: Sequence[Message], tools: Sequence[Json] | None
    ) -> tuple[str, int | None]:
        """The text of `turns`, of which the last turn has calls, and the offset of its end marker.

        The end marker is a control token at the end of the turn, with the white space after it. A turn without calls
        ends with a control token too, which may be another one: otherwise the token may close a call.
        """
        turn, plain = self._apply_template(turns, tools, False), self._apply_template(without_calls, tools, False)
        before, found, _ = plain.rpartition(ASSISTANT_PLACEHOLDER)
        if found and before.startswith(turn):
            return "", None
        end, end_without_calls = self._control_tokens.find_end(turn), self._control_tokens.find_end(plain)
        has_end = bool(found) and end_without_calls > len(before) and end > turn.rfind(ASSISTANT_PLACEHOLDER)
        return turn, end if has_end else None


# -- Turn ends --------------------------------------------------------------------------------------
# The tokens at the end of a turn: the end marker, which the policy generates or the chat template adds.

MAX_END_MARKER_TOKENS = 16
"""Maximum number of tokens of the marker at the end of a turn."""


def length_of_overlap(turn_ids: Sequence[int], token_ids: Sequence[int], is_white_space: Callable[[int], bool]) -> int:
    """Number of tokens after a turn that the policy has generated already: the end marker, which may be several.

    The template may have white space before the end marker. The policy need not generate it.
    """
    best = start = 0
    while start < len(token_ids):
        for length in range(min(len(turn_ids), len(token_ids) - start, MAX_END_MARKER_TOKENS), 0, -1):
            if turn_ids[-length] != token_ids[start]:
                continue
            if list(turn_ids[-length:]) == list(token_ids[start : start + length]):
                best = max(best, start + length)
                break
        if not is_white_space(token_ids[start]):
            break
        start += 1
    return best


def without_end(turn_ids: Sequence[int], end_ids: Collection[int]) -> Sequence[int]:
    """The tokens of a turn without the tokens `end_ids` at its end."""
    length = len(turn_ids)
    while length and turn_ids[length - 1] in end_ids:
        length -= 1
    return turn_ids[:length]


# -- Probes -----------------------------------------------------------------------------------------
# Conversations and texts with which a chat template and a tokenizer are checked when a renderer is made.

FIRST_HISTORY: tuple[Json, ...] = ({"role": "user", "content": "a"},)
LATER_TURNS: tuple[Json, ...] = (
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "e"},
)
OTHER_HISTORIES: tuple[tuple[Json, ...], ...] = (LATER_TURNS, ({"role": "system", "content": "b"}, *LATER_TURNS))
"""Conversations after which new messages must be rendered as after `FIRST_HISTORY`. Some templates refuse the last."""
PROBE_MESSAGES: tuple[tuple[Json, ...], ...] = (
    ({"role": "user", "content": "f"},),
    ({"role": "user", "content": " \n g"}, {"role": "user", "content": "h"}),
)
"""New messages with which a template is checked, where it accepts them: some templates refuse two user messages."""
PROBE_RESULTS: tuple[Message, ...] = tuple(with_call_ids([{"role": "tool", "content": "r"}]))
"""The result of a tool, with which a template is checked when it gets tools."""
PROBE_TURN_ENDS = ("x", "x ", "y\n")
"""Ends of assistant turns after which the tokenizer must keep a token boundary."""


# -- Prompt cache -----------------------------------------------------------------------------------
# First prompts that were rendered a moment ago: all samples of a group begin with the same prompt.

LIFETIME_S = 60.0
"""Seconds for which a prompt is used again. A template may write the present date or time."""
MAX_PROMPTS = 64


class PromptCache:
    """Token ids of first prompts, for `LIFETIME_S` seconds after they were rendered."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, tuple[float, list[int]]] = {}
        """Time of the rendering and token ids, the oldest first."""
        self._lock = threading.Lock()

    def get(self, key: bytes) -> list[int] | None:
        """A copy of the token ids of a prompt. None if the prompt was not rendered in the last `LIFETIME_S` seconds."""
        rendered_at, token_ids = self._prompts.get(key, (-LIFETIME_S, None))
        is_fresh = time.monotonic() - rendered_at < LIFETIME_S
        return token_ids.copy() if token_ids is not None and is_fresh else None

    def put(self, key: bytes, token_ids: Sequence[int]) -> None:
        """Keep the token ids of a prompt."""
        with self._lock:
            self._prompts.pop(key, None)
            if len(self._prompts) >= MAX_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            self._prompts[key] = time.monotonic(), list(token_ids)


def key_of(messages: Sequence[Message], tools: Sequence[Json] | None) -> bytes:
    """The key of a prompt. Messages and tools are JSON values, and a message may contain an image."""
    return hashlib.sha256(as_json([[dict(message) for message in messages], tools])).digest()


# -- Chat renderer ----------------------------------------------------------------------------------

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
