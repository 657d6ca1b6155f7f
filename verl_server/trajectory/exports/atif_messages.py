"""Chat messages as steps and results of ATIF, and back. Pure."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import orjson

from verl_server.trajectory.exports import atif_schema as schema
from verl_server.trajectory.exports.chat import as_tool_call, text_of, tool_calls
from verl_server.trajectory.rendering.messages import Message, image_sources
from verl_server.types import Json

IMAGE_TYPES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
DOCUMENT_DEPTH = 20
"""Number of levels of a document around the arguments of a call, at most."""
UNKNOWN_IMAGE = "[image]"
"""Text in place of an image that ATIF cannot refer to: base64 text, a relative path, or an image of another type."""
Source = Literal["system", "user", "agent"]
SOURCES: dict[str, Source] = {"system": "system", "developer": "system", "assistant": "agent"}
ROLES: dict[Source, str] = {"system": "system", "user": "user", "agent": "assistant"}


def to_step(step_id: int, message: Message, *, is_turn: bool, is_copied: bool) -> schema.Step:
    """The step of a message. `is_turn`: whether the policy generated it. `is_copied`: see `Step.is_copied_context`."""
    role = str(message["role"])
    source = SOURCES.get(role, "user")
    is_agent = source == "agent"
    reasoning = message.get("reasoning_content")
    return schema.Step(
        step_id=step_id,
        source=source,
        message=_to_content(message.get("content")),
        reasoning_content=reasoning if is_turn and isinstance(reasoning, str) else None,
        tool_calls=([_to_call(call) for call in tool_calls(message)] or None) if is_agent else None,
        is_copied_context=True if is_copied else None,
        llm_call_count=int(is_turn) if is_agent else None,
        extra=None if role == ROLES[source] else {"role": role},
    )


def to_result(message: Message, step: schema.Step) -> schema.ObservationResult:
    """The result after a step, of a message of a tool or of text that was appended to the turn."""
    call_id, name = message.get("tool_call_id"), message.get("name")
    is_known = isinstance(call_id, str) and call_id in {call.tool_call_id for call in step.tool_calls or ()}
    extra: Json = {} if is_known or not isinstance(call_id, str) else {"tool_call_id": call_id}
    if isinstance(name, str):
        extra["name"] = name
    return schema.ObservationResult(
        source_call_id=call_id if is_known else None,
        content=_to_content(message.get("content")),
        extra=extra or None,
    )


def from_step(step: schema.Step) -> Json:
    """The message of a step, as chat templates take it."""
    fields: Json = {"role": ROLES[step.source], "content": _from_content(step.message)}
    if step.reasoning_content is not None:
        fields["reasoning_content"] = step.reasoning_content
    if step.tool_calls:
        fields["tool_calls"] = [_from_call(call) for call in step.tool_calls]
    return fields


def from_result(result: schema.ObservationResult) -> Json:
    """The message of a tool that is the result after a step."""
    fields: Json = {"role": "tool", "content": _from_content(result.content)}
    extra = result.extra or {}
    call_id = extra.get("tool_call_id") if result.source_call_id is None else result.source_call_id
    if isinstance(call_id, str):
        fields["tool_call_id"] = call_id
    if isinstance(extra.get("name"), str):
        fields["name"] = extra["name"]
    return fields


def _to_call(call: Json) -> schema.ToolCall:
    arguments = _parse_arguments(call["arguments"])
    return schema.ToolCall(
        tool_call_id=call["id"],
        function_name=call["name"],
        arguments={} if arguments is None else arguments,
        extra={"arguments": call["arguments"]} if arguments is None else None,
    )


def _parse_arguments(text: str) -> Json | None:
    """The arguments of a call. None if they are no object, or if the JSON of a document would change or refuse them."""
    nested: object
    try:
        nested = arguments = json.loads(text)
        for _ in range(DOCUMENT_DEPTH):
            nested = [nested]
        is_unchanged = orjson.loads(orjson.dumps(nested)) == nested
    except (ValueError, TypeError, RecursionError):  # too deep, an integer of more than 64 bits, a lone surrogate
        return None
    return arguments if is_unchanged and isinstance(arguments, dict) else None


def _from_call(call: schema.ToolCall) -> Json:
    text = (call.extra or {}).get("arguments")
    arguments = text if isinstance(text, str) else json.dumps(call.arguments, ensure_ascii=False)
    return as_tool_call(call.tool_call_id, call.function_name, arguments)


def _to_content(content: Any) -> schema.Content:
    if not isinstance(content, list):
        return text_of(content)
    return [part for item in content for part in _to_parts(item)]


def _to_parts(part: Any) -> list[schema.ContentPart]:
    """The content part in ATIF's form. Empty for a part that is neither a text nor an image."""
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return [schema.ContentPart(type="text", text=part["text"])]
    parts = []
    for source in image_sources({"content": [part]}):
        media_type = mimetypes.guess_type(source)[0]
        # Harbor resolves a relative path against the folder of the document, not against that of the run.
        if media_type in IMAGE_TYPES and ("://" in source or Path(source).is_absolute()):
            media = schema.MediaSource(media_type=media_type, path=source)
            parts.append(schema.ContentPart(type="image", source=media))
        else:
            parts.append(schema.ContentPart(type="text", text=UNKNOWN_IMAGE))
    return parts


def _from_content(content: schema.Content | None) -> Any:
    return [_from_part(part) for part in content] if isinstance(content, list) else content or ""


def _from_part(part: schema.ContentPart) -> Json:
    if part.source is None:
        return {"type": "text", "text": part.text}
    if part.type == "image":
        return {"type": "image_url", "image_url": {"url": part.source.path}}
    return {"type": part.type, part.type: part.source.path}
