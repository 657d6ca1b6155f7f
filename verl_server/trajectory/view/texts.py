"""Texts of a view: recorded messages as labelled parts, and texts from outside without control characters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from verl_server.trajectory.view.model import TextPart

MAX_PART_CHARACTERS = 120
"""Maximum number of characters of a content part that is no text, for example of an image in base64."""
DIRECTION_MARKS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)
"""Characters that change the direction of the text after them, so that a reader may see another text."""
CONTROL_CHARACTERS: dict[int, int | str] = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    **{code: f"\\u{code:04x}" for code in DIRECTION_MARKS},
    **{code: f"\\u{code:04x}" for code in (0x2028, 0x2029)},
}
"""The visible replacement of each control character."""
INVISIBLE_CHARACTERS: dict[int, int | str] = {
    ord("\n"): 0x240A,
    ord("\t"): 0x2409,
    **{code: f"\\u{code:04x}" for code in (0xAD, 0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF)},
}
"""The visible replacement of characters that would change the lines or the apparent spelling of a name."""


def visible(value: object) -> str:
    """A text from outside, in which control characters are visible and without effect on a terminal or a page.

    Line feeds and tabs are kept.
    """
    text = str(value).translate(CONTROL_CHARACTERS)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def as_label(value: object) -> str:
    """A name from outside in one line, in which invisible characters and line feeds are visible, too."""
    return as_text(value).translate(INVISIBLE_CHARACTERS)


def as_text(value: object) -> str:
    """A JSON value as text: a string as it is, a number with ten digits, and another value as JSON."""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.10g}"
    if isinstance(value, str):
        return visible(value)
    try:
        return visible(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return "(a value that is nested too deeply)"


def text_parts(message: Mapping[str, Any] | None) -> tuple[TextPart, ...]:
    """The parts of a node's `message`: messages, appended text, or the text of a turn. Any JSON object is shown."""
    if message is None:
        return ()
    messages = message.get("messages")
    if isinstance(messages, list):
        return tuple(_message_part(item) for item in messages)
    if "appended_text" in message:
        return (TextPart("appended text", as_text(message["appended_text"])),)
    return (_message_part(message),)


def _message_part(message: object) -> TextPart:
    if not isinstance(message, Mapping) or "role" not in message:
        return TextPart("message", as_text(message))
    label = as_label(message["role"])
    label += "".join(f" {as_label(message[key])}" for key in ("name", "tool_call_id") if message.get(key))
    lines = [f"{as_text(key)}: {as_text(value)}" for key, value in message.items() if _is_other(key, value)]
    content = message.get("content")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    return TextPart(label, "\n".join([*lines, *(_content_text(part) for part in parts)]))


def _is_other(key: str, value: object) -> bool:
    return key not in ("role", "name", "tool_call_id", "content") and value is not None


def _content_text(part: object) -> str:
    """The text of a content part. A part without a text, for example an image, is shortened."""
    if isinstance(part, str):
        return visible(part)
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return visible(part["text"])
    kind = as_text(part.get("type", "part")) if isinstance(part, Mapping) else "part"
    text = as_text(part)
    if len(text) > MAX_PART_CHARACTERS:
        text = f"{text[:MAX_PART_CHARACTERS]}... ({len(text)} characters)"
    return f"[{kind}] {text}"


def count(number: int, noun: str) -> str:
    """A number with its noun, for example "1 turn" or "20,000 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def join(words: Iterable[object]) -> str:
    """The words as a list in a sentence."""
    *first, last = map(str, words)
    return f"{', '.join(first)} and {last}" if first else last
