"""Messages, content blocks and tools of Anthropic's Messages API, converted to the form of chat templates."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Sequence
from typing import Any

from verl_server.gateway.conversation import as_template_call
from verl_server.gateway.dialects.chat import parse_content, tool_schema
from verl_server.gateway.dialects.fields import bad_request, read_object, read_objects, read_text, require_recordable
from verl_server.gateway.dialects.known_items import derive
from verl_server.gateway.dialects.schemas import encode_schema
from verl_server.gateway.dialects.tool_choice import force_call
from verl_server.gateway.errors import GatewayError
from verl_server.types import Json

BILLING_HEADER = "x-anthropic-billing-header"
"""Beginning of a line that Claude Code writes above its system prompt. The line is another one in each request."""
MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
NO_TEXT_TYPES = ("tool_use", "thinking", "redacted_thinking")
"""Types of the blocks of an assistant message that are not part of its text."""
CLIENT_TOOL_PREFIXES = ("bash_", "text_editor_", "computer_", "browser_", "memory_")
"""Beginnings of the types of tools that the agent runs, and whose schema only Anthropic's models know."""


def parse_system(value: Any) -> list[Json]:
    """The system prompt: no message or one message, without the line of the billing header."""
    text = _named("system", _text_of, _read_blocks("system", without_billing_line(value) or ""))
    return [{"role": "system", "content": text}] if text else []


def without_billing_line(system: Any) -> Any:
    """`system` of a body without the line of the billing header: the first line of its text, or of its first block.

    Without such a line: the same object, also if it is no valid system prompt.
    """
    if isinstance(system, str) and system.startswith(BILLING_HEADER):
        return system.partition("\n")[2]
    first = system[0] if isinstance(system, list) and system else None
    text = first.get("text") if isinstance(first, dict) else None
    if isinstance(first, dict) and isinstance(text, str) and text.startswith(BILLING_HEADER):
        return [{**first, "text": text.partition("\n")[2]}, *system[1:]]
    return system


def parse_messages(messages: Sequence[Json]) -> list[Json]:
    """The messages. A message with results of tools becomes several messages."""
    parsed = list[Json]()
    for index, message in enumerate(messages):
        try:
            parsed += derive(_parse_message, message)
        except GatewayError as error:
            raise bad_request(f"messages.{index}: {error.message}") from None
    return parsed


def _parse_message(message: Json) -> list[Json]:
    role, blocks = message.get("role"), _read_blocks("content", message.get("content"))
    if role == "user":
        return _parse_user(blocks)
    if role == "assistant":
        return [_parse_assistant(blocks)]
    if role == "system":
        return [{"role": "system", "content": _text_of(blocks)}]
    raise bad_request("'role' must be user, assistant or system")


def _parse_user(blocks: Sequence[Json]) -> list[Json]:
    """The results of tools in their order, and then one message with the other blocks."""
    results = [block for block in blocks if block.get("type") == "tool_result"]
    others = [block for block in blocks if block.get("type") != "tool_result"]
    messages = [_parse_result(block) for block in results]
    if others or not results:
        messages.append({"role": "user", "content": _content_of(others)})
    return messages


def _parse_result(block: Json) -> Json:
    content = block.get("content")
    parsed = _content_of(_read_blocks("tool_result.content", "" if content is None else content))
    if not parsed and block.get("is_error"):
        parsed = "Error"
    return {"role": "tool", "content": parsed, "tool_call_id": read_text(block, "tool_use_id")}


def _parse_assistant(blocks: Sequence[Json]) -> Json:
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    texts = [block for block in blocks if block.get("type") not in NO_TEXT_TYPES]
    message: Json = {"role": "assistant", "content": _text_of(texts)}
    if calls:
        message["tool_calls"] = [
            as_template_call(read_text(call, "id"), read_text(call, "name"), _read_object(call, "input"))
            for call in calls
        ]
    return message


def _read_blocks(name: str, content: Any) -> list[Json]:
    """The content blocks of a content, which may be a string."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_request(f"{name!r} must be a string or a list of content blocks")
    return content


def _content_of(blocks: Sequence[Json]) -> Any:
    """A text, or a list of parts if there are images."""
    if not any(block.get("type") == "image" for block in blocks):
        return _text_of(blocks)
    return parse_content([_parse_image(block) if block.get("type") == "image" else _as_text(block) for block in blocks])


def _text_of(blocks: Sequence[Json]) -> str:
    return "".join(map(_read_text_block, blocks))


def _read_text_block(block: Json) -> str:
    if block.get("type") != "text":
        raise bad_request(f"a content block with 'type' = {str(block.get('type'))[:40]} is not supported here")
    return read_text(block, "text")


def _as_text(block: Json) -> Json:
    return {"type": "text", "text": _read_text_block(block)}


def _parse_image(block: Json) -> Json:
    """The image as a part of OpenAI's chat dialect, so that the image means the same in both dialects."""
    source = _read_object(block, "source")
    if source.get("type") != "base64":
        kind = str(source.get("type"))[:40]
        raise bad_request(f"'source.type' = {kind} is not supported: send the bytes of the image as base64")
    if source.get("media_type") not in MEDIA_TYPES:
        raise bad_request(f"'source.media_type' must be one of {', '.join(MEDIA_TYPES)}")
    data = read_text(source, "data")
    try:
        base64.b64decode(data, validate=True)
    except ValueError as error:
        raise bad_request(f"'source.data' must be base64: {error}") from None
    return {"type": "image_url", "image_url": {"url": f"data:{source['media_type']};base64,{data}"}}


def parse_tools(body: Json) -> tuple[list[Json], tuple[str, ...] | None, bool]:
    """The tools that the policy may call, those of which the turn must call one, and whether it may call several.

    No tools with the `tool_choice` none.
    """
    choice = body.get("tool_choice")
    if choice is not None and not isinstance(choice, dict):
        raise bad_request("'tool_choice' must be an object")
    kind = "auto" if choice is None else choice.get("type")
    if kind not in ("auto", "none", "any", "tool"):
        raise bad_request(f"'tool_choice.type' = {str(kind)[:40]} is not supported; use auto, none, any or tool")
    is_single = choice is not None and bool(choice.get("disable_parallel_tool_use"))
    parse = functools.partial(derive, _parse_tool)
    parsed = [_named(f"tools.{index}", parse, tool) for index, tool in enumerate(read_objects(body, "tools"))]
    tools: list[Json] = [] if kind == "none" else [tool for tool in parsed if tool is not None]
    forced: tuple[str, ...] | None = () if kind == "none" else None
    if choice is not None and kind in ("any", "tool"):
        forced = force_call(tools, read_text(choice, "name") if kind == "tool" else None)
    return tools, forced, not is_single


def _parse_tool(tool: Json) -> Json | None:
    """The schema of a tool. None for a tool that Anthropic's servers run."""
    kind = tool.get("type")
    if kind not in (None, "custom") and "input_schema" not in tool:
        if not isinstance(kind, str) or kind.startswith(CLIENT_TOOL_PREFIXES):
            raise bad_request(f"'type' = {str(kind)[:40]} is not supported: declare the tool with 'input_schema'")
        return None
    return tool_schema(read_text(tool, "name"), tool.get("description"), _read_object(tool, "input_schema"))


def parse_output_format(body: Json) -> Json:
    """SGLang's sampling parameters for structured output."""
    config = body.get("output_config")
    if config is not None and not isinstance(config, dict):
        raise bad_request("'output_config' must be an object")
    value = body.get("output_format") if config is None or config.get("format") is None else config["format"]
    if value is None:
        return {}
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise bad_request("'output_config.format' must have the type json_schema")
    return {"json_schema": encode_schema("schema", _read_object(value, "schema"))}


def parse_effort(body: Json) -> str | None:
    """How much the policy should think: `none` if thoughts are disabled."""
    if read_object(body, "thinking").get("type") == "disabled":
        return "none"
    return read_text(read_object(body, "output_config"), "effort", default="") or None


def _read_object(body: Json, name: str) -> Json:
    """A JSON object that can be recorded."""
    value = body.get(name)
    if not isinstance(value, dict):
        raise bad_request(f"{name!r} must be an object")
    require_recordable(name, value)
    return value


def _named(name: str, parse: Callable[[Any], Any], value: Any) -> Any:
    """Parse a part of the body. Errors name the part."""
    try:
        return parse(value)
    except GatewayError as error:
        raise bad_request(f"{name}: {error.message}") from None
