"""OpenAI's `/v1/responses`, which Codex and OpenAI's Agents SDK use.

`previous_response_id` and items of the type `item_reference` may name what the gateway has sent in the session. The
`instructions` of an earlier request hold until a later request has others. The fields `store`, `prompt_cache_key` and
`client_metadata` are ignored, and so is `include`, except that log probabilities are refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from verl_server.gateway.conversation import AssistantTurn, TurnRequest, normalize_messages
from verl_server.gateway.dialects.chat import parse_response_format
from verl_server.gateway.dialects.content import read_tools
from verl_server.gateway.dialects.dialect import Dialect, IssuedTurns, openai_error
from verl_server.gateway.dialects.fields import (
    bad_request,
    read_count,
    read_flag,
    read_list,
    read_number,
    read_object,
    read_objects,
    read_template_arguments,
    read_text,
    refuse,
    sampling_params,
)
from verl_server.gateway.dialects.reply_stream import ReplyStream
from verl_server.gateway.dialects.responses_input import last_thought, parse_conversation, parse_tool, resolve_ids
from verl_server.gateway.dialects.responses_stream import ResponseStream, output_items
from verl_server.gateway.dialects.tool_choice import parse_openai_choice
from verl_server.gateway.errors import GatewayError
from verl_server.types import Json

NOT_STORED = "the gateway stores no conversations and no prompts; send the whole conversation in 'input'"
LOGPROBS = "message.output_text.logprobs"
NO_LOGPROBS = "replies have no log probabilities; the record of the session has them"


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
        tools, omitted_tools = read_tools(read_objects(body, "tools"), parse_tool)
        forced_tools = parse_openai_choice(body, tools)
        messages = normalize_messages(parse_conversation(body))
        return TurnRequest(
            model=read_text(body, "model", default=""),
            messages=messages,
            last_thought=last_thought(body),
            tools=tools,
            omitted_tools=omitted_tools,
            forced_tools=forced_tools,
            allows_parallel_calls=body.get("parallel_tool_calls") is not False,
            template_arguments=read_template_arguments(body),
            reasoning_effort=read_text(read_object(body, "reasoning"), "effort", default="") or None,
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

    def open_stream(self, request: TurnRequest, reply_id: str) -> ReplyStream:
        return ResponseStream(request, reply_id, _response, _finished_response)

    def error(self, error: GatewayError) -> tuple[int, Json]:
        return openai_error(error)


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
