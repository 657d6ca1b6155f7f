"""`GenerateFn`: the function through which episodes ask an engine or a router for tokens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from verl_server.adapter.sglang.request_fields import parse_sampling_params
from verl_server.agent.loop_slots import LoopSlots
from verl_server.errors import BadInputError, DeadlineError, ServerError
from verl_server.router.resumable_generation import ResumableGeneration
from verl_server.router.token_reports import OnTokens, report_tokens
from verl_server.types import Json
from verl_server.validation import require_callable

if TYPE_CHECKING:
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter


FIRST_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.05, 1.0
"""Seconds before an aborted generation is requested again. The delay doubles while a weight update goes on."""
LONG_ATTEMPT_S = 60.0
"""Seconds of an attempt after which the server has generated, so that the next abort is that of another update."""
ABORT_TIMEOUT_S = 1800.0
"""Seconds for which a generation may be aborted again and again without a new token: longer than any weight update."""


_SET_BY_EPISODE = "the episode sets it, so leave it out"
_RECORDED = "agents always record log probabilities, so leave it out"
_PARTIAL = (
    "pass it to the generate function: engine=functools.partial(fleet.router.generate, {}=...), with renderer=... and "
    "limits=RolloutLimits(max_context_tokens=...)"
)
_MISPLACED = {
    "sampling_params": "write the parameters themselves, for example generate(messages, temperature=0.0)",
    "timeout_s": "limit the duration of an episode with RolloutLimits(timeout_s=...)",
    **dict.fromkeys(("return_logprob", "logprobs", "top_logprobs"), _RECORDED),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "write max_new_tokens, SGLang's name"),
    "stream": "agents generate whole turns, so leave it out",
    **dict.fromkeys(("rid", "session_id", "prompt", "input_ids", "image_data"), _SET_BY_EPISODE),
    "routed_experts_start_len": _SET_BY_EPISODE,
    **{name: _PARTIAL.format(name) for name in ("lora_path", "weight_version", "min_weight_version")},
    **{name: _PARTIAL.format(name) for name in ("priority", "custom_logit_processor")},
    "return_routed_experts": "pass RolloutRunner(return_routed_experts=True)",
}
"""Arguments of `generate` that are no sampling parameters, and what to do instead."""


_MAX_PROMPT = re.compile(r"accepts at most (\d+) tokens")
"""The error of the adapter for a prompt that is too long."""
_CONTEXT_LENGTH = re.compile(r"maximum context length of (\d+) tokens")
"""SGLang's error for a prompt and a `max_new_tokens` that are too long together."""
_RESERVED_TOKENS = 6
"""Number of tokens of the context length that SGLang's scheduler takes neither for a prompt nor for a response."""


class GenerateFn(Protocol):
    """Generates tokens for one prompt: `RolloutRouter.generate`, `RouterClient.generate`, or `as_generate_fn(adapter)`.

    `rid`: request id. `session_id`: requests of one session go to the same replica if possible. `request`: SGLang's
    arguments (`input_ids`, `sampling_params`, `return_logprob`, ...). Returns SGLang's reply.

    A function can have the argument `on_tokens: OnTokens | None = None`, which gets the tokens while they are
    generated, in the event loop of the call. Without this argument, callers have the tokens when the reply is complete.
    """

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Json: ...


def as_generate_fn(adapter: AsyncHttpServerEngineAdapter) -> GenerateFn:
    """A `GenerateFn` that sends all requests to one server, for example `as_generate_fn(engine.adapter.asynchronous)`.

    A generation that a weight update aborts is continued from the tokens that the server has returned. The function
    raises DeadlineError if a generation is aborted for `ABORT_TIMEOUT_S` without a new token. Raises BadInputError for
    an object that is not an asynchronous adapter.
    """
    if not inspect.iscoroutinefunction(getattr(adapter, "generate", None)):
        raise BadInputError(
            f"as_generate_fn needs an AsyncHttpServerEngineAdapter, got {type(adapter).__name__}; pass "
            "engine.adapter.asynchronous or AsyncHttpServerEngineAdapter.attach(url). A router needs no conversion: "
            "pass fleet.router.generate to the runner"
        )

    async def generate(*, rid: str, session_id: str, on_tokens: OnTokens | None = None, **request: Any) -> Json:
        del session_id  # there is only one server
        generation, pauses = ResumableGeneration(request), _AbortPauses()
        with report_tokens(generation, on_tokens):
            while True:
                await _run_attempt(adapter, generation, f"{rid}~{generation.attempts}")
                reply = generation.reply()
                if not generation.is_aborted:
                    return reply
                generation.end_attempt()
                if generation.is_complete:
                    return generation.reply()
                await pauses.wait(len(generation.tokens))

    return generate


async def _run_attempt(adapter: AsyncHttpServerEngineAdapter, generation: ResumableGeneration, rid: str) -> None:
    """One attempt at a generation, as a stream if a caller gets the tokens while they are generated."""
    body = generation.begin_attempt()
    if not (generation.reports and generation.can_continue):
        generation.record_event(await adapter.generate(rid=rid, **body))
        return
    async with contextlib.aclosing(adapter.generate_stream(rid=rid, **body)) as stream:
        async for event in stream:
            generation.record_event(event)
            if event["meta_info"].get("finish_reason") is not None:
                return
    raise ServerError(f"the stream of {adapter.base_url} ended before its generation finished", url=adapter.base_url)


def with_reports(generate: GenerateFn, on_tokens: OnTokens | None) -> GenerateFn:
    """`generate`, which reports its tokens to `on_tokens` if it can."""
    if on_tokens is None or "on_tokens" not in inspect.signature(generate).parameters:
        return generate
    return functools.partial(generate, on_tokens=on_tokens)


def limit_concurrency(generate: GenerateFn, max_concurrency: int) -> GenerateFn:
    """`generate`, of which at most `max_concurrency` calls run at a time in each event loop. Other calls wait in order.

    A server whose queue is empty computes the prompts that arrive together as one batch, see
    docs/decisions/order-of-arrival.md.
    """
    slots = LoopSlots(max_concurrency)

    async def generate_limited(*, rid: str, session_id: str, on_tokens: OnTokens | None = None, **request: Any) -> Json:
        async with slots.of_running_loop():
            return await with_reports(generate, on_tokens)(rid=rid, session_id=session_id, **request)

    return generate_limited


def require_generate_fn(name: str, value: object) -> None:
    """Raise BadInputError unless `value` can be called."""
    require_callable(
        name, value, "pass fleet.router.generate, or as_generate_fn(engine.adapter.asynchronous) for one server"
    )


def require_sampling_params(params: Any) -> Json:
    """A copy of the sampling parameters of an episode. Raise BadInputError if a known parameter has a wrong value.

    The server checks the names and the ranges.
    """
    for name, hint in _MISPLACED.items():
        if isinstance(params, Mapping) and name in params:
            raise BadInputError(f"{name!r} is no sampling parameter of an agent; {hint}")
    checked = parse_sampling_params(params)
    if (tokens := checked.get("max_new_tokens")) is not None and tokens < 1:
        raise BadInputError(f"sampling_params['max_new_tokens'] must be a whole number of at least 1, got {tokens}")
    if checked.get("n") not in (None, 1):
        raise BadInputError(
            f"sampling_params['n'] must be 1 for agents, got {checked['n']}; for several samples of each task, pass "
            "RolloutRunner(n=...)"
        )
    return checked


async def await_reply(reply: Any) -> Json:
    """What a generate function returned, awaited. Raises BadInputError if it is no coroutine function."""
    if not inspect.isawaitable(reply):
        raise BadInputError(
            f"the generate function must be a coroutine function, but its call returned {type(reply).__name__}; write "
            "`async def generate(*, rid, session_id, **request)`, and call a blocking client with "
            "`await asyncio.to_thread(...)`"
        )
    result: Json = await reply
    return result


async def generate_whole_turn(
    generate: GenerateFn, *, rid: str, session_id: str, on_tokens: OnTokens | None = None, **request: Any
) -> Json:
    """Call `generate` until its reply is complete. A reply that a weight update aborted is discarded.

    Raises DeadlineError if that lasts for `ABORT_TIMEOUT_S`, and BadInputError that names
    `RolloutLimits.max_context_tokens` if the server's context length is too small.
    """
    pauses, generate = _AbortPauses(), with_reports(generate, on_tokens)
    while True:
        try:
            reply = await await_reply(generate(rid=rid, session_id=session_id, **request))
        except BadInputError as error:
            raise _explain_context_length(error) from error.__cause__
        finish_reason = reply["meta_info"].get("finish_reason") or {}
        if finish_reason.get("type") != "abort":
            return reply
        await pauses.wait(0)


class _AbortPauses:
    """The pauses between the attempts at one generation that weight updates abort."""

    def __init__(self) -> None:
        self._num_tokens, self._delay_s, self._deadline = -1, FIRST_RETRY_DELAY_S, 0.0
        self._last_abort = time.monotonic()

    async def wait(self, num_tokens: int) -> None:
        """Wait before the next attempt. `num_tokens`: number of tokens so far.

        Raises DeadlineError after `ABORT_TIMEOUT_S` without a new token or an attempt of `LONG_ATTEMPT_S`.
        """
        now, last, self._last_abort = time.monotonic(), self._last_abort, time.monotonic()
        if num_tokens > self._num_tokens or now - last > LONG_ATTEMPT_S:
            self._num_tokens, self._delay_s, self._deadline = num_tokens, FIRST_RETRY_DELAY_S, now + ABORT_TIMEOUT_S
        elif now > self._deadline:
            raise DeadlineError(
                f"the server has aborted a generation for {ABORT_TIMEOUT_S:g} s without a new token: a weight update "
                "does not end, or generation was paused and never continued",
                operation="generate",
                seconds=ABORT_TIMEOUT_S,
            )
        await asyncio.sleep(self._delay_s)
        self._delay_s = min(2 * self._delay_s, MAX_RETRY_DELAY_S)


def _explain_context_length(error: BadInputError) -> BadInputError:
    """The error for a request that the server refused: how an episode stops at the context length and does not fail."""
    if found := _MAX_PROMPT.search(error.message):
        max_tokens = int(found[1])
    elif found := _CONTEXT_LENGTH.search(error.message):
        max_tokens = int(found[1]) - _RESERVED_TOKENS
    else:
        return error
    return BadInputError(
        f"{error.message.rstrip('.')}. Pass RolloutLimits(max_context_tokens={max_tokens}): an episode that reaches "
        "the context length then stops at this limit and does not fail",
        **error.details,
    )
