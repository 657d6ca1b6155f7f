"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`.

What differs from Anthropic's own servers:

- Thoughts of earlier turns (`thinking`, `redacted_thinking`) are dropped. The recorded tokens of a turn contain them.
  The thought of the last turn tells turns apart that say the same.
  The signature of a thought is empty and is not checked. `thinking` of the type disabled is the effort `none`.
- A `system` message between other messages becomes text of the user at its place (`normalize_messages`).
- Tools without `input_schema` (`web_search_...`, `bash_...`, `mcp_servers`) are left out: the policy does not see them.
- `is_error` of a result is not shown to the policy, unless the result is empty: it becomes the text `Error`.
- Images are sent as base64. Images by URL or by file, PDFs and other blocks become short texts (`content.py`).
- After an assistant message at the end of the conversation, the policy begins a new turn: it does not continue it.
- `max_tokens` may be more than the context has left: then the turn ends earlier, with the reason `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from verl_server.gateway.conversation import AssistantTurn, TurnDelta, TurnRequest, as_template_call, normalize_messages
from verl_server.gateway.dialects.base import (
    Count,
    Dialect,
    Event,
    ReplyStream,
    Stops,
    TurnFields,
    bad_request,
    derive,
    encode_schema,
    find_last,
    force_call,
    join_texts,
    read_object,
    read_objects,
    read_text,
    require_recordable,
)
from verl_server.gateway.dialects.content import parse_arguments, read_content, read_tools, tool_schema
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.types import Json

# -- Anthropic content ------------------------------------------------------------------------------
# Messages, content blocks and tools of Anthropic's Messages API, converted to the form of chat templates.

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


# -- Anthropic messages -----------------------------------------------------------------------------

OVERLOADED_STATUS = 529
ERROR_TYPES = {
    ErrorKind.INVALID_REQUEST: "invalid_request_error",
    ErrorKind.CONTEXT_OVERFLOW: "invalid_request_error",
    ErrorKind.AUTHENTICATION: "authentication_error",
    ErrorKind.PERMISSION: "permission_error",
    ErrorKind.NOT_FOUND: "not_found_error",
    ErrorKind.TOO_LARGE: "request_too_large",
    ErrorKind.UNSUPPORTED_ENCODING: "invalid_request_error",
    ErrorKind.LIMIT_REACHED: "rate_limit_error",
    ErrorKind.TOO_MANY_REQUESTS: "rate_limit_error",
    ErrorKind.OVERLOADED: "overloaded_error",
    ErrorKind.INTERNAL: "api_error",
}


class MessagesFields(TurnFields):
    """Fields of a message besides the conversation and the tools."""

    model: str
    max_tokens: Count | None = None
    stop_sequences: Stops | None = None


class AnthropicDialect(Dialect):
    """Anthropic's Messages API."""

    path = "/v1/messages"
    count_path = "/v1/messages/count_tokens"

    def parse(self, body: Json) -> TurnRequest:
        request = self.parse_count(body)
        if "max_new_tokens" not in request.sampling_params:
            raise bad_request("'max_tokens' is required")
        return request

    def parse_count(self, body: Json) -> TurnRequest:
        fields = MessagesFields.read(body)
        messages = read_objects(body, "messages", is_needed=True)
        tools, omitted_tools = read_tools(read_objects(body, "tools"), parse_tool)
        forced_tools, allows_parallel_calls = parse_choice(body, tools)
        return TurnRequest(
            model=fields.model,
            last_thought=join_texts(find_last(messages, "role", "assistant").get("content"), "thinking", "thinking"),
            messages=normalize_messages([*parse_system(body.get("system")), *parse_messages(messages)]),
            tools=tools,
            omitted_tools=omitted_tools,
            forced_tools=forced_tools,
            allows_parallel_calls=allows_parallel_calls,
            template_arguments=fields.chat_template_kwargs or {},
            reasoning_effort=parse_effort(body),
            sampling_params=fields.sampling_params(
                max_new_tokens=fields.max_tokens, stop=fields.stop_sequences, **parse_output_format(body)
            ),
            stream=bool(fields.stream),
        )

    def identity(self, body: Json) -> Mapping[str, bytes]:
        """Without the billing line: Claude Code changes the line when it sends a request again."""
        system = body.get("system")
        known = without_billing_line(system)
        return {} if known is system else {"system": orjson.dumps(known)}

    def reply(self, request: TurnRequest, turn: AssistantTurn) -> Json:
        ending = _ending(turn)
        return {**_message(request, turn.id), "content": _blocks(turn), **ending, "usage": _usage(turn)}

    def open_stream(self, request: TurnRequest, reply_id: str) -> ReplyStream:
        return MessageStream(request, reply_id)

    def error(self, error: GatewayError) -> tuple[int, Json]:
        return anthropic_error(error)


def anthropic_error(error: GatewayError) -> tuple[int, Json]:
    """HTTP status and body of an error as Anthropic writes it."""
    message, status = error.message, error.kind.status
    if error.kind is ErrorKind.CONTEXT_OVERFLOW:  # Claude Code shortens its conversation at these words
        count = f"more than {error.max_tokens}" if error.num_tokens is None else error.num_tokens
        message = f"prompt is too long: {count} tokens > {error.max_tokens} maximum"
    if error.kind is ErrorKind.OVERLOADED:
        status = OVERLOADED_STATUS
    return status, {"type": "error", "error": {"type": ERROR_TYPES[error.kind], "message": message}}


class MessageStream(ReplyStream):
    """Events of a message. The blocks come one after the other: the thought, the text, each tool call."""

    def __init__(self, request: TurnRequest, reply_id: str) -> None:
        super().__init__(request, reply_id)
        self._open: Json | None = None
        """The block that has begun, as it was at its beginning."""
        self._index = -1
        self._held = ""
        """White space at the beginning of the text. A text of white space only is no block before a tool call."""

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        yield _event("message_start", message=_message(self.request, self.reply_id, num_prompt_tokens))

    def keep_alive(self) -> bytes:
        return _event("ping").encode()

    def add(self, delta: TurnDelta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._begin_block({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        self._held += delta.text
        if delta.text and (self._is_open("text") or self._held.strip()):
            yield from self._begin_block({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": self._held})
            self._held = ""

    def end(self, turn: AssistantTurn) -> Iterator[Event]:
        if not turn.tool_calls and not self._is_open("text"):  # many agents read the first block
            yield from self._begin_block({"type": "text", "text": ""})
            if self._held:
                yield self._delta({"type": "text_delta", "text": self._held})
        for call in turn.tool_calls:
            yield from self._begin_block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        yield from self._end_block()
        yield _event("message_delta", delta=_ending(turn), usage=_usage(turn))
        yield _event("message_stop")

    def fail(self, error: GatewayError) -> Event:
        return Event(anthropic_error(error)[1], "error")

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _begin_block(self, block: Json) -> Iterator[Event]:
        """Begin a block, unless it is the text or the thought that has begun already."""
        if self._is_open(block["type"]) and block["type"] != "tool_use":
            return
        yield from self._end_block()
        self._open, self._index = block, self._index + 1
        yield _event("content_block_start", index=self._index, content_block=block)

    def _end_block(self) -> Iterator[Event]:
        if self._is_open("thinking"):
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
        self._open = None

    def _delta(self, delta: Json) -> Event:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> Event:
    return Event({"type": kind, **fields}, kind)


def _message(request: TurnRequest, reply_id: str, num_prompt_tokens: int = 0) -> Json:
    """A message that has no content yet."""
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage_of(num_prompt_tokens, 0, 0),
    }


def _usage(turn: AssistantTurn) -> Json:
    return _usage_of(turn.num_prompt_tokens, turn.num_cached_tokens, len(turn.token_ids))


def _usage_of(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> Json:
    """The numbers of tokens. `input_tokens` does not contain the cached tokens."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }


def _blocks(turn: AssistantTurn) -> list[Json]:
    """The content blocks of a turn. Without text and calls, the text is empty: many agents read the first block."""
    blocks = list[Json]()
    if turn.reasoning:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
    if turn.text.strip() or not turn.tool_calls:
        blocks.append({"type": "text", "text": turn.text})
    for call in turn.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": orjson.loads(call.arguments)})
    return blocks


def _ending(turn: AssistantTurn) -> Json:
    """Why the turn ended. Tool calls come before a stop sequence: agents run tools only for the reason `tool_use`."""
    if turn.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if turn.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if turn.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stop_sequence}
    return {"stop_reason": "end_turn", "stop_sequence": None}
