"""What generates for episodes: `GenerateFn`, and the access to an engine, a fleet or a router of this library."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from verl_server.adapter.sglang.requests import parse_sampling_params
from verl_server.agent.limits import LoopSlots, RolloutLimits
from verl_server.errors import BadInputError, DeadlineError, ServerError, VerlServerError
from verl_server.router.resumable_generation import OnTokens, ResumableGeneration, report_tokens
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.types import Json
from verl_server.weights.manifest import read_config

if TYPE_CHECKING:
    from verl_server.adapter.blocking import HttpServerEngineAdapter
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter
    from verl_server.engine.verl_engine import VerlEngine
    from verl_server.rollout.manager import RolloutManager
    from verl_server.router.client import RouterClient
    from verl_server.trajectory.routed_experts import ExpertLayout

logger = logging.getLogger(__name__)

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
    "seed": "write sampling_seed, SGLang's name",
    **dict.fromkeys(("rid", "session_id", "prompt", "input_ids", "image_data"), _SET_BY_EPISODE),
    "routed_experts_start_len": _SET_BY_EPISODE,
    **{name: _PARTIAL.format(name) for name in ("lora_path", "weight_version", "min_weight_version")},
    **{name: _PARTIAL.format(name) for name in ("priority", "custom_logit_processor")},
    "return_routed_experts": "pass RolloutRunner(return_routed_experts=True)",
}
"""Arguments of `generate` that are no sampling parameters, and what to do instead."""


@runtime_checkable
class GenerateFn(Protocol):
    """Generates tokens for one prompt: `RolloutRouter.generate`, `RouterClient.generate`, or `as_generate_fn(adapter)`.

    `rid`: request id. `session_id`: requests of one session go to the same replica if possible. `request`: SGLang's
    arguments (`input_ids`, `sampling_params`, `return_logprob`, ...). Returns SGLang's reply.

    A function can have the argument `on_tokens: OnTokens | None = None`, which gets the tokens while they are
    generated, in the event loop of the call. Without this argument, callers have the tokens when the reply is complete.
    """

    async def __call__(self, *, rid: str, session_id: str, **request: Any) -> Mapping[str, Any]: ...


def as_generate_fn(adapter: AsyncHttpServerEngineAdapter) -> GenerateFn:
    """A `GenerateFn` that sends all requests to one server, for example `as_generate_fn(engine.adapter.asynchronous)`.

    A generation that a weight update aborts is continued from the tokens that the server has returned. The function
    raises DeadlineError if a generation is aborted for `ABORT_TIMEOUT_S` without a new token. Raises BadInputError for
    a blocking adapter, whose generations would run one after the other and then fail.
    """
    if not inspect.iscoroutinefunction(getattr(adapter, "generate", None)):
        needed = "as_generate_fn needs an AsyncHttpServerEngineAdapter, for example adapter.asynchronous"
        raise BadInputError(f"{needed}; got {type(adapter).__name__}")

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

    async def generate_limited(
        *, rid: str, session_id: str, on_tokens: OnTokens | None = None, **request: Any
    ) -> Mapping[str, Any]:
        async with slots.of_running_loop():
            return await with_reports(generate, on_tokens)(rid=rid, session_id=session_id, **request)

    return generate_limited


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


async def generate_whole_turn(
    generate: GenerateFn, *, rid: str, session_id: str, on_tokens: OnTokens | None = None, **request: Any
) -> Mapping[str, Any]:
    """Call `generate` until its reply is complete. A reply that a weight update aborted is discarded.

    Raises DeadlineError if that lasts for `ABORT_TIMEOUT_S`.
    """
    pauses, generate = _AbortPauses(), with_reports(generate, on_tokens)
    while True:
        reply = await generate(rid=rid, session_id=session_id, **request)
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


# -- Engine access ----------------------------------------------------------------------------------
# `EngineAccess`: what a runner needs of the engine that generates: a generate function, the tokenizer, the limits.

Engine: TypeAlias = (
    "VerlEngine | RolloutManager | HttpServerEngineAdapter | AsyncHttpServerEngineAdapter | RouterClient | GenerateFn"
)
"""What generates for a runner."""
ENGINES = (
    "a VerlEngine, a RolloutManager, an adapter of a server, a RouterClient, or a function such as "
    "fleet.router.generate"
)
MAX_CONCURRENT_QUESTIONS = 16
"""Number of servers of a fleet that are asked at a time."""
PASS_RENDERER = "pass renderer=get_renderer(tokenizer), or --model to the command"


async def _close_nothing() -> None:
    pass


@dataclass(frozen=True)
class EngineAccess:
    """The engine as a runner uses it."""

    generate: GenerateFn
    server_info: Json | None
    """SGLang's `/server_info` of one server. None if the engine cannot be asked."""
    max_tokens: int | None = None
    """Maximum number of tokens of a prompt with its response, on each server."""
    close_connections: Callable[[], Awaitable[None]] = _close_nothing
    """Closes the connections of the running event loop. A later generation opens others."""

    def make_renderer(self) -> ChatRenderer:
        """The renderer for the tokenizer of the server, or for the processor of a vision-language model.

        Raises BadInputError if the engine cannot be asked or the tokenizer cannot be loaded, and the errors of
        `get_renderer`.
        """
        if self.server_info is None:
            raise BadInputError(f"this engine does not tell its tokenizer; {PASS_RENDERER}")
        from transformers import AutoTokenizer

        from verl_server.trajectory.rendering.families import FamilyRenderer, get_renderer

        path = str(self.server_info.get("tokenizer_path") or self.server_info.get("model_path"))
        try:
            tokenizer = load_named_by_server(AutoTokenizer, path)
        except Exception as error:
            raise BadInputError(
                f"the tokenizer {path!r} of the engine cannot be loaded: {error}; {PASS_RENDERER}"
            ) from error
        renderer = get_renderer(tokenizer)
        if isinstance(renderer, FamilyRenderer):  # it knows the tool calls and thoughts of the model, and no images
            return renderer
        return _vision_renderer(self.server_info, path) or renderer

    def expert_layout(self) -> ExpertLayout | None:
        """The layout of the routed experts of the model. None if the engine cannot be asked.

        Raises BadInputError if the server does not return routed experts, if its model has none, and if the model has
        code of its own: pass a function such as `fleet.router.generate` then, and `step.batch(expert_layout=...)`.
        """
        if self.server_info is None:
            return None
        from verl_server.trajectory.routed_experts import ExpertLayout

        if not self.server_info.get("enable_return_routed_experts"):
            raise BadInputError(
                "this server does not return routed experts; start it with enable_return_routed_experts=True, or leave "
                "out return_routed_experts"
            )
        config = read_config({**self.server_info, "trust_remote_code": False})
        return ExpertLayout.from_config(config)

    def complete_limits(self, limits: RolloutLimits) -> RolloutLimits:
        """The limits, with the context length of the server as `max_context_tokens` if they have none."""
        return limits if limits.max_context_tokens else dataclasses.replace(limits, max_context_tokens=self.max_tokens)


def load_named_by_server(factory: Any, path: str) -> Any:
    """The tokenizer or processor at a path that a server has named, from files of this machine or of its Hub cache.

    Whoever answers at a server's URL chooses the path. So nothing is downloaded, and no code of the folder is executed,
    whatever the server says. The user can load such a tokenizer and pass a renderer.
    """
    return factory.from_pretrained(path, trust_remote_code=False, local_files_only=True)


def _vision_renderer(server_info: Json, path: str) -> ChatRenderer | None:
    """The renderer for messages with images. None for a model without images, and if its processor cannot be used.

    `path`: path of the tokenizer and the processor.
    """
    from transformers import AutoProcessor

    from verl_server.trajectory.rendering.families import get_renderer

    try:
        if not hasattr(read_config({**server_info, "trust_remote_code": False}), "vision_config"):
            return None
        return get_renderer(load_named_by_server(AutoProcessor, path))
    except Exception as error:  # noqa: BLE001 - code of another library: torchvision is not installed, for example
        logger.info("messages with images are refused, because the processor %r cannot be used: %s", path, error)
        return None


def access_engine(engine: object) -> EngineAccess:
    """The access to an engine. Asks a server for its arguments, except for an asynchronous adapter and a router.

    Raises BadInputError for an object that is no engine, for an engine without a server on this rank, and for a fleet
    without a running server; and the errors of the request.
    """
    if callable(engine):
        return EngineAccess(engine, None)
    from verl_server.adapter.blocking import HttpServerEngineAdapter
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter
    from verl_server.engine.verl_engine import VerlEngine
    from verl_server.rollout.manager import RolloutManager
    from verl_server.router.client import RouterClient
    from verl_server.router.dispatcher import RolloutRouter

    if isinstance(engine, RolloutManager):
        adapters = [replica.adapter for replica in engine.replicas]
        running = [adapter for adapter in adapters if adapter is not None]
        if not running:
            raise BadInputError(f"no replica of this fleet runs, so it does not tell its tokenizer; {PASS_RENDERER}")
        with ThreadPoolExecutor(MAX_CONCURRENT_QUESTIONS) as pool:
            answers = list(pool.map(_ask, running))
        infos = [answer for answer in answers if not isinstance(answer, VerlServerError)]
        if not infos:
            raise next(answer for answer in answers if isinstance(answer, VerlServerError))
        return _access_servers(engine.router.generate, infos)
    if isinstance(engine, VerlEngine):
        if engine.adapter is None:
            raise BadInputError(
                "this VerlEngine has no server of its own on this rank; run the agents on rank 0, and for an engine "
                "with fleet=..., pass the fleet"
            )
        engine = engine.adapter
    if isinstance(engine, HttpServerEngineAdapter):
        return _access_server(engine)
    if isinstance(engine, AsyncHttpServerEngineAdapter):
        return EngineAccess(as_generate_fn(engine), None, close_connections=engine.close_connections)
    if isinstance(engine, RouterClient):
        return EngineAccess(engine.generate, None, close_connections=engine.close_connections)
    if isinstance(engine, RolloutRouter):
        return EngineAccess(engine.generate, None)
    raise BadInputError(f"engine must be {ENGINES}, got {type(engine).__name__}")


def _ask(adapter: HttpServerEngineAdapter) -> Json | VerlServerError:
    try:
        return adapter.get_server_info()
    except VerlServerError as error:  # this server is being replaced
        return error


def _access_server(server: HttpServerEngineAdapter) -> EngineAccess:
    from verl_server.adapter.sglang.replies import max_running_requests

    generate, server_info = as_generate_fn(server.asynchronous), server.get_server_info()
    limit = max_running_requests(server_info)
    access = _access_servers(generate if limit is None else limit_concurrency(generate, limit), [server_info])
    return dataclasses.replace(access, close_connections=server.asynchronous.close_connections)


def _access_servers(generate: GenerateFn, server_infos: Sequence[Json]) -> EngineAccess:
    from verl_server.adapter.sglang.replies import max_request_tokens

    numbers = [number for info in server_infos if (number := max_request_tokens(info)) is not None]
    return EngineAccess(generate, server_infos[0], min(numbers, default=None))


def with_stop_tokens(params: Mapping[str, Any], renderer: ChatRenderer) -> dict[str, Any]:
    """The sampling parameters, with the tokens that end a turn as `stop_token_ids` if no stop is given.

    The end of a turn in the chat template need not be the end token of the model.
    """
    is_given = any(params.get(name) is not None for name in ("stop", "stop_token_ids", "stop_regex"))
    if is_given or params.get("ignore_eos"):
        return dict(params)
    return {**params, "stop_token_ids": renderer.stop_token_ids} if renderer.stop_token_ids else dict(params)
