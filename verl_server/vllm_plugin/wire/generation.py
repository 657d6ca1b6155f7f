"""`/generate`: requests and replies have SGLang's shape, vLLM generates."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import Any

import orjson
from starlette.responses import Response, StreamingResponse

from verl_server.adapter.sglang.requests import split_batch
from verl_server.adapter.vllm.replies import ABORTED, StreamedGeneration, parse_generations, without_tokens
from verl_server.adapter.vllm.requests import GENERATE, TOKENIZE, generate_payload
from verl_server.errors import BadInputError, ServerError, VerlServerError
from verl_server.types import Json
from verl_server.validation import is_list
from verl_server.vllm_plugin.wire.state import InnerCalls, ServerState, error_body, json_reply, status_of


async def generate(state: ServerState, calls: InnerCalls, body: Json) -> Response:
    """One prompt (the reply is an object, or a list with `n` above 1) or a list of prompts (the reply is a list)."""
    request = {("prompt" if name == "text" else name): value for name, value in body.items()}
    is_streamed = bool(request.pop("stream", False))
    if is_list(request.get("prompt") or None) or _has_lists(request.get("input_ids")):
        if is_streamed:
            raise BadInputError("a stream takes one prompt, got a list: make one request for each prompt")
        return json_reply(await _generate_batch(state, calls, request))
    payload = await _payload(state, calls, request)
    if is_streamed and payload["sampling_params"].get("max_tokens") != 0:
        events = _stream(state, calls, payload, request)
        first = await anext(events, None)  # an error of the request becomes the status of the reply
        if first is None:
            raise ServerError("vLLM's stream ended without an event")
        return StreamingResponse(_as_sent(first, events), media_type="text/event-stream")
    replies = await _generate_one(state, calls, payload, request)
    if is_streamed:
        events = _each({"index": index, **reply} for index, reply in enumerate(replies))
        return StreamingResponse(_as_sent(await anext(events), events), media_type="text/event-stream")
    return json_reply(replies[0] if len(replies) == 1 else replies)


def _has_lists(input_ids: Any) -> bool:
    return is_list(input_ids) and len(input_ids) > 0 and is_list(input_ids[0])


async def _generate_batch(state: ServerState, calls: InnerCalls, request: Json) -> list[Json]:
    """The generations of several prompts in the order of the prompts. The first error ends the others."""
    if isinstance(rid := request.get("rid"), str):
        num_prompts = len(request.get("input_ids") or request["prompt"])
        request = {**request, "rid": [f"{rid}_{index}" for index in range(num_prompts)]}
    requests = split_batch(request) or []
    async with calls.ended_together() as together:
        tasks = [asyncio.create_task(_generate_item(state, together, each)) for each in requests]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        error = next((found for task in done if (found := task.exception()) is not None), None)
    await asyncio.wait(tasks)  # after an error, vLLM ends the others at once
    if error is not None:
        for task in tasks:
            task.exception()  # the errors of the others follow from the first one
        raise error
    return [reply for task in tasks for reply in task.result()]


async def _generate_item(state: ServerState, calls: InnerCalls, request: Json) -> list[Json]:
    """The `n` generations of one prompt of a batch."""
    return await _generate_one(state, calls, await _payload(state, calls, request), request)


async def _generate_one(state: ServerState, calls: InnerCalls, payload: Json, request: Json) -> list[Json]:
    """The `n` generations of one prompt.

    vLLM refuses a limit of no tokens, which SGLang accepts. It generates one token, which is removed.
    """
    params = payload["sampling_params"]
    if is_empty := params.get("max_tokens") == 0:
        params["max_tokens"] = 1
    with state.running(payload["request_id"], payload.get("model")) as running:
        if not await state.wait_until_running(running, calls.gone):
            return [_aborted_reply(payload) for _ in range(_num_generations(payload))]
        state.require_weights()
        _add_version_to_salt(state, payload)
        reply = await calls.call(GENERATE, payload)
    return parse_generations(
        without_tokens(reply) if is_empty else reply,
        return_logprob=bool(request.get("return_logprob")),
        top_logprobs_num=int(request.get("top_logprobs_num") or 0),
    )


async def _each(events: Iterable[Json]) -> AsyncGenerator[Json]:
    for event in events:
        yield event


async def _stream(state: ServerState, calls: InnerCalls, payload: Json, request: Json) -> AsyncGenerator[Json]:
    """The events of one generation. Each has the tokens since the event before."""
    generation = StreamedGeneration(
        payload["request_id"],
        len(payload["token_ids"]),
        return_logprob=bool(request.get("return_logprob")),
        top_logprobs_num=int(request.get("top_logprobs_num") or 0),
    )
    with state.running(payload["request_id"], payload.get("model")) as running:
        if not await state.wait_until_running(running, calls.gone):
            for index in range(_num_generations(payload)):
                yield {"index": index, **_aborted_reply(payload)}
            return
        state.require_weights()
        _add_version_to_salt(state, payload)
        payload |= {"stream": True, "stream_options": {"include_usage": True}}
        async with contextlib.aclosing(calls.stream(GENERATE, payload, lambda: state.weight_version)) as chunks:
            async for chunk, weight_version in chunks:
                for event in generation.add(chunk, weight_version):
                    yield event


async def _as_sent(first: Json, events: AsyncGenerator[Json]) -> AsyncIterator[bytes]:
    """The stream of server-sent events. An error is an event, because the status was sent before."""
    try:
        yield _event(first)
        async with contextlib.aclosing(events):
            async for event in events:
                yield _event(event)
    except VerlServerError as error:
        yield _event(error_body(error, status_of(error)))
    yield b"data: [DONE]\n\n"


def _event(body: Json) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def _payload(state: ServerState, calls: InnerCalls, request: Mapping[str, Any]) -> Json:
    """The body of vLLM's route. A prompt that is text becomes tokens first."""
    fields = {name: value for name, value in request.items() if name not in ("prompt", "input_ids")}
    prompt, input_ids = request.get("prompt"), request.get("input_ids")
    if (prompt is None) == (input_ids is None):
        raise BadInputError("give either `text` or `input_ids`, not both or none")
    if is_text := input_ids is None:
        if not isinstance(prompt, str) or not prompt:
            raise BadInputError(f"text must be a non-empty string, got {prompt!r:.200}")
        if fields.get("top_logprobs_num"):
            raise BadInputError("top_logprobs_num needs a prompt of token ids: pass input_ids")
        input_ids = (await calls.call(TOKENIZE, {"prompt": prompt}))["tokens"]
    if fields.get("lora_path") in state.facts.base_names:
        raise BadInputError(f"lora_path={fields['lora_path']!r} is the base model: leave it out, or name an adapter")
    fields["rid"] = fields.get("rid") or uuid.uuid4().hex
    payload = generate_payload(input_ids or (), **fields)
    if is_text:
        payload["output_mode"] = "text"
    return payload


def _add_version_to_salt(state: ServerState, payload: Json) -> None:
    """Separate the prefix cache by the version of the weights: a pause in place keeps the cache of earlier weights."""
    payload["cache_salt"] = f"{state.weight_version}\n{payload.get('cache_salt', '')}"


def _num_generations(payload: Json) -> int:
    return int(payload["sampling_params"].get("n") or 1)


def _aborted_reply(payload: Json) -> Json:
    """The reply for a request that was aborted before vLLM got it."""
    meta: Json = {
        "id": payload["request_id"], "finish_reason": dict(ABORTED), "prompt_tokens": len(payload["token_ids"]),
        "completion_tokens": 0, "cached_tokens": 0, "weight_versions": [],
    }  # fmt: skip
    if "logprobs" in payload["sampling_params"]:
        meta["output_token_logprobs"] = []
    return {"output_ids": [], "meta_info": meta}
