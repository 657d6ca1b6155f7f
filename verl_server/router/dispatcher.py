"""`Dispatcher`: the core of a router. It runs one generation for each request id.

Requests are identified by their request id (`rid`). A repeated call with the same rid does not generate again: it waits
for the running generation or receives the stored result.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections import OrderedDict
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from verl_server.adapter.blocking import EventLoopThread
from verl_server.adapter.sglang.requests import plain_request, split_batch
from verl_server.config import RouterConfig
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    ServerDiedError,
    ServerError,
    ShutDownError,
    VerlServerError,
)
from verl_server.router.placement import RoutingRequest, VersionRequirement
from verl_server.router.replica import RoutedReplica, Slot
from verl_server.router.replica_pool import ReplicaPool
from verl_server.router.replica_status import RouterCounters, RouterSnapshot
from verl_server.router.request_checks import (
    MAX_SERVER_DEATHS,
    estimate_prompt_tokens,
    has_lost_server,
    is_out_of_files,
    repeated_death_error,
    require_versions,
    rids_of_batch,
    take_router_fields,
    validate_id,
    validate_timeout,
)
from verl_server.router.resumable_generation import (
    INPUT_LOGPROB_LISTS,
    LOGPROB_LISTS,
    OnTokens,
    ResumableGeneration,
    in_running_loop,
    report_tokens,
)
from verl_server.server.process import raise_open_file_limit
from verl_server.types import GenerateReply, Json

# -- Attempt runner ---------------------------------------------------------------------------------
# `AttemptRunner`: runs a generation on a replica, and again on another one when the replica is lost or fails.

MAX_EVENTS_WITH_PROMPT = 4
"""Maximum number of stream events per attempt with log probabilities of the prompt, which SGLang repeats in each."""
FIRST_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 0.05, 5.0
"""Seconds before the next attempt when the server answered with an error, that is, when it still runs. The delay
doubles with each failed attempt of the request."""
FILES_RETRY_S = 1.0
"""Seconds before the next attempt when this process could not open another connection. Such an attempt counts only if
no other request runs, whose end would close a connection."""
MAX_STREAM_EVENTS = 64
"""Maximum number of stream events per attempt. A server that repeats all tokens in each event would otherwise send a
number of bytes that grows with the square of the output's length."""


@dataclass
class Failures:
    """The failed attempts of one request since its call."""

    count: int = 0
    """Number of failed attempts, without those that were probes: the replica was known to fail."""
    tried: set[RoutedReplica] = field(default_factory=set)
    """Replicas on which an attempt failed."""
    is_retry: bool = False
    """Whether an attempt has begun before."""
    deaths: int = 0
    """Number of servers that ended while they ran the request and before they returned any of its answer."""
    deaths_alone: int = 0
    """Number of those servers that ran no other request."""

    deaths_isolated: int = 0
    """Number of those servers that ended while the request was isolated, see `RoutingRequest`."""

    @property
    def needs_isolation(self) -> bool:
        """Whether the next attempt shows if the request ends servers: the request may have ended several already."""
        return self.deaths >= MAX_SERVER_DEATHS


class AttemptRunner:
    """Runs the generations of one router. All methods must be called in one event loop."""

    def __init__(self, config: RouterConfig, pool: ReplicaPool, counters: RouterCounters) -> None:
        self._config, self._pool, self._counters = config, pool, counters
        self._router_id = uuid.uuid4().hex[:8]  # part of each attempt's id: another router may have tried the same rid
        self._attempt_numbers = itertools.count()

    async def run(self, generation: ResumableGeneration, key: str, request: RoutingRequest) -> Json:
        """Start attempts until one of them finishes or `max_attempts` attempts have failed. Returns the reply."""
        failures = Failures()
        while (delay_s := await self._attempt(generation, key, request, failures)) is not None:
            await asyncio.sleep(delay_s)
        reply = generation.reply()
        meta = reply["meta_info"]
        self._counters.output_tokens += meta.get("completion_tokens") or 0
        self._counters.prompt_tokens += meta.get("prompt_tokens") or 0
        self._counters.cached_tokens += meta.get("cached_tokens") or 0
        require_versions(reply, request.requirement, "the weights changed during the generation")
        return reply

    async def _attempt(
        self, generation: ResumableGeneration, key: str, request: RoutingRequest, failures: Failures
    ) -> float | None:
        """One attempt on one replica.

        Returns None when the generation has finished, or the number of seconds before the next attempt.
        """
        if failures.is_retry or generation.attempts:
            request = replace(request, prompt_tokens=request.prompt_tokens + len(generation.tokens))
        # The counter comes before the router's id, so that no attempt's id is a prefix of another one's.
        attempt_id = f"{key}~{next(self._attempt_numbers):x}~{self._router_id}"
        request = replace(request, is_isolated=failures.needs_isolation)
        slot = await self._pool.acquire(request, tried=failures.tried, is_retry=failures.is_retry)
        failures.is_retry = True
        try:
            await self._generate(generation, slot, attempt_id)
            self._pool.record_finish(slot)
        except BadInputError:
            # A continuation has a longer prompt than the request. At the end of the context a server refuses it.
            if not generation.restart():
                raise
            return 0.0
        except (ServerDiedError, ServerError, ShutDownError, DeadlineError) as error:
            return self._handle_failure(generation, slot, error, failures)
        finally:
            self._pool.release(slot)
        return None

    async def _generate(self, generation: ResumableGeneration, slot: Slot, attempt_id: str) -> None:
        """Send the request of the next attempt. Returns when the generation has finished there."""
        body = generation.begin_attempt()
        server, prompt_tokens = slot.replica.server, slot.tokens

        def record(event: Json) -> bool:
            """Record the reply so far. Whether it is the last event."""
            generation.record_event(event)
            self._pool.record_progress(slot, prompt_tokens + len(event["output_ids"]))
            if event["output_ids"]:
                self._pool.end_isolation(slot)
            return event["meta_info"].get("finish_reason") is not None

        remaining = generation.remaining_tokens
        repeats_prompt = body.get("return_logprob") and body.get("logprob_start_len") not in (None, -1)
        max_events = MAX_EVENTS_WITH_PROMPT if repeats_prompt else MAX_STREAM_EVENTS
        interval = max(self._config.min_tokens_per_event, remaining // max_events)
        if not (generation.reports and generation.can_continue) or repeats_prompt:
            if remaining <= interval:  # a stream would have its last event only
                record(await server.generate(**body, rid=attempt_id))
                return
            body["sampling_params"] = {"stream_interval": interval, **body["sampling_params"]}
        async with contextlib.aclosing(server.generate_stream(**body, rid=attempt_id)) as stream:
            async for event in stream:
                if record(event):
                    return
        raise ServerError(f"the stream of replica {slot.replica.name} ended before its generation finished")

    def _handle_failure(
        self, generation: ResumableGeneration, slot: Slot, error: VerlServerError, failures: Failures
    ) -> float | None:
        """Record a failed attempt. Returns the seconds before the next one, or None when no token is missing.

        Raises `error` after `max_attempts` failed attempts, and ServerDiedError when the request ends servers.
        """
        lacks_files = is_out_of_files(error)
        failures.count += not slot.is_probe and not (lacks_files and self._pool.has_other_requests)
        if has_lost_server(error) and not generation.attempt_has_tokens and not slot.replica.is_removed:
            failures.deaths_isolated += failures.needs_isolation
            failures.deaths += 1
            failures.deaths_alone += slot.has_run_alone
        generation.end_attempt()
        answered = "status" in error.details  # the server still runs
        if lacks_files:
            self._pool.limit_running_requests(slot)
        else:
            failures.tried.add(slot.replica)
            self._pool.record_error(slot)
            if not answered:
                self._pool.mark_unreachable(slot.replica)
        # One death in isolation may be that of a machine, which ends several isolated requests.
        if max(failures.deaths_isolated, failures.deaths_alone) >= MAX_SERVER_DEATHS:
            raise repeated_death_error(error, generation.request) from error
        if self._pool.closed or failures.count >= self._config.max_attempts:
            raise error
        saved_tokens = len(generation.tokens)
        self._counters.continued += bool(saved_tokens)
        self._counters.restarted += not saved_tokens
        self._counters.saved_tokens += saved_tokens
        if generation.is_complete:
            return None
        if lacks_files:
            return FILES_RETRY_S
        return min(FIRST_RETRY_DELAY_S * 2.0 ** max(0, failures.count - 1), MAX_RETRY_DELAY_S) if answered else 0.0


# -- Result cache -----------------------------------------------------------------------------------
# `ResultCache`: finished and aborted generations, for callers that send the same request id again.

FIXED_BYTES = 4096
"""Estimated size of a request and its reply without tokens, log probabilities and texts."""
TOKEN_BYTES = 36
"""Size of one token id in a Python list: a pointer (8) and an integer object (28)."""
LOGPROB_BYTES = 150
"""Size of one log probability as SGLang returns it, the list `[logprob, token_id, text]`: a pointer (8), the list (88),
a float (24) and an integer (28), rounded up."""
ENTRY_BYTES = 32
"""Size of one entry of another list or of a dict: a pointer (8) and a float (24)."""
MAX_UNFINISHED_BYTES = 8 << 30
"""Maximum size of all aborted generations in bytes: about 10,000 generations of 4,600 tokens with log probabilities.
This many may run when an update aborts all of them. Those that no call repeats are removed when further ones come."""


_COUNTED = frozenset({"input_ids", "output_ids", "meta_info", *LOGPROB_LISTS, *INPUT_LOGPROB_LISTS})
"""Fields of a request, a reply and its `meta_info` that `estimate_bytes` measures in a way of their own."""


class ResultCache:
    """Generations by request id: finished ones, and those that the server aborted, which a repeated call continues.

    The oldest finished generations are removed when their estimated size exceeds `max_bytes`. The tokens of an aborted
    generation were returned to a caller and must not be sampled again. So finished generations never replace aborted
    ones, of which the oldest are removed when their estimated size exceeds MAX_UNFINISHED_BYTES.
    """

    def __init__(self, max_bytes: int) -> None:
        self._finished, self._unfinished = _BoundedGenerations(max_bytes), _BoundedGenerations(MAX_UNFINISHED_BYTES)

    @property
    def max_bytes(self) -> int:
        """Maximum of `size_bytes`."""
        return self._finished.max_bytes

    @property
    def size_bytes(self) -> int:
        """Estimated size of all finished generations in bytes (see `estimate_bytes`)."""
        return self._finished.size_bytes

    def __len__(self) -> int:
        """Number of finished generations."""
        return len(self._finished.by_rid)

    def add(self, rid: str, generation: ResumableGeneration) -> None:
        """Store a generation. A generation that is larger than all that may be stored is not stored."""
        self.remove(rid)
        (self._finished if generation.is_finished else self._unfinished).add(rid, generation)

    def get(self, rid: str) -> ResumableGeneration | None:
        """The generation with this request id. None when it is unknown or was removed."""
        found = self._finished.by_rid.get(rid) or self._unfinished.by_rid.get(rid)
        return None if found is None else found[0]

    def remove(self, rid: str) -> None:
        """Remove a generation if it is stored."""
        self._finished.remove(rid)
        self._unfinished.remove(rid)


class _BoundedGenerations:
    """Generations with their estimated sizes. The oldest are removed when the sum of the sizes exceeds `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.size_bytes = max_bytes, 0
        self.by_rid: OrderedDict[str, tuple[ResumableGeneration, int]] = OrderedDict()

    def add(self, rid: str, generation: ResumableGeneration) -> None:
        size_bytes = estimate_bytes(generation.request, generation.reply())
        if size_bytes > self.max_bytes:
            return
        self.by_rid[rid] = generation, size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > self.max_bytes:
            self.remove(next(iter(self.by_rid)))

    def remove(self, rid: str) -> None:
        _, size_bytes = self.by_rid.pop(rid, (None, 0))
        self.size_bytes -= size_bytes


def estimate_bytes(request: Mapping[str, Any], reply: Json) -> int:
    """Estimated memory in bytes of a request and its reply.

    The estimate is FIXED_BYTES, plus TOKEN_BYTES for each prompt and output token, plus LOGPROB_BYTES for each log
    probability, plus the length of all texts (prompt, images as text, output), plus ENTRY_BYTES for each entry of other
    lists and dicts (hidden states, embeddings). Measuring every Python object exactly would take milliseconds for a
    long reply.
    """
    meta = reply["meta_info"]
    tokens = len(request.get("input_ids") or ()) + len(reply["output_ids"])
    logprobs = sum(_count_logprobs(meta.get(name)) for name in (*LOGPROB_LISTS, *INPUT_LOGPROB_LISTS))
    others = [value for part in (request, reply, meta) for name, value in part.items() if name not in _COUNTED]
    return FIXED_BYTES + TOKEN_BYTES * tokens + LOGPROB_BYTES * logprobs + sum(map(_estimate_value_bytes, others))


def _count_logprobs(entries: Any) -> int:
    """Number of log probabilities. Lists of top log probabilities have a list of entries for each token."""
    first = next((entry for entry in entries or () if entry), None)
    if first is not None and isinstance(first[0], (list, tuple)):
        return sum(len(entry or ()) for entry in entries)
    return len(entries or ())


def _estimate_value_bytes(value: Any) -> int:
    """Estimated memory in bytes of a JSON value: its texts, and ENTRY_BYTES for each entry of its lists and dicts."""
    size_bytes, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, (str, bytes)):
            size_bytes += len(item)
        elif isinstance(item, dict):
            size_bytes += ENTRY_BYTES * len(item)
            pending.extend((*item.keys(), *item.values()))
        elif isinstance(item, (list, tuple)):
            size_bytes += ENTRY_BYTES * len(item)
            if item and not isinstance(item[0], (int, float)):  # a list of numbers has nothing else to measure
                pending.extend(item)
    return size_bytes


# -- Dispatcher -------------------------------------------------------------------------------------

R = TypeVar("R")
PAUSED = "the router is paused, so all requests wait until POST /resume, or until the end of a running update"
"""What callers are told while requests wait because of `ReplicaPool.hold`."""


@dataclass
class _RunningGeneration:
    """A generation and the calls that wait for it."""

    generation: ResumableGeneration
    task: asyncio.Future[Json]
    waiting_calls: int = 0
    orphan_timer: asyncio.TimerHandle | None = None
    """Cancels the generation, which no call waits for, when `orphan_timeout_s` has passed."""
    was_returned: bool = False
    """Whether a caller has received the first part of the reply, before the server aborted the generation."""


class Dispatcher:
    """The core of a router. All methods except `snapshot` must be called in one event loop."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self.counters = RouterCounters()
        self.pool = ReplicaPool(self.config, self.counters)
        """The replicas that requests are distributed over."""
        self._running: dict[str, _RunningGeneration] = {}
        self._runner = AttemptRunner(self.config, self.pool, self.counters)
        self._results = ResultCache(self.config.result_cache_bytes)
        raise_open_file_limit()  # each running request has a connection

    def snapshot(self) -> RouterSnapshot:
        """A frozen copy of the replicas' states and of the counters. Any thread may call this."""
        replicas = tuple(replica.snapshot() for replica in list(self.pool.replicas.values()))
        return RouterSnapshot(
            replicas, self.pool.queued_requests, len(self._results), replace(self.counters), self.pool.is_held
        )

    def lease_slot(
        self, session_id: str | None, prompt_tokens: int, tried: Collection[RoutedReplica] = (), is_retry: bool = False
    ) -> AbstractAsyncContextManager[Slot]:
        """A place on a replica for a request of another process that is forwarded unchanged.

        `prompt_tokens` may be an estimate. `tried`: replicas that have failed to answer the request. `is_retry`: the
        request was placed before.
        """
        validate_id(session_id, "session_id")
        request = RoutingRequest(session_id=session_id, prompt_tokens=prompt_tokens, may_be_refused=True)
        return self.pool.lease(request, tried=tried, is_retry=is_retry)

    async def generate_request(
        self, request: Mapping[str, Any], *, on_tokens: OnTokens | None = None, is_remote: bool = False
    ) -> Any:
        """The reply to a request with one prompt, or the list of replies to a request with several prompts.

        `request` holds the arguments of `RolloutRouter.generate`: those of the router and those of SGLang. `is_remote`
        as in `generate`. `on_tokens` is for one prompt.
        """
        rid, options, request = take_router_fields(request)
        options["is_remote"] = is_remote
        requests = split_batch(request)
        if requests is None:
            return await self.generate(request, rid=rid, on_tokens=on_tokens, **options)
        rids = rids_of_batch(rid, len(requests))
        return await gather_all(
            self.generate(prompt_request, rid=prompt_rid, **options)
            for prompt_request, prompt_rid in zip(requests, rids, strict=True)
        )

    async def generate(
        self,
        request: Mapping[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
        requirement: VersionRequirement | None = None,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
        is_remote: bool = False,
    ) -> Json:
        """Run one generation for one prompt. See `RolloutRouter.generate` for arguments and errors.

        `is_remote`: the caller is another process. When its call is cancelled and no other call waits, the generation
        continues for `orphan_timeout_s` seconds, so that the caller can connect again. When the queue is full, the
        request is refused. A request of this process waits.
        """
        self.pool.require_open()
        validate_id(rid, "rid")
        validate_id(session_id, "session_id")
        validate_timeout(timeout_s)
        routing_request = RoutingRequest(
            requirement or VersionRequirement(), session_id, estimate_prompt_tokens(request), may_be_refused=is_remote
        )
        keep_orphan = is_remote and rid is not None  # without an id nobody can come back
        key = rid or uuid.uuid4().hex
        running = self._attach(key, request, routing_request, keep_result=rid is not None)
        running.waiting_calls += 1
        if running.orphan_timer is not None:
            running.orphan_timer.cancel()
            running.orphan_timer = None
        try:
            with report_tokens(running.generation, on_tokens):
                async with asyncio.timeout(timeout_s):
                    reply = await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if self.pool.closed and running.task.cancelled():
                raise ShutDownError("the router was shut down") from None
            raise
        except TimeoutError as error:
            if isinstance(error, VerlServerError):
                raise
            keep_orphan = False
            pause = f": {PAUSED}" if self.pool.is_held else ""
            raise DeadlineError(
                f"the generation was not finished within {timeout_s:g} s{pause}",
                operation="generate",
                seconds=timeout_s,
            ) from None
        finally:
            running.waiting_calls -= 1
            if not running.waiting_calls and not running.task.done():
                self._handle_orphan(key, running, keep_orphan)
        # Another call with another requirement may have started the generation.
        require_versions(reply, routing_request.requirement, _other_weights(key))
        return _copy_reply(reply)

    def _handle_orphan(self, key: str, running: _RunningGeneration, keep: bool) -> None:
        """No call waits for the generation any more: cancel it, now or after `orphan_timeout_s` seconds."""
        if keep:
            loop = asyncio.get_running_loop()
            running.orphan_timer = loop.call_later(self.config.orphan_timeout_s, self._cancel, key, running)
        else:
            self._cancel(key, running)

    def _cancel(self, key: str, running: _RunningGeneration) -> None:
        """Cancel a generation. This closes its stream, and then SGLang aborts the request."""
        if self._running.get(key) is running:
            del self._running[key]
            self._keep_returned_tokens(key, running)
        running.task.cancel()

    def _keep_returned_tokens(self, key: str, running: _RunningGeneration) -> None:
        """Keep a generation that did not finish if a caller has received its first tokens: it is continued later."""
        generation = running.generation
        if not generation.is_finished:
            generation.end_attempt()
        if running.was_returned and generation.tokens and generation.can_continue:
            self._results.add(key, generation)

    def _attach(
        self, key: str, request: Mapping[str, Any], routing_request: RoutingRequest, keep_result: bool
    ) -> _RunningGeneration:
        """The generation with this id: running, finished, continued after an abort, or new.

        Raises BadInputError when the id belongs to another request, NotReadyError when the known tokens do not have the
        required weight version.
        """
        running = self._running.get(key)
        known = running.generation if running is not None else self._results.get(key)
        if known is not None and known.request != plain_request(request):
            raise BadInputError(f"rid {key!r} belongs to another request; choose a new rid for a new request")
        if running is not None:
            self.counters.attached += 1
            return running
        if known is not None:
            if known.tokens:
                require_versions(known.reply(), routing_request.requirement, _other_weights(key))
            if known.is_finished:
                self.counters.attached += 1
                finished: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
                finished.set_result(known.reply())
                return _RunningGeneration(known, finished)
            known.end_attempt()
            known.keep_tokens()
            self._results.remove(key)
        generation = known or ResumableGeneration(request)
        self.counters.requests += 1
        task = asyncio.get_running_loop().create_task(self._runner.run(generation, key, routing_request))
        running = _RunningGeneration(generation, task, was_returned=known is not None)
        self._running[key] = running
        task.add_done_callback(lambda _: self._record_end(key, running, keep_result))
        return running

    def _record_end(self, key: str, running: _RunningGeneration, keep_result: bool) -> None:
        was_running = self._running.get(key) is running
        if was_running:
            del self._running[key]
        if running.task.cancelled():
            return
        if running.task.exception() is not None:
            self.counters.failed += 1
            if was_running:
                self._keep_returned_tokens(key, running)
            return
        self.counters.finished += 1
        if keep_result:
            self._results.add(key, running.generation)

    def abort(self, rids: Iterable[str]) -> dict[str, Json | None]:
        """Abort running generations: the calls that wait for them are cancelled.

        Returns the reply with the tokens so far for each of them, None without tokens. A generation whose last token
        has arrived, and an unknown one, is not aborted and not in the result.
        """
        partial: dict[str, Json | None] = {}
        for rid in rids:
            running = self._running.get(rid)
            if running is None or running.task.done() or running.generation.has_ended:
                continue
            running.generation.end_attempt(keep=True)
            self._cancel(rid, running)
            partial[rid] = running.generation.reply() if running.generation.tokens else None
        return partial

    async def close(self) -> None:
        """End all running and queued requests with ShutDownError."""
        self.pool.close()
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gather_all(calls: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Run coroutines concurrently and return all results. The first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


def _copy_reply(reply: Json) -> Json:
    """A reply whose lists and dicts one caller may change. Entries of lists of log probabilities stay shared."""
    meta = _copy_values(reply["meta_info"])
    if spans := meta.get("weight_versions"):
        meta["weight_versions"] = [dict(span) for span in spans]
    return {**_copy_values(reply), "meta_info": meta}


def _copy_values(values: Json) -> Json:
    return {name: value.copy() if isinstance(value, (list, dict)) else value for name, value in values.items()}


def _other_weights(rid: str) -> str:
    return f"rid {rid!r} belongs to a generation with other weights, choose a new rid"


# -- Router of this process -------------------------------------------------------------------------


class RolloutRouter:
    """The router of a fleet in this process. Each call returns one whole generation, even when replicas are lost."""

    def __init__(self, dispatcher: Dispatcher, loop: EventLoopThread) -> None:
        self._dispatcher, self._loop = dispatcher, loop

    async def generate(
        self,
        *,
        rid: str | None = None,
        session_id: str | None = None,
        weight_version: int | None = None,
        min_weight_version: int | None = None,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
        **request: Any,
    ) -> GenerateReply:
        """One generation for one prompt; `request` holds the arguments of `HttpServerEngineAdapter.generate`.

        Args:
            rid: Request id, 1 to 512 characters. A repeated call with the same rid and the same request waits for the
                running generation, returns its stored result, or continues it after an abort. Results of calls
                without a rid are not stored.
            session_id: Id of a conversation. Its requests stay on one replica, whose prefix cache has the earlier
                turns, unless that replica has far more load than the others.
            weight_version: Exact version of the weights for all tokens.
            min_weight_version: Minimum version of the weights.
            timeout_s: Seconds until DeadlineError is raised and the generation is aborted.
            on_tokens: Function that gets the tokens while they are generated, in the event loop of the call. See
                `OnTokens`. A call that joins a running generation gets its tokens from the start.

        Cancelling the call aborts the generation in the server.

        Raises BadInputError; NotReadyError (retryable) when no replica serves the required weights, the weights changed
        during the generation, or the result of the same rid has other weights; DeadlineError; or the error of the last
        replica.
        """
        coroutine = self._dispatcher.generate(
            request,
            rid=rid,
            session_id=session_id,
            requirement=VersionRequirement(weight_version, min_weight_version),
            timeout_s=timeout_s,
            on_tokens=None if on_tokens is None else in_running_loop(on_tokens),
        )
        reply = await asyncio.wrap_future(self._loop.submit(coroutine))
        return cast(GenerateReply, reply)

    async def abort(self, rids: Sequence[str]) -> dict[str, Json | None]:
        """Internal. See `Dispatcher.abort`."""

        async def abort() -> dict[str, Json | None]:
            return self._dispatcher.abort(rids)

        return await asyncio.wrap_future(self._loop.submit(abort()))
