"""Renderers for known model families, which use the package `renderers`.

`renderers` contains handwritten renderers for released models. A family renderer knows facts that a chat template does
not give: which tokens are a tool call, where a thought ends, and how a turn that was cut off is closed. Its output is
checked: the next prompt must begin with the recorded token ids.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

import pydantic
from renderers import ToolCallParseStatus, create_renderer
from renderers.base import MODEL_RENDERER_MAP
from renderers.configs import config_from_name

from verl_server.errors import BadInputError, UnsupportedError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.foreign_text import (
    ControlTokens,
    encode_parts,
    has_mark,
    name_of,
    require_shown,
    require_tools_shown,
    strings_of,
    texts_of,
    without_mark,
)
from verl_server.trajectory.rendering.messages import (
    Message,
    ParsedToolCall,
    ParsedTurn,
    validate_messages,
    with_call_ids,
)
from verl_server.trajectory.rendering.tokenizer import IDENTITY_TEXT, TokenCodec, require_tokenizer
from verl_server.trajectory.rendering.vision import VisionRenderer, is_vision_processor
from verl_server.types import Json
from verl_server.validation import did_you_mean

logger = logging.getLogger(__name__)


# -- Family calls -----------------------------------------------------------------------------------
# Tool calls that the package `renderers` has parsed, and the results of these calls.

TOO_DEEP = ParsedToolCall(None, None, "the arguments have too many levels")
"""Stands for the calls of a turn whose arguments have so many levels that Python cannot parse them."""


def as_parsed_tool_call(call: Any) -> ParsedToolCall:
    """Convert a tool call of the package."""
    if call.status is not ToolCallParseStatus.OK:
        return ParsedToolCall(call.name, None, str(call.status.value), call.id)
    if not isinstance(call.arguments, dict):
        return ParsedToolCall(call.name, None, "the arguments are not a JSON object", call.id)
    return ParsedToolCall(call.name, call.arguments, None, call.id)


def with_sampled_calls(messages: Sequence[Message], parse: Callable[[], Sequence[ParsedToolCall]]) -> list[Message]:
    """The messages after a turn. Results that lack the name or the id of their call get those of a call of the turn.

    A result belongs to the first call that no result before it has, and that has its name and its id as far as they are
    known. `parse`: returns the calls of the turn, and is called if a result lacks one of them.
    """
    results = [message for message in messages if message["role"] == "tool"]
    if all(message.get("name") and message.get("tool_call_id") for message in results):
        return list(messages)
    calls = list(parse())
    return [_with_call(message, calls) if message["role"] == "tool" else message for message in messages]


def _with_call(result: Message, calls: list[ParsedToolCall]) -> Message:
    """The result with the name and the id of its call, which is removed from `calls`."""
    name, call_id = result.get("name"), result.get("tool_call_id")
    for index, call in enumerate(calls):
        if (not name or call.name == name) and (not call_id or call.id in (None, call_id)):
            del calls[index]
            return {**result, "name": name or call.name, "tool_call_id": call_id or call.id}
    return result


# -- Families ---------------------------------------------------------------------------------------

CACHE_PREFIX = "models--"
"""Beginning of the name of a model's folder in the cache of the Hugging Face hub: `models--Qwen--Qwen3-8B`."""
PROBE_PROMPTS: tuple[list[Message], ...] = (
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}],
)
"""First prompts by which a family is compared with a chat template."""
PROBE_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def get_renderer(tokenizer: Any, family: str | None = None, **template_arguments: Any) -> ChatRenderer:
    """The renderer of a known model family, or the generic `ChatRenderer`.

    `tokenizer`: a Hugging Face tokenizer, for example `AutoTokenizer.from_pretrained(path)`. For messages with images,
    the processor of a vision-language model, `AutoProcessor.from_pretrained(path)`. `family`: name of a family in the
    package `renderers` ("qwen3", "llama-3", ...). If it is None, the family is derived from `tokenizer.name_or_path`.
    The name of a released model on the Hub selects its family. A local folder with the name of a released model selects
    the family only if the family renders first prompts as the chat template does. In all other cases the generic
    renderer is used, which checks the template. `template_arguments`: for example `enable_thinking=False`. Raises
    BadInputError for an object that is no tokenizer, for example a path, and for an argument that the template or the
    family does not have, and UnsupportedError for a family that is unknown or does not fit the tokenizer, and for a
    chat template that `ChatRenderer` cannot use.
    """
    if is_vision_processor(tokenizer):
        if family is not None:
            raise BadInputError("family is for messages without images: pass a tokenizer, or leave out the family")
        return VisionRenderer(tokenizer, **template_arguments)
    require_tokenizer(tokenizer)
    name = str(getattr(tokenizer, "name_or_path", ""))
    if known_family := family or MODEL_RENDERER_MAP.get(name):
        return FamilyRenderer(tokenizer, known_family, **template_arguments)
    if (named_family := _family_of_folder(name)) is not None:
        with contextlib.suppress(UnsupportedError):  # the folder has the tokenizer of another family
            renderer = FamilyRenderer(tokenizer, named_family, **template_arguments)
            if _renders_as_template(renderer, tokenizer, template_arguments):
                return renderer
        logger.info(
            "the folder %s is called as a model of the family %s, but its chat template is another one, so the generic "
            "renderer is used; pass family=%r if the family is right",
            name,
            named_family,
            named_family,
        )
    return ChatRenderer(tokenizer, **template_arguments)


def _family_of_folder(path: str) -> str | None:
    """The family of a released model after which a folder is named: `.../Qwen3-8B`, or a folder of the hub's cache."""
    names: dict[str, str] = {model.rpartition("/")[2]: family for model, family in MODEL_RENDERER_MAP.items()}
    for part in PurePath(path).parts[::-1]:
        if part.startswith(CACHE_PREFIX):
            released: str | None = MODEL_RENDERER_MAP.get(part.removeprefix(CACHE_PREFIX).replace("--", "/"))
            return released
    return names.get(PurePath(path).name)


def _renders_as_template(renderer: FamilyRenderer, tokenizer: Any, template_arguments: Json) -> bool:
    """Whether the first prompts of a family are those of the chat template, with and without tools."""
    for messages in PROBE_PROMPTS:
        for tools in (None, [PROBE_TOOL]):
            try:
                options = {**template_arguments, "add_generation_prompt": True, "tokenize": False}
                text = tokenizer.apply_chat_template(messages, tools=tools, **options)
                if renderer.encode(str(text)) != renderer.render_prompt(messages, tools):
                    return False
            except Exception:  # noqa: BLE001 - the template or the family refuses the messages
                return False
    return True


class FamilyRenderer(ChatRenderer):
    """Renders chat messages for one known model family. Thoughts of earlier turns stay in the prompt.

    Keeping the thoughts makes the prompt contain exactly the sampled tokens, which are trained on. Raises
    BadInputError for an object that is no tokenizer and for a template argument that the family does not have, and
    UnsupportedError if the family is unknown or the tokenizer does not belong to it.
    """

    appends_assistant_messages = False

    def __init__(self, tokenizer: Any, family: str, **template_arguments: Any) -> None:
        require_tokenizer(tokenizer)
        self._template_arguments = template_arguments
        self._tokenizer, self._codec, self.family = tokenizer, TokenCodec(tokenizer), family
        self._control_tokens = ControlTokens(tokenizer)
        try:
            config = _family_config(family)
        except Exception as error:
            raise UnsupportedError(f"this tokenizer is not of the family {family!r}: {error}") from error
        self._argument_names = frozenset(type(config).model_fields) - {"name", "thinking_retention", "image_cache_max"}
        self._variants: dict[bytes, ChatRenderer] = {}
        config = self._with_arguments(config)
        try:
            self._family: Any = create_renderer(tokenizer, config)
            self._marking_tokenizer = _MarkingTokenizer(tokenizer)
            self._marking_family: Any = create_renderer(self._marking_tokenizer, config)
            """Renders messages with marks, see `foreign_text`."""
            self._control_tokens.learn_turn_tokens(
                lambda messages, is_prompt: self.decode_all(
                    self._family.render_ids(_as_dicts(messages), add_generation_prompt=is_prompt)
                ),
                self.decode_all(sorted(self.end_ids)),
            )
        except Exception as error:
            raise UnsupportedError(f"this tokenizer is not of the family {family!r}: {error}") from error

    def has_template_argument(self, name: str) -> bool:
        return name in self._argument_names

    def _construct(self, arguments: Json) -> ChatRenderer:
        return type(self)(self._tokenizer, self.family, **arguments)

    def _with_arguments(self, config: Any) -> Any:
        """The family's configuration with the template arguments. Raises BadInputError for those it does not have."""
        given, known = self._template_arguments, sorted(self._argument_names)
        if unknown := [name for name in given if name not in known]:
            found = f"{unknown[0]!r}; it has {known}{did_you_mean(unknown[0], known)}"
            raise BadInputError(f"the family {self.family!r} has no template argument {found}")
        try:
            return type(config)(**{**config.model_dump(exclude_unset=True), **given}) if given else config
        except pydantic.ValidationError as error:
            raise BadInputError(f"the family {self.family!r} refuses the template arguments: {error}") from error

    @property
    def identity(self) -> Json:
        identity = {"family": self.family, "token_ids": self.encode(IDENTITY_TEXT)}
        return identity | {f"template argument {name!r}": value for name, value in self._template_arguments.items()}

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Json] | None = None) -> list[int]:
        validate_messages(messages)
        family, messages, marked_tools = self._family_for(messages, tools or ())
        try:
            token_ids = family.render_ids(_as_dicts(messages), tools=marked_tools or None, add_generation_prompt=True)
        except Exception as error:
            raise BadInputError(f"the family {self.family!r} refuses these messages: {error}") from error
        token_ids = self._checked(messages, marked_tools, [int(token) for token in token_ids])
        require_tools_shown(tools or (), self.decode_all(token_ids))
        return token_ids

    @functools.cached_property
    def stop_token_ids(self) -> list[int]:
        """The tokens with which the family ends an assistant turn."""
        return [int(token) for token in self._family.get_stop_token_ids()]

    def render_next_turn(
        self,
        messages: Sequence[Message],
        turn_ids: Sequence[int],
        preceding_ids: Sequence[int] = (),
        tools: Sequence[Json] | None = None,
    ) -> list[int]:
        validate_messages(messages)
        messages = with_sampled_calls(
            messages, lambda: self.parse_turn(turn_ids, preceding_ids, tools or ()).tool_calls
        )
        family, messages, marked_tools = self._family_for(with_call_ids(messages), tools or ())
        # `renderers` needs a prompt that is not empty, and looks only for an open thought in it.
        prompt_ids = list(preceding_ids or self._family.get_stop_token_ids()[:1])
        recorded_ids = [*prompt_ids, *turn_ids]
        try:
            bridged = family.bridge_to_next_turn(
                prompt_ids, list(turn_ids), _as_dicts(messages), tools=marked_tools or None
            )
        except Exception as error:
            raise BadInputError(f"the family {self.family!r} refuses these messages: {error}") from error
        token_ids = [] if bridged is None else [int(token) for token in bridged.token_ids]
        if token_ids[: len(recorded_ids)] != recorded_ids:
            roles = [message["role"] for message in messages]
            raise BadInputError(
                f"the family {self.family!r} cannot append messages with the roles {roles} to the recorded turn"
            )
        return self._checked(messages, marked_tools, token_ids[len(recorded_ids) :])

    def _checked(self, messages: Sequence[Message], tools: Sequence[Json], token_ids: list[int]) -> list[int]:
        """The token ids. Raises BadInputError if they lack the content of a message, or contain a mark.

        `messages` and `tools` have the marks.
        """
        text, mark = self.decode_all(token_ids), self._marking_tokenizer.mark
        if has_mark(text, mark):
            marked = [without_mark(name_of(tool), mark) for tool in tools if any(mark in s for s in strings_of(tool))]
            raise BadInputError(
                f"{f'the tool {marked[0]!r}' if marked else 'a message'} contains the text of a control token, which "
                f"the family {self.family!r} cannot render as text; remove it, for example '<|im_end|>'"
            )
        require_shown(_as_read(messages, mark, lambda content: self.decode_all(self.encode(content))), text)
        return token_ids

    def _family_for(self, messages: Sequence[Message], tools: Sequence[Json]) -> tuple[Any, list[Message], list[Json]]:
        """The renderer of the package, and the messages and tools for it: with marks if they contain control tokens."""
        marked, marked_tools, mark = self._control_tokens.mark_prompt(messages, tools)
        self._marking_tokenizer.mark = mark
        return (self._marking_family if mark else self._family), marked, marked_tools

    def parse_turn(self, turn_ids: Sequence[int], preceding_ids: Sequence[int], tools: Sequence[Json]) -> ParsedTurn:
        try:
            response = self._family.parse_response(
                list(turn_ids), tools=list(tools) or None, prompt_ids=list(preceding_ids) or None
            )
        except RecursionError:
            return ParsedTurn(self.decode_raw(turn_ids, self.decode(turn_ids)), "", [TOO_DEEP])
        calls = [as_parsed_tool_call(call) for call in response.tool_calls]
        return ParsedTurn(response.content, response.reasoning_content or "", calls)


class _MarkingTokenizer:
    """A tokenizer that tokenizes a text in the parts between marks, see `foreign_text`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._local = tokenizer, threading.local()

    @property
    def mark(self) -> str:
        """Mark in the texts that the current thread tokenizes. Threads render different messages at the same time."""
        return getattr(self._local, "mark", "")

    @mark.setter
    def mark(self, mark: str) -> None:
        self._local.mark = mark

    def encode(self, text: str, **options: Any) -> list[int]:
        """Token ids of a text."""
        return encode_parts(lambda part: self._tokenizer.encode(part, **options), text, self.mark)

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":  # the package would ask for the offsets of tokens in a text with marks
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def _as_read(messages: Sequence[Message], mark: str, read: Callable[[str], str]) -> list[Message]:
    """The messages without marks, with the texts that the policy reads: a tokenizer may normalize characters."""
    contents = ["".join(texts_of(message)) for message in messages]
    contents = [content.replace(mark, "") if mark else content for content in contents]
    return [{**message, "content": read(content)} for message, content in zip(messages, contents, strict=True)]


def _family_config(family: str) -> Any:
    """The family's configuration that keeps all thoughts, or its default if the family has no such option."""
    config = config_from_name(family)
    try:
        return type(config)(thinking_retention="all")
    except (pydantic.ValidationError, NotImplementedError):
        return config


def _as_dicts(messages: Sequence[Message]) -> list[Json]:
    return [dict(message) for message in messages]
