"""OpenAI's `/v1/responses`, which Codex and OpenAI's Agents SDK use.

`previous_response_id` and items of the type `item_reference` may name what the gateway has sent in the session. The
`instructions` of an earlier request hold until a later request has others. The fields `store`, `prompt_cache_key` and
`client_metadata` are ignored, and so is `include`, except that log probabilities are refused.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from verl_server.gateway.conversation import (
    AssistantTurn,
    ToolUse,
    TurnDelta,
    TurnRequest,
    as_template_call,
    normalize_messages,
)
from verl_server.gateway.dialects.base import (
    Count,
    Dialect,
    Event,
    IssuedTurns,
    ReplyStream,
    TurnFields,
    bad_request,
    derive,
    find_last,
    join_texts,
    openai_error,
    parse_openai_choice,
    read_list,
    read_object,
    read_objects,
    read_text,
    refuse,
)
from verl_server.gateway.dialects.chat import parse_response_format
from verl_server.gateway.dialects.content import parse_arguments, read_content, read_tools, tool_schema
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.trajectory.rendering.messages import Message
from verl_server.types import Json

# -- Responses stream -------------------------------------------------------------------------------
# The items of a response of OpenAI's `/v1/responses`, and the events with which a response is streamed.

ERROR_CODES = {
    ErrorKind.INVALID_REQUEST: "invalid_prompt",
    ErrorKind.CONTEXT_OVERFLOW: "context_length_exceeded",  # not in OpenAI's types, but sent; Codex compacts then
    ErrorKind.LIMIT_REACHED: "rate_limit_exceeded",
    ErrorKind.TOO_MANY_REQUESTS: "rate_limit_exceeded",
}
"""Codes of errors in a stream. Other errors have the code `server_error`."""


def reasoning_item(reply_id: str, text: str) -> Json:
    """The item of a thought."""
    thought = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": f"rs_{reply_id}", "status": "completed", "summary": [], "content": [thought]}


def message_item(reply_id: str, text: str, status: str) -> Json:
    """The item of a text."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": f"msg_{reply_id}", "status": status, "role": "assistant", "content": [part]}


def call_item(call: ToolUse) -> Json:
    """The item of a tool call."""
    return {
        "type": "function_call",
        "id": f"fc_{call.id}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def output_items(turn: AssistantTurn, reply_id: str) -> list[Json]:
    """The items of a turn. A turn without calls has a message, also without a text, so that agents repeat the turn."""
    items = [reasoning_item(reply_id, turn.reasoning)] if turn.reasoning else []
    if turn.text or not turn.tool_calls:
        status = "incomplete" if turn.finish_reason == "length" and not turn.tool_calls else "completed"
        items.append(message_item(reply_id, turn.text, status))
    return [*items, *map(call_item, turn.tool_calls)]


class ResponseStream(ReplyStream):
    """Events of a response. The items come one after the other: the thought, the message, each tool call."""

    def __init__(self, request: TurnRequest, reply_id: str) -> None:
        super().__init__(request, reply_id)
        self._numbers = itertools.count()
        self._last_number = 0
        self._index = -1
        """Index of the item that has begun."""
        self._open: Json | None = None
        """The item that has begun, without its text."""
        self._text = list[str]()
        """The text of that item so far."""

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        response = _response(self.request, self.reply_id, "in_progress", ())
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=response)

    def keep_alive(self) -> bytes:
        # OpenAI sends this event, too. A comment would not reset the timer of Codex for idle streams (300 s).
        return Event({"type": "keepalive", "sequence_number": self._last_number}, "keepalive").encode()

    def add(self, delta: TurnDelta) -> Iterator[Event]:
        if delta.reasoning:
            yield from self._begin_item(reasoning_item(self.reply_id, ""))
            yield self._add_text(delta.reasoning)
        if delta.text:
            yield from self._begin_item(message_item(self.reply_id, "", "in_progress"))
            yield self._add_text(delta.text)

    def end(self, turn: AssistantTurn) -> Iterator[Event]:
        response = _finished_response(self.request, turn, self.reply_id)
        for item in response["output"]:
            if item["type"] == "function_call":
                yield from self._end_item()
                yield from self._call_events(item)
            elif item["type"] == "message":
                yield from self._begin_item(message_item(self.reply_id, "", "in_progress"))
                yield from self._end_item(item)
        yield from self._end_item()
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: GatewayError) -> Event:
        code = ERROR_CODES.get(error.kind, "server_error")
        fields = {"code": code, "message": openai_error(error)[1]["error"]["message"]}
        response = _response(self.request, self.reply_id, "failed", (), error=fields)
        return self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._last_number = next(self._numbers)
        return Event({"type": kind, "sequence_number": self._last_number, **fields}, kind)

    def _place(self, item: Json) -> Json:
        return {"item_id": item["id"], "output_index": self._index}

    def _begin_item(self, item: Json) -> Iterator[Event]:
        """Begin the item of a text, unless it has begun already."""
        if self._open is not None and self._open["type"] == item["type"]:
            return
        yield from self._end_item()
        self._open, self._index = item, self._index + 1
        empty = {**item, "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=self._index, item=empty)
        part = item["content"][0]
        yield self._event("response.content_part.added", **self._place(item), content_index=0, part=part)

    def _add_text(self, text: str) -> Event:
        assert self._open is not None
        self._text.append(text)
        return self._text_event("delta", delta=text)

    def _text_event(self, kind: str, **fields: str) -> Event:
        assert self._open is not None
        name = self._open["content"][0]["type"]
        logprobs: Json = {"logprobs": []} if name == "output_text" else {}
        return self._event(f"response.{name}.{kind}", **self._place(self._open), content_index=0, **fields, **logprobs)

    def _end_item(self, item: Json | None = None) -> Iterator[Event]:
        """End the item that has begun, if there is one. `item`: the finished item. None: the item with its text."""
        if self._open is None:
            return
        text, self._text = "".join(self._text), []
        if item is None:
            part = {**self._open["content"][0], "text": text}
            item = {**self._open, "status": "completed", "content": [part]}
        yield self._text_event("done", text=text)
        place = self._place(item)
        yield self._event("response.content_part.done", **place, content_index=0, part=item["content"][0])
        self._open = None
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def _call_events(self, item: Json) -> Iterator[Event]:
        """The events of a tool call, from its beginning to its end."""
        self._index += 1
        place, arguments = self._place(item), item["arguments"]
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield self._event("response.output_item.added", output_index=self._index, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        kind = "response.function_call_arguments.done"
        yield self._event(kind, **place, name=item["name"], arguments=arguments)
        yield self._event("response.output_item.done", output_index=self._index, item=item)


# -- Responses input --------------------------------------------------------------------------------
# The conversation in a request to OpenAI's `/v1/responses`: items of several types become chat messages.
#
# The reply of a turn has several items: a thought, a message, and one `function_call` for each call. An agent sends
# them again one after the other. `normalize_messages` joins them to one assistant message, as the turn was generated.

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles of chat messages by the roles of the API."""
CALLS = ("function_call", "custom_tool_call")
CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def _parse_item(item: Json) -> list[Json]:
    kind = item.get("type") or ("message" if "role" in item else None)
    if not isinstance(kind, str):
        raise bad_request("an item needs a 'type'")
    if kind == "message":
        role = ROLES.get(read_text(item, "role"))
        if role is None:
            raise bad_request(f"'role' must be one of {', '.join(ROLES)}")
        return [{"role": role, **read_content(item.get("content"), role)}]
    if kind in CALLS:
        is_custom = kind == "custom_tool_call"
        arguments = {"input": item.get("input")} if is_custom else parse_arguments(item.get("arguments"))
        call = as_template_call(read_text(item, "call_id"), read_text(item, "name"), arguments)
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind in CALL_OUTPUTS:
        content = read_content(item.get("output"), "tool", "output")
        return [{"role": "tool", **content, "tool_call_id": read_text(item, "call_id")}]
    if kind == "reasoning":
        return []
    return [{"role": "user", **read_content([item], "user")}]  # such as a web search, or a type that is not known


def resolve_ids(body: Json, issued: IssuedTurns) -> Json:
    """A body with the items of earlier turns in place of `previous_response_id` and of items that only name an item.

    Raises GatewayError for an id that the gateway has not sent in this session.
    """
    previous, items = body.get("previous_response_id"), body.get("input")
    if isinstance(items, list):
        items = [_resolve_item(item, issued) if _is_reference(item) else item for item in items]
    if previous is None:
        return {**body, "input": items}
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages = issued.conversation_to(_find_turn(previous, issued))
    if body.get("instructions") and messages[0]["role"] == "system":
        del messages[0]
    earlier = [item for message in messages for item in _as_items(message)]
    return {**body, "input": [*earlier, *items] if isinstance(items, list) else items}


def _is_reference(item: Any) -> bool:
    """Whether an item only names an item. OpenAI's clients may leave out the type."""
    return isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})


def _find_turn(issued_id: Any, issued: IssuedTurns) -> AssistantTurn:
    turn = issued.find_turn(issued_id.partition("_")[2]) if isinstance(issued_id, str) else None
    if turn is None:
        raise bad_request(
            f"'previous_response_id' or an 'item_reference' has the id {str(issued_id)[:80]!r}, which the gateway has "
            "not sent in this session; send the whole conversation in 'input'"
        )
    return turn


def _resolve_item(reference: Json, issued: IssuedTurns) -> Json:
    turn, item_id = _find_turn(reference.get("id"), issued), str(reference.get("id"))
    items = output_items(turn, item_id.partition("_")[2])
    return next((item for item in items if item["id"] == item_id), {"type": "reasoning", "id": item_id})


def _as_items(message: Message) -> list[Json]:
    """The items of a chat message."""
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()
    ]
    for call in calls:
        if not isinstance(call["arguments"], str):
            call["arguments"] = orjson.dumps(call["arguments"]).decode()
    return [{"type": "message", "role": message["role"], "content": message["content"]}, *calls]


def parse_conversation(body: Json) -> list[Json]:
    """The chat messages of `instructions` and `input`. Raises GatewayError."""
    instructions = read_text(body, "instructions", default="")
    system = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(body.get("input"), str):
        return [*system, {"role": "user", "content": body["input"]}]
    if not isinstance(body.get("input"), list):
        raise bad_request("'input' must be a string or a list of items")
    messages = list[Json]()
    for index, item in enumerate(read_objects(body, "input", is_needed=True)):
        try:
            messages += derive(_parse_item, item)
        except GatewayError as error:
            raise bad_request(f"'input[{index}]': {error.message}") from None
    if not messages:
        raise bad_request("'input' must have a message")
    return [*system, *messages]


def last_thought(body: Json) -> str:
    """The thought of the last turn in `input`, if the agent repeats it, or that of an earlier turn."""
    if isinstance(body["input"], str):
        return ""
    return join_texts(find_last(body["input"], "type", "reasoning").get("content"), "reasoning_text", "text")


def parse_tool(tool: Json) -> Json | None:
    """The schema of a tool of the type `function`. None for other types, which Codex sends with every request."""
    if tool.get("type") not in (None, "function"):
        return None
    if "type" not in tool or not isinstance(tool.get("name"), str) or not tool["name"]:
        raise bad_request(
            "'tools' must have a 'name': a tool is "
            '{"type": "function", "name": ..., "description": ..., "parameters": {...}}'
        )
    return tool_schema(tool["name"], tool.get("description"), tool.get("parameters"))


# -- Responses --------------------------------------------------------------------------------------

NOT_STORED = "the gateway stores no conversations and no prompts; send the whole conversation in 'input'"
LOGPROBS = "message.output_text.logprobs"
NO_LOGPROBS = "replies have no log probabilities; the record of the session has them"


class ResponsesFields(TurnFields):
    """Fields of a response besides the conversation and the tools."""

    model: str | None = None
    max_output_tokens: Count | None = None


class ResponsesDialect(Dialect):
    """Responses."""

    path = "/v1/responses"

    def resolve(self, body: Json, issued: IssuedTurns) -> Json:
        return resolve_ids(body, issued)

    def parse(self, body: Json) -> TurnRequest:
        for name in ("conversation", "prompt"):
            refuse(body, name, (), NOT_STORED)
        refuse(body, "background", (False,), "the reply to the request has the turn")
        refuse(body, "truncation", ("disabled",), "the gateway removes nothing from a conversation")
        refuse(body, "top_logprobs", (0,), NO_LOGPROBS)
        if LOGPROBS in read_list(body, "include"):
            raise bad_request(f"'include' = {LOGPROBS} is not supported: {NO_LOGPROBS}")
        fields = ResponsesFields.read(body)
        tools, omitted_tools = read_tools(read_objects(body, "tools"), parse_tool)
        forced_tools = parse_openai_choice(body, tools)
        messages = normalize_messages(parse_conversation(body))
        return TurnRequest(
            model=fields.model or "",
            messages=messages,
            last_thought=last_thought(body),
            tools=tools,
            omitted_tools=omitted_tools,
            forced_tools=forced_tools,
            allows_parallel_calls=body.get("parallel_tool_calls") is not False,
            template_arguments=fields.chat_template_kwargs or {},
            reasoning_effort=read_text(read_object(body, "reasoning"), "effort", default="") or None,
            sampling_params=fields.sampling_params(
                max_new_tokens=fields.max_output_tokens, **_parse_format(read_object(body, "text"))
            ),
            stream=bool(fields.stream),
        )

    def reply(self, request: TurnRequest, turn: AssistantTurn) -> Json:
        return _finished_response(request, turn, turn.id)

    def open_stream(self, request: TurnRequest, reply_id: str) -> ReplyStream:
        return ResponseStream(request, reply_id)


def _parse_format(text: Json) -> Json:
    """SGLang's sampling parameters for structured output."""
    kind = read_object(text, "format").get("type", "text")
    if kind in ("text", "json_object"):
        return parse_response_format({"type": kind})
    schema = read_object(text, "format").get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise bad_request("'text.format' must have the type text, json_object, or json_schema and a 'schema'")
    return parse_response_format({"type": "json_schema", "json_schema": {"schema": schema}})


def _finished_response(request: TurnRequest, turn: AssistantTurn, response_id: str) -> Json:
    num_output_tokens = len(turn.token_ids)
    usage = {
        "input_tokens": turn.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": turn.num_cached_tokens},
        "output_tokens": num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # thoughts and text are not counted separately
        "total_tokens": turn.num_prompt_tokens + num_output_tokens,
    }
    status = "incomplete" if turn.finish_reason == "length" else "completed"
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return _response(
        request, response_id, status, output_items(turn, response_id), usage=usage, incomplete_details=details
    )


def _response(
    request: TurnRequest,
    response_id: str,
    status: str,
    output: Sequence[Json],
    *,
    usage: Json | None = None,
    incomplete_details: Json | None = None,
    error: Json | None = None,
) -> Json:
    params = request.sampling_params
    return {
        "id": f"resp_{response_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": error,
        "incomplete_details": incomplete_details,
        "instructions": None,
        "max_output_tokens": params.get("max_new_tokens"),
        "metadata": {},
        "model": request.model,
        "output": list(output),
        "parallel_tool_calls": request.allows_parallel_calls,
        "previous_response_id": None,
        "reasoning": {"effort": request.reasoning_effort, "summary": None},
        "store": False,
        "temperature": params.get("temperature"),
        "text": None if "json_schema" in params else {"format": {"type": "text"}},
        "tool_choice": "auto" if request.forced_tools is None else "required" if request.forced_tools else "none",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools],
        "top_p": params.get("top_p"),
        "truncation": "disabled",
        "usage": usage,
        "user": None,
    }
