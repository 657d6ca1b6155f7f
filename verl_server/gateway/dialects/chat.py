"""OpenAI's `/v1/chat/completions`."""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from verl_server.gateway.conversation import (
    AssistantTurn,
    TurnDelta,
    TurnRequest,
    as_template_call,
    normalize_messages,
)
from verl_server.gateway.dialects.base import (
    Count,
    Dialect,
    Event,
    Penalty,
    ReplyStream,
    Stop,
    Stops,
    TokenText,
    TurnFields,
    bad_request,
    derive,
    encode_schema,
    find_last,
    join_texts,
    parse_openai_choice,
    read_object,
    read_objects,
    read_text,
    refuse,
)
from verl_server.gateway.dialects.content import parse_arguments, read_content, read_tools, tool_schema
from verl_server.types import Json

ROLES = {"developer": "system", "function": "tool"}
"""Roles of chat templates by the other roles of the API."""


class OpenAIFields(TurnFields):
    """What chat completions and completions share."""

    model: str | None = None
    max_tokens: Count | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: Stop | Stops | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logit_bias: dict[TokenText, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """By token ids as texts. The engine refuses unknown token ids."""
    stream_options: Json | None = None

    def sampling_params(self, **others: Any) -> Json:
        return super().sampling_params(
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            sampling_seed=self.seed,
            logit_bias=self.logit_bias or None,
            **others,
        )

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return (self.stream_options or {}).get("include_usage") is True


class ChatFields(OpenAIFields):
    """Fields of a chat completion besides the conversation and the tools."""

    max_completion_tokens: Count | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None


class ChatDialect(Dialect):
    """Chat completions."""

    path = "/v1/chat/completions"

    def parse(self, body: Json) -> TurnRequest:
        refuse(body, "n", (1,), "send several requests")
        refuse(body, "top_logprobs", (0,), "replies have the log probabilities of the sampled tokens only")
        for name in ("functions", "function_call"):
            refuse(body, name, ([], "auto", "none"), "use 'tools' and 'tool_choice'")
        fields = ChatFields.read(body)
        tools, omitted_tools = read_tools(read_objects(body, "tools"), _parse_tool)
        forced_tools = parse_openai_choice(body, tools)
        messages = read_objects(body, "messages", is_needed=True)
        last = find_last(messages, "role", "assistant")
        thought = last.get("reasoning_content") or join_texts(last.get("content"), "thinking", "thinking")
        return TurnRequest(
            model=fields.model or "",
            messages=normalize_messages([derive(_parse_message, message) for message in messages]),
            last_thought=thought if isinstance(thought, str) else "",
            tools=tools,
            omitted_tools=omitted_tools,
            forced_tools=forced_tools,
            allows_parallel_calls=body.get("parallel_tool_calls") is not False,
            template_arguments=fields.chat_template_kwargs or {},
            reasoning_effort=fields.reasoning_effort or None,
            sampling_params=fields.sampling_params(
                max_new_tokens=fields.max_completion_tokens or fields.max_tokens,
                **parse_response_format(body.get("response_format")),
            ),
            stream=bool(fields.stream),
            logprobs=bool(fields.logprobs),
            include_usage=fields.includes_usage,
        )

    def reply(self, request: TurnRequest, turn: AssistantTurn) -> Json:
        message: Json = {"role": "assistant", "content": turn.text if turn.text or not turn.tool_calls else None}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [as_template_call(call.id, call.name, call.arguments) for call in turn.tool_calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _logprobs(turn) if request.logprobs else None,
            "finish_reason": turn.finish_reason,
        }
        return {
            "id": f"chatcmpl-{turn.id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [choice],
            "usage": usage(turn),
        }

    def open_stream(self, request: TurnRequest, reply_id: str) -> ReplyStream:
        return ChatStream(request, reply_id)


class ChatStream(ReplyStream):
    """Chunks of a chat completion."""

    def __init__(self, request: TurnRequest, reply_id: str) -> None:
        super().__init__(request, reply_id)
        self._head = {
            "id": f"chatcmpl-{reply_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        self._logprobs: Json | None = None
        """Log probabilities of the tokens after the last text, for the last chunk."""

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        yield self._chunk({"role": "assistant", "content": ""})

    def add(self, delta: TurnDelta) -> Iterator[Event]:
        logprobs = _logprobs(delta) if self.request.logprobs and delta.token_ids else None
        if delta.reasoning:
            yield self._chunk({"reasoning_content": delta.reasoning}, logprobs=None if delta.text else logprobs)
        if delta.text:
            yield self._chunk({"content": delta.text}, logprobs=logprobs)
        self._logprobs = None if delta.reasoning or delta.text else logprobs

    def end(self, turn: AssistantTurn) -> Iterator[Event]:
        for index, call in enumerate(turn.tool_calls):
            yield self._chunk({"tool_calls": [{"index": index, **as_template_call(call.id, call.name, "")}]})
            yield self._chunk({"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]})
        yield self._chunk({}, finish_reason=turn.finish_reason, logprobs=self._logprobs)
        if self.request.include_usage:
            yield Event({**self._head, "choices": [], "usage": usage(turn)})
        yield Event("[DONE]")

    def _chunk(self, delta: Json, *, finish_reason: str | None = None, logprobs: Json | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return Event({**self._head, "choices": [choice]})


def usage(turn: AssistantTurn) -> Json:
    """The numbers of tokens of a turn."""
    num_completion_tokens = len(turn.token_ids)
    return {
        "prompt_tokens": turn.num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": turn.num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": turn.num_cached_tokens},
    }


def parse_response_format(value: Any) -> Json:
    """SGLang's sampling parameters for structured output."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if value is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    schema = value.get("json_schema") if isinstance(value, Mapping) else None
    if kind == "json_schema":
        if not isinstance(schema, Mapping) or not isinstance(schema.get("schema"), Mapping):
            raise bad_request("'response_format.json_schema.schema' must be a JSON schema, which is an object")
        return {"json_schema": encode_schema("response_format", schema["schema"])}
    raise bad_request("'response_format' must have the type text, json_object or json_schema")


def _parse_tool(tool: Json) -> Json | None:
    function = tool.get("function")
    if tool.get("type") not in (None, "function"):
        return None
    if "type" not in tool or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request('a tool must be {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    return tool_schema(function["name"], function.get("description"), function.get("parameters"))


def _parse_message(message: Json) -> Json:
    role = ROLES.get(str(message.get("role")), message.get("role"))
    parsed: Json = {"role": role, **read_content(message.get("content"), role)}
    if role == "tool":
        parsed["tool_call_id"] = read_text(message, "tool_call_id" if message["role"] == "tool" else "name")
    if role == "assistant":
        calls = read_objects(message, "tool_calls")
        if function := read_object(message, "function_call"):
            calls = [*calls, {"id": function.get("name"), "function": function}]
        if calls:
            parsed["tool_calls"] = [_parse_call(call) for call in calls]
    return parsed


def _parse_call(call: Json) -> Json:
    is_custom = call.get("type") == "custom"
    function = read_object(call, "custom" if is_custom else "function")
    if not isinstance(function.get("name"), str):
        raise bad_request("a tool call must have a function with a name")
    arguments = {"input": function.get("input")} if is_custom else parse_arguments(function.get("arguments"))
    return as_template_call(str(call.get("id") or ""), function["name"], arguments)


def _texts(tokens: Sequence[bytes]) -> list[str]:
    """Text of each token. Bytes that are no whole character are U+FFFD."""
    return [token.decode(errors="replace") for token in tokens]


def _logprobs(turn: AssistantTurn | TurnDelta) -> Json:
    entries = [
        {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(token), "top_logprobs": []}
        for token, text, logprob in zip(turn.tokens, _texts(turn.tokens), turn.logprobs, strict=True)
        if math.isfinite(logprob)
    ]
    return {"content": entries, "refusal": None}


# -- Completions ------------------------------------------------------------------------------------
# OpenAI's `/v1/completions`: the policy continues a text or a list of token ids. The prompt is not a chat.
#
# A text is encoded as it is: control tokens in the text become control tokens, and no token is added at the beginning.
# Prompts as token ids continue a recorded path exactly: send the ids of an earlier prompt, the ids of its turn (the
# field `token_ids` of a choice, which vLLM's replies have too), and further ids.

DEFAULT_MAX_TOKENS = 16
"""Maximum number of tokens of a completion without `max_tokens`, as OpenAI documents it."""


class CompletionFields(OpenAIFields):
    """Fields of a completion besides the prompt."""

    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    """0 or 1: replies have the log probabilities of the sampled tokens only."""


class CompletionsDialect(Dialect):
    """Completions of raw prompts."""

    path = "/v1/completions"

    def parse(self, body: Json) -> TurnRequest:
        for name in ("n", "best_of"):
            refuse(body, name, (1,), "send several requests")
        refuse(body, "echo", (False,), "replies have the new tokens only")
        refuse(body, "suffix", ("",), "the policy continues the prompt")
        fields = CompletionFields.read(body)
        return TurnRequest(
            model=fields.model or "",
            messages=(),
            sampling_params=fields.sampling_params(max_new_tokens=fields.max_tokens or DEFAULT_MAX_TOKENS),
            stream=bool(fields.stream),
            logprobs=fields.logprobs is not None,
            include_usage=fields.includes_usage,
            raw_prompt=_parse_prompt(body.get("prompt")),
        )

    def reply(self, request: TurnRequest, turn: AssistantTurn) -> Json:
        logprobs = _completion_logprobs(turn, _TextOffsets()) if request.logprobs else None
        choice = _choice(turn.text, turn.finish_reason, logprobs, turn.token_ids)
        return {**_head(request, turn.id), "choices": [choice], "usage": usage(turn)}

    def open_stream(self, request: TurnRequest, reply_id: str) -> ReplyStream:
        return CompletionStream(request, reply_id)


class CompletionStream(ReplyStream):
    """Chunks of a completion."""

    def __init__(self, request: TurnRequest, reply_id: str) -> None:
        super().__init__(request, reply_id)
        self._head = _head(request, reply_id)
        self._offsets = _TextOffsets()

    def add(self, delta: TurnDelta) -> Iterator[Event]:
        if delta.text or delta.token_ids:
            logprobs = _completion_logprobs(delta, self._offsets) if self.request.logprobs else None
            yield Event({**self._head, "choices": [_choice(delta.text, None, logprobs, delta.token_ids)]})

    def end(self, turn: AssistantTurn) -> Iterator[Event]:
        yield Event({**self._head, "choices": [_choice("", turn.finish_reason, None, ())]})
        if self.request.include_usage:
            yield Event({**self._head, "choices": [], "usage": usage(turn)})
        yield Event("[DONE]")


def _parse_prompt(value: Any) -> str | tuple[int, ...]:
    """A text or token ids. A list with one prompt is accepted, too."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    is_list = isinstance(value, list) and bool(value)
    if is_list and all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value):
        return tuple(value)
    raise bad_request("'prompt' must be one text or one list of token ids, not empty; send several requests otherwise")


def _head(request: TurnRequest, reply_id: str) -> Json:
    head = {"id": f"cmpl-{reply_id}", "object": "text_completion", "created": int(time.time())}
    return {**head, "model": request.model}


def _choice(text: str, finish_reason: str | None, logprobs: Json | None, token_ids: Sequence[int]) -> Json:
    choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
    return {**choice, "token_ids": list(token_ids)}


class _TextOffsets:
    """The characters of a completion at which its tokens begin. A character may have several tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0
        """Number of whole characters of the tokens so far."""

    def add(self, token: bytes) -> int:
        """The offset of the next token. A token within a character has the offset of the character."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(token))
        return offset


def _completion_logprobs(turn: AssistantTurn | TurnDelta, offsets: _TextOffsets) -> Json:
    """The log probabilities of the sampled tokens. Those of other tokens are not known."""
    return {
        "tokens": _texts(turn.tokens),
        "token_logprobs": list(turn.logprobs),
        "top_logprobs": None,
        "text_offset": [offsets.add(token) for token in turn.tokens],
    }
