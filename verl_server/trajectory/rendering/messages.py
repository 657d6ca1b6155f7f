"""Chat messages: which messages are valid, which images they contain, and the calls that are parsed from turns."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from verl_server.errors import BadInputError
from verl_server.types import Json, tolist_hint
from verl_server.validation import is_list, require_list

Message = Mapping[str, Any]
"""A chat message with the keys `role` and `content`, as chat templates take it."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
ASSISTANT_PLACEHOLDER = "\u2042verl\u2042"
"""Text that stands for an assistant message while a chat template is rendered. No template and no message has it."""
IMAGE_TYPES = ("image", "image_url")
UNSUPPORTED_TYPES = ("video", "video_url", "audio", "audio_url", "input_audio")
"""Types of content parts that no renderer and no batch of this library can take."""
IMAGE_KEYS = ("image", "image_url", "url", "path", "base64")
"""Keys under which a content part gives its image."""
SURROGATE_CURE = (
    "a text has a lone surrogate, which UTF-8 cannot encode, for example from a file name; convert the text with "
    'text.encode("utf-8", "backslashreplace").decode()'
)
"""What to do about a text that is no valid Unicode, for errors."""
EXAMPLE = '[{"role": "user", "content": "What is 19 + 23?"}]'
"""A list of messages, for errors."""


@dataclass(frozen=True)
class ParsedToolCall:
    """A tool call that a renderer found in the tokens of a turn. The call can be malformed."""

    name: str | None
    arguments: Json | None
    parse_error: str | None
    """Reason why the call cannot be parsed. None for a well-formed call."""
    id: str | None = None
    """Id of the call that the policy has sampled, for example `functions.add:0`. None if the family samples no ids."""


@dataclass(frozen=True)
class ParsedTurn:
    """The parts of a turn that a renderer found in its tokens."""

    text: str
    """Text outside of thoughts and tool calls."""
    reasoning: str
    """Text of the thoughts. Empty without thoughts."""
    tool_calls: Sequence[ParsedToolCall]


def validate_messages(messages: Sequence[Message]) -> None:
    """Raise BadInputError unless `messages` is a list of messages that can be rendered and recorded.

    The error names the index of the message. A message has one of the `ROLES`, and a content: a string or a list of
    content parts. Only an assistant message with `tool_calls` needs no content. All values are plain JSON values.
    """
    require_list("messages", messages, f"for example {EXAMPLE}{tolist_hint(messages)}")
    if not messages:
        raise BadInputError(f"there are no messages: pass at least one message, for example {EXAMPLE}")
    for index, message in enumerate(messages):
        try:
            _validate_message(message)
        except BadInputError as error:
            raise BadInputError(f"message {index}: {error.message}") from None


def _validate_message(message: Message) -> None:
    if not isinstance(message, Mapping):
        raise BadInputError(f"expected a dict, got {type(message).__name__}; for example {EXAMPLE[1:-1]}")
    if "role" not in message:
        raise BadInputError(f"the key 'role' is missing; the message has the keys {sorted(map(str, message))}")
    role, content = message["role"], message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise BadInputError(f"the role {role!r} is unknown; valid roles are {sorted(ROLES)}")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        problem = "has the value None" if "content" in message else "is missing"
        raise BadInputError(
            f"the key 'content' {problem}; only an assistant message with 'tool_calls' needs no content. For an empty "
            'message, also one with \'reasoning_content\', write "content": ""'
        )
    if not (content is None or isinstance(content, (str, list))):
        raise BadInputError(
            f"the content has the type {type(content).__name__}; expected a string or a list of content parts"
            f"{tolist_hint(content)}"
        )
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping):
            raise BadInputError(f"content part {number}: expected a dict, got {type(part).__name__}")
        if part.get("type") in UNSUPPORTED_TYPES:
            raise BadInputError(f"content part {number}: the type {part['type']!r} is not supported; images are")
    image_sources(message)
    try:
        encoded = orjson.dumps(dict(message))
    except TypeError as error:
        cure = "pass plain JSON values. Convert values of numpy and torch with .tolist()"
        if "surrogates" in str(error):
            cure = SURROGATE_CURE
        raise BadInputError(f"a value cannot be recorded as JSON: {error}; {cure}") from None
    if ASSISTANT_PLACEHOLDER.encode() in encoded:
        raise BadInputError(
            f"the message contains the reserved placeholder {ASSISTANT_PLACEHOLDER!r}; remove it from the text"
        )


def user_hint(messages: Sequence[Message]) -> str:
    """The end of an error about messages that a template refuses: many templates need a message of the user."""
    has_user = any(message["role"] == "user" for message in messages)
    return "" if has_user else '; the messages have no message of the user: add {"role": "user", "content": "..."}'


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages, of which each result of a tool has a `tool_call_id` and a `name`.

    Some chat templates refuse results without an id. The ids have nine letters and digits, as Mistral's template needs.
    """
    given = {message.get("tool_call_id") for message in messages}
    ids = (call_id for number in itertools.count() if (call_id := f"call{number:05d}") not in given)
    return [
        {
            **message,
            "name": message.get("name") or "tool",
            "tool_call_id": message.get("tool_call_id") or next(ids),
        }
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def stand_in_calls(messages: Sequence[Message]) -> Json:
    """The tool calls of the assistant message that stands for the turn before these results of tools."""
    return {
        "tool_calls": [
            {
                "id": message["tool_call_id"],
                "type": "function",
                "function": {"name": message["name"], "arguments": {}},
            }
            for message in messages
            if message["role"] == "tool"
        ]
    }


def copy_json(value: Any) -> Any:
    """A copy of a JSON value with copies of all dicts and lists in it. Other sequences become lists."""
    if isinstance(value, Mapping):
        return {key: copy_json(item) for key, item in value.items()}
    return [copy_json(item) for item in value] if is_list(value) else value


def as_json(value: Any) -> bytes:
    """The JSON text of a JSON value, with sorted keys."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(value, sort_keys=True).encode()


def image_sources(message: Message) -> list[str]:
    """The images of a message in their order, each as a path, a data URL or base64 text, as the message has it.

    Other URLs are refused when the image is read. An image is a content part `{"type": "image", "image": ...}` or
    OpenAI's `{"type": "image_url", ...}`. Raises BadInputError for an image part without a usable source.
    """
    content = message.get("content")
    sources = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES:
            value = next((part[key] for key in IMAGE_KEYS if part.get(key)), None)
            source = value.get("url") if isinstance(value, Mapping) else value
            if not isinstance(source, str) or not source:
                raise BadInputError(
                    f"an image part needs one of the keys {IMAGE_KEYS} with a string; got {type(source).__name__}"
                )
            sources.append(source)
    return sources
