"""Chat messages: which messages are valid, and which images they contain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.errors import BadInputError

Message = Mapping[str, Any]
"""A chat message with the keys `role` and `content`, as chat templates take it."""

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
ASSISTANT_PLACEHOLDER = "\u2042verl\u2042"
"""Text that stands for an assistant message while a chat template is rendered. No template and no message has it."""
IMAGE_KEYS = ("image", "image_url", "url", "path", "base64")
"""Keys under which a content part gives its image."""


def validate_messages(messages: Sequence[Message]) -> None:
    """Raise BadInputError if `messages` is empty or contains a message that no chat template accepts."""
    if not messages:
        raise BadInputError("there are no messages: pass at least one message")
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else type(message).__name__
        if not isinstance(message, Mapping) or not isinstance(role, str) or role not in ROLES:
            raise BadInputError(f"message {index} has the role {role!r}; valid roles are {sorted(ROLES)}")
        content = message.get("content")
        if not (content is None or isinstance(content, (str, list))):
            raise BadInputError(
                f"the content of message {index} has the type {type(content).__name__}; expected a string or a list of "
                "content parts"
            )
        if isinstance(content, str) and ASSISTANT_PLACEHOLDER in content:
            raise BadInputError(
                f"message {index} contains the reserved placeholder {ASSISTANT_PLACEHOLDER!r}; remove it from the text"
            )


def image_sources(message: Message) -> list[str]:
    """The images of a message in their order, each as a path, a URL or base64 text.

    An image is a content part `{"type": "image", "image": ...}` or OpenAI's `{"type": "image_url", ...}`. Raises
    BadInputError for an image part without a usable source.
    """
    content = message.get("content")
    sources = []
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
            value = next((part[key] for key in IMAGE_KEYS if part.get(key)), None)
            source = value.get("url") if isinstance(value, Mapping) else value
            if not isinstance(source, str) or not source:
                raise BadInputError(
                    f"an image part needs one of the keys {IMAGE_KEYS} with a string; got {type(source).__name__}"
                )
            sources.append(source)
    return sources
