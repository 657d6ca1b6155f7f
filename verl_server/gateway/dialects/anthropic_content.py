"""Messages, content blocks and tools of Anthropic's Messages API, converted to the form of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_server.gateway.conversation import as_template_call
from verl_server.gateway.dialects.content import parse_arguments, read_content, tool_schema
from verl_server.gateway.dialects.fields import bad_request, read_object, read_text, require_recordable
from verl_server.gateway.dialects.known_items import derive
from verl_server.gateway.dialects.schemas import encode_schema
from verl_server.gateway.dialects.tool_choice import force_call
from verl_server.gateway.errors import GatewayError
from verl_server.types import Json

BILLING_HEADER = "x-anthropic-billing-header"
"""Beginning of a line that Claude Code writes above its system prompt. The line is another one in each request."""


def parse_system(value: Any) -> list[Json]:
    """The system prompt: no message or one message, without the line of the billing header."""
    content = read_content(without_billing_line(value), "system", "system")
    return [{"role": "system", **content}] if content["content"] else []


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
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request("'role' must be user, assistant or system")
    apart = {"user": "tool_result", "assistant": "tool_use"}.get(role)
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    taken = [block for block in blocks if block.get("type") == apart]
    others = [block for block in content or () if block not in taken] if taken else content
    parsed = {"role": role, **read_content(others, role)}
    if role == "assistant":
        return [{**parsed, "tool_calls": list(map(_parse_call, taken))} if taken else parsed]
    return [*map(_parse_result, taken), *([parsed] if others or not taken else [])]


def _parse_result(block: Json) -> Json:
    content = read_content(block.get("content"), "tool", "tool_result.content")
    if not content["content"] and block.get("is_error"):
        content = {"content": "Error"}
    return {"role": "tool", **content, "tool_call_id": read_text(block, "tool_use_id")}


def _parse_call(block: Json) -> Json:
    return as_template_call(read_text(block, "id"), read_text(block, "name"), parse_arguments(block.get("input")))


def parse_choice(body: Json, tools: Sequence[Json]) -> tuple[tuple[str, ...] | None, bool]:
    """The names of the tools of which the turn must call one, as in `TurnRequest`, and whether it may have several."""
    choice = body.get("tool_choice")
    if choice is not None and not isinstance(choice, dict):
        raise bad_request("'tool_choice' must be an object")
    kind = "auto" if choice is None else choice.get("type")
    if kind not in ("auto", "none", "any", "tool"):
        raise bad_request(f"'tool_choice.type' = {str(kind)[:40]} is not supported; use auto, none, any or tool")
    is_single = choice is not None and bool(choice.get("disable_parallel_tool_use"))
    forced: tuple[str, ...] | None = () if kind == "none" else None
    if choice is not None and kind in ("any", "tool"):
        forced = force_call(tools, read_text(choice, "name") if kind == "tool" else None)
    return forced, not is_single


def parse_tool(tool: Json) -> Json | None:
    """The schema of a tool. None for a tool whose schema only Anthropic's models know."""
    if tool.get("type") not in (None, "custom") and "input_schema" not in tool:
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
