"""Requests that generate, abort, pause and flush. They are methods of `AsyncHttpServerEngineAdapter`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl_server.adapter.connection import ServerConnection
from verl_server.adapter.sglang import endpoints
from verl_server.adapter.sglang.finish_reasons import correct_aborts
from verl_server.adapter.sglang.payloads import abort_payload, pause_payload
from verl_server.adapter.sglang.replies import (
    IncrementalStream,
    convert_weight_versions,
    require_answer,
    require_answers,
    require_logprobs,
    require_no_abort,
)
from verl_server.adapter.sglang.request_fields import explain_refusal
from verl_server.adapter.sglang.requests import PromptLimits, generate_payload
from verl_server.config import PauseMode
from verl_server.errors import BadInputError, NotReadyError, ServerBusyError, ServerError
from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter

MAX_STREAM_EVENTS = 1024
"""Maximum number of events of one stream after its first token, unless the caller sets `stream_interval`."""


async def generate(
    adapter: AsyncHttpServerEngineAdapter,
    /,
    prompt: str | list[str] | None = None,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    input_ids: list[int] | list[list[int]] | None = None,
    image_data: Any = None,
    return_logprob: bool | list[bool] | None = None,
    logprob_start_len: int | list[int] | None = None,
    top_logprobs_num: int | list[int] | None = None,
    token_ids_logprob: Any = None,
    lora_path: str | list[str | None] | None = None,
    custom_logit_processor: str | list[str] | None = None,
    rid: str | list[str] | None = None,
    **fields: Any,
) -> Any:
    """Generate for one prompt, which returns a dict, or for a list of prompts, which returns a list of dicts.

    Give either `prompt` (text) or `input_ids` (token ids). The reply is SGLang's: `output_ids` and `meta_info`, with
    `output_token_logprobs` as `[logprob, token id, text]`, `finish_reason`, and `weight_version` as an int. Other
    keyword arguments are fields of SGLang's `GenerateReqInput`; a field that the server does not know is refused.
    `rid`: request id, a string; with a list of prompts, a list with one id for each prompt. If a list of
    prompts has one string, SGLang appends `_0`, `_1` and so on to it.

    Raises BadInputError for invalid input before it is sent, NotReadyError while memory is released, and ServerError
    when a log probability of an output token is NaN.
    """
    fields |= {
        "image_data": image_data,
        "return_logprob": return_logprob,
        "logprob_start_len": logprob_start_len,
        "top_logprobs_num": top_logprobs_num,
        "token_ids_logprob": token_ids_logprob,
        "lora_path": lora_path,
        "custom_logit_processor": custom_logit_processor,
    }
    connection = adapter.connection
    await _require_memory(connection)
    await connection.require_known_fields(fields)
    limits = await connection.get_limits()
    body = generate_payload(
        limits,
        prompt=prompt,
        sampling_params=sampling_params,
        input_ids=input_ids,
        rid=rid,
        stream=False,
        fields=fields,
    )
    connection.requests_in_flight += 1
    try:
        reply = await connection.call(endpoints.GENERATE, body)
    except (BadInputError, ServerError) as error:
        raise explain_refusal(error, sampling_params) from error.__cause__
    finally:
        connection.requests_in_flight -= 1
    require_answers(reply, body, limits.vocab_size, connection.base_url + endpoints.GENERATE.path)
    require_logprobs(reply)
    correct_aborts(reply if isinstance(reply, list) else [reply], body.get("sampling_params"), limits.end_tokens)
    return convert_weight_versions(reply)


async def generate_stream(
    adapter: AsyncHttpServerEngineAdapter,
    /,
    prompt: str | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    input_ids: list[int] | None = None,
    rid: str | None = None,
    **fields: Any,
) -> AsyncGenerator[Json, None]:
    """Generate for one prompt and yield replies, each with all tokens so far. A list of prompts is refused.

    A server with SGLang's `incremental_streaming_output` sends each token once; the others send all tokens so far in
    each event. A request for more than 1,024 tokens gets several tokens in each event: the time for whole replies grows
    with the square of the number of events. `sampling_params={"stream_interval": 1}` gets an event for each token.

    Other keyword arguments are those of `generate`. Closing the iterator, for example by leaving the `async for`,
    aborts the request on the server. Raises the errors of `generate`.

    Use each `rid` once: two seconds after the end of a stream, SGLang aborts a request that runs with the same id
    (`TokenizerManager.create_abort_task`). The router gives each attempt an id of its own.
    """
    connection = adapter.connection
    await _require_memory(connection)
    await connection.require_known_fields(fields)
    limits = await connection.get_limits()
    body = generate_payload(
        limits,
        prompt=prompt,
        sampling_params=sampling_params,
        input_ids=input_ids,
        rid=rid,
        stream=True,
        fields=fields,
    )
    server_args = await connection.get_resolved_args()
    _limit_stream_events(body, limits, server_args)
    is_incremental = server_args.get("incremental_streaming_output")
    # With `n` > 1, the events of the samples are mixed. They name the sample by `index`.
    streams: defaultdict[int, IncrementalStream] = defaultdict(IncrementalStream)
    num_checked: defaultdict[int, int] = defaultdict(int)
    params, url = body.get("sampling_params") or {}, connection.base_url + endpoints.GENERATE.path
    sent_rid = rid if (params.get("n") or 1) == 1 else None  # several samples have ids of their own
    connection.requests_in_flight += 1
    try:
        async for event in connection.http.stream(endpoints.GENERATE, body):
            connection.needs_continue = False
            require_no_abort(event, url)
            index = event.get("index", 0)
            reply = convert_weight_versions(streams[index].add(event) if is_incremental else event)
            correct_aborts([reply], body.get("sampling_params"), limits.end_tokens)
            require_logprobs(reply, num_checked[index])
            num_checked[index] = require_answer(reply, sent_rid, params, limits.vocab_size, url, num_checked[index])
            yield reply
    except (BadInputError, ServerError) as error:
        raise explain_refusal(error, sampling_params) from error.__cause__
    finally:
        connection.requests_in_flight -= 1


def _limit_stream_events(body: Json, limits: PromptLimits, server_args: Json) -> None:
    """Set the number of tokens per event (`stream_interval`) of a long generation, unless the caller has set it."""
    params = body.get("sampling_params") or {}
    limits_of_tokens = (params.get("max_new_tokens", 0), limits.max_prompt_tokens)  # None: no limit, or not known
    max_tokens = min((number for number in limits_of_tokens if number is not None), default=0)
    interval = math.ceil(max_tokens / MAX_STREAM_EVENTS)
    if params.get("stream_interval") is None and interval > (server_args.get("stream_interval") or 1):
        body["sampling_params"] = {**params, "stream_interval": interval}


async def _require_memory(connection: ServerConnection) -> None:
    """Raise NotReadyError while memory is released. The server is asked only if this adapter knows of a release."""
    if connection.released_memory:
        await connection.update_released_memory()
    if connection.released_memory:
        raise NotReadyError(
            f"the server at {connection.base_url} has released {sorted(connection.released_memory)}: "
            "call resume_memory_occupation first",
            url=connection.base_url,
        )


async def abort_request(adapter: AsyncHttpServerEngineAdapter, rid: str | None = None, abort_all: bool = False) -> None:
    """Abort the request with the id `rid` and all requests whose id starts with `rid`, or all requests.

    SGLang does nothing if there is no request with the id `rid` itself. vLLM aborts the others in this case, too.
    """
    await adapter.connection.call(endpoints.ABORT, abort_payload(rid, abort_all))


async def pause_generation(adapter: AsyncHttpServerEngineAdapter, mode: str = PauseMode.ABORT) -> None:
    """Pause generation. New requests wait in the server; `PauseMode` says what happens to running requests."""
    await adapter.connection.call(endpoints.PAUSE, pause_payload(mode))
    adapter.connection.paused = True


async def continue_generation(adapter: AsyncHttpServerEngineAdapter) -> None:
    """Continue after `pause_generation`. Raises NotReadyError while memory is released, by whichever client.

    If another client has released memory since this adapter's pause, requests wait in the server until the memory is
    resumed.
    """
    connection = adapter.connection
    if not connection.paused:
        await connection.update_released_memory()
    await _require_memory(connection)
    await connection.call(endpoints.CONTINUE, {})
    connection.paused = connection.is_held = connection.needs_continue = False


async def end_update_pause(adapter: AsyncHttpServerEngineAdapter) -> None:
    """Internal. End the pause of a weight update. While memory is released, generation continues at its resume."""
    if adapter.connection.released_memory:
        adapter.connection.paused = False
    else:
        await continue_generation(adapter)


async def flush_cache(adapter: AsyncHttpServerEngineAdapter) -> None:
    """Drop the prefix cache. Raises ServerBusyError while requests run that are not paused."""
    try:
        await adapter.connection.call(endpoints.FLUSH, {})
    except BadInputError as error:  # SGLang answers 400 when requests are running
        raise ServerBusyError(
            f"the cache of {adapter.base_url} was not flushed because requests are running: {error.message}",
            url=adapter.base_url,
        ) from error
