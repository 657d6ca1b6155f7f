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

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from verl_server.gateway.conversation import AssistantTurn, TurnDelta, TurnRequest, normalize_messages
from verl_server.gateway.dialects.anthropic_content import (
    parse_choice,
    parse_effort,
    parse_messages,
    parse_output_format,
    parse_system,
    parse_tool,
    without_billing_line,
)
from verl_server.gateway.dialects.content import read_tools
from verl_server.gateway.dialects.dialect import Dialect
from verl_server.gateway.dialects.fields import (
    bad_request,
    find_last,
    join_texts,
    read_count,
    read_flag,
    read_number,
    read_objects,
    read_stop,
    read_template_arguments,
    read_text,
    read_top_k,
    sampling_params,
)
from verl_server.gateway.dialects.reply_stream import Event, ReplyStream
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.types import Json

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
        messages = read_objects(body, "messages", is_needed=True)
        tools, omitted_tools = read_tools(read_objects(body, "tools"), parse_tool)
        forced_tools, allows_parallel_calls = parse_choice(body, tools)
        return TurnRequest(
            model=read_text(body, "model"),
            last_thought=join_texts(find_last(messages, "role", "assistant").get("content"), "thinking", "thinking"),
            messages=normalize_messages([*parse_system(body.get("system")), *parse_messages(messages)]),
            tools=tools,
            omitted_tools=omitted_tools,
            forced_tools=forced_tools,
            allows_parallel_calls=allows_parallel_calls,
            template_arguments=read_template_arguments(body),
            reasoning_effort=parse_effort(body),
            sampling_params=sampling_params(
                max_new_tokens=read_count(body, "max_tokens"),
                temperature=read_number(body, "temperature", 0, 100),
                top_p=read_number(body, "top_p", 0, 1),
                top_k=read_top_k(body),
                stop=read_stop(body, "stop_sequences"),
                **parse_output_format(body),
            ),
            stream=read_flag(body, "stream"),
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
        return MessageStream(self, request, reply_id)

    def error(self, error: GatewayError) -> tuple[int, Json]:
        message, status = error.message, error.kind.status
        if error.kind is ErrorKind.CONTEXT_OVERFLOW:  # Claude Code shortens its conversation at these words
            count = f"more than {error.max_tokens}" if error.num_tokens is None else error.num_tokens
            message = f"prompt is too long: {count} tokens > {error.max_tokens} maximum"
        if error.kind is ErrorKind.OVERLOADED:
            status = OVERLOADED_STATUS
        return status, {"type": "error", "error": {"type": ERROR_TYPES[error.kind], "message": message}}


class MessageStream(ReplyStream):
    """Events of a message. The blocks come one after the other: the thought, the text, each tool call."""

    def __init__(self, dialect: AnthropicDialect, request: TurnRequest, reply_id: str) -> None:
        super().__init__(request, reply_id)
        self._dialect = dialect
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
        return Event(self._dialect.error(error)[1], "error")

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
