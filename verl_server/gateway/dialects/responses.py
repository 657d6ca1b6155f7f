"""OpenAI's `/v1/responses`, which Codex and OpenAI's Agents SDK use.

The gateway stores no responses: each request has the whole conversation, and `previous_response_id` is refused. The
fields `store`, `include`, `reasoning`, `parallel_tool_calls`, `prompt_cache_key` and `client_metadata` are ignored.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from verl_server.gateway.conversation import AssistantTurn, TurnRequest, fold_system_messages
from verl_server.gateway.dialects.chat import parse_response_format
from verl_server.gateway.dialects.dialect import Dialect, Event, openai_error
from verl_server.gateway.dialects.fields import (
    bad_request,
    read_count,
    read_flag,
    read_number,
    read_object,
    read_text,
    refuse,
    require_recordable,
    sampling_params,
)
from verl_server.gateway.dialects.responses_input import parse_conversation, parse_tools
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.types import Json

NOT_STORED = "the gateway stores no responses and no prompts; send the whole conversation in 'input'"
ERROR_CODES = {
    ErrorKind.INVALID_REQUEST: "invalid_prompt",
    ErrorKind.CONTEXT_OVERFLOW: "context_length_exceeded",  # not in OpenAI's types, but sent; Codex compacts then
    ErrorKind.LIMIT_REACHED: "rate_limit_exceeded",
}
"""Codes of errors in a stream. Other errors have the code `server_error`."""
NUM_FIRST_EVENTS = 2
"""Number of events before the turn is known."""


class ResponsesDialect(Dialect):
    """Responses."""

    path = "/v1/responses"

    def parse(self, body: Json) -> TurnRequest:
        for name in ("previous_response_id", "conversation", "prompt"):
            refuse(body, name, (), NOT_STORED)
        refuse(body, "background", (False,), "the reply to the request has the turn")
        refuse(body, "truncation", ("disabled",), "the gateway removes nothing from a conversation")
        refuse(body, "top_logprobs", (0,), "replies have no log probabilities; the record of the session has them")
        refuse(body, "tool_choice", ("auto", "none"), "the policy chooses its tools")
        tools, messages = parse_tools(body), fold_system_messages(parse_conversation(body))
        require_recordable("input", messages)  # arguments of calls are JSON texts in the body
        return TurnRequest(
            model=read_text(body, "model", default=""),
            messages=messages,
            tools=[] if body.get("tool_choice") == "none" else tools,
            sampling_params=sampling_params(
                max_new_tokens=read_count(body, "max_output_tokens"),
                temperature=read_number(body, "temperature", 0, 100),
                top_p=read_number(body, "top_p", 0, 1),
                **_parse_format(read_object(body, "text")),
            ),
            stream=read_flag(body, "stream"),
        )

    def reply(self, request: TurnRequest, turn: AssistantTurn) -> Json:
        return _finished_response(request, turn, turn.id)

    def begin(self, request: TurnRequest, reply_id: str, num_prompt_tokens: int) -> list[Event]:
        response = _response(request, reply_id, "in_progress", ())
        kinds = ("response.created", "response.in_progress")
        return [_event(kind, number, response=response) for number, kind in enumerate(kinds)]

    def keep_alive(self) -> bytes:
        # OpenAI sends this event, too. A comment would not reset the timer of Codex for idle streams (300 s).
        return _event("keepalive", NUM_FIRST_EVENTS - 1).encode()

    def events(self, request: TurnRequest, turn: AssistantTurn, reply_id: str) -> Iterator[Event]:
        numbers = itertools.count(NUM_FIRST_EVENTS)

        def event(kind: str, **fields: Any) -> Event:
            return _event(kind, next(numbers), **fields)

        response = _finished_response(request, turn, reply_id)
        for index, item in enumerate(response["output"]):
            yield from _item_events(event, item, index)
        yield event(f"response.{response['status']}", response=response)

    def error(self, error: GatewayError) -> tuple[int, Json]:
        return openai_error(error)

    def failure(self, request: TurnRequest, error: GatewayError, reply_id: str) -> Event:
        code = ERROR_CODES.get(error.kind, "server_error")
        fields = {"code": code, "message": openai_error(error)[1]["error"]["message"]}
        response = _response(request, reply_id, "failed", (), error=fields)
        return _event("response.failed", NUM_FIRST_EVENTS, response=response)


def _parse_format(text: Json) -> Json:
    """SGLang's sampling parameters for structured output."""
    kind = read_object(text, "format").get("type", "text")
    if kind in ("text", "json_object"):
        return parse_response_format({"type": kind})
    schema = read_object(text, "format").get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise bad_request("'text.format' must have the type text, json_object, or json_schema and a 'schema'")
    return parse_response_format({"type": "json_schema", "json_schema": {"schema": schema}})


def _event(kind: str, number: int, **fields: Any) -> Event:
    return Event({"type": kind, "sequence_number": number, **fields}, kind)


def _item_events(event: Callable[..., Event], item: Json, index: int) -> Iterator[Event]:
    """The events of an output item, from its beginning to its end."""
    place = {"item_id": item["id"], "output_index": index}
    is_call = item["type"] == "function_call"
    empty: Json = {"arguments": ""} if is_call else {"content": []}
    yield event("response.output_item.added", output_index=index, item={**item, "status": "in_progress", **empty})
    if is_call:
        arguments = item["arguments"]
        yield event("response.function_call_arguments.delta", **place, delta=arguments)
        yield event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
    else:
        (part,) = item["content"]
        place["content_index"] = 0
        kind, text = f"response.{part['type']}", part["text"]
        logprobs: Json = {"logprobs": []} if part["type"] == "output_text" else {}
        yield event("response.content_part.added", **place, part={**part, "text": ""})
        if text:
            yield event(f"{kind}.delta", **place, delta=text, **logprobs)
        yield event(f"{kind}.done", **place, text=text, **logprobs)
        yield event("response.content_part.done", **place, part=part)
    yield event("response.output_item.done", output_index=index, item=item)


def _output(turn: AssistantTurn) -> list[Json]:
    """The items of a turn. A turn without calls has a message, also without a text, so that agents repeat the turn."""
    items = list[Json]()
    if turn.reasoning:
        thought = {"type": "reasoning_text", "text": turn.reasoning}
        items.append(
            {"type": "reasoning", "id": f"rs_{turn.id}", "status": "completed", "summary": [], "content": [thought]}
        )
    if turn.text or not turn.tool_calls:
        status = "incomplete" if turn.finish_reason == "length" and not turn.tool_calls else "completed"
        part = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg_{turn.id}", "status": status, "role": "assistant", "content": [part]}
        )
    items.extend(
        {
            "type": "function_call",
            "id": f"fc_{call.id}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in turn.tool_calls
    )
    return items


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
    return _response(request, response_id, status, _output(turn), usage=usage, incomplete_details=details)


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
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": params.get("temperature"),
        "text": None if "json_schema" in params else {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools],
        "top_p": params.get("top_p"),
        "truncation": "disabled",
        "usage": usage,
        "user": None,
    }
