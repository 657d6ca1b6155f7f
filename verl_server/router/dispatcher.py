"""`Dispatcher`: runs every request of one router on a replica, and again on another one when the replica is lost.

Requests are identified by their request id (`rid`). A repeated call with the same rid does not generate again: it waits
for the running generation or receives the stored result.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from verl_server.adapter.sglang.batch import plain_prompts, split_batch
from verl_server.config import RouterConfig
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    ServerDiedError,
    ServerError,
    ShutDownError,
    VerlServerError,
)
from verl_server.router.policy import VersionRequirement
from verl_server.router.replica_pool import ReplicaPool, RoutingRequest
from verl_server.router.request_checks import (
    MAX_SERVER_DEATHS,
    estimate_prompt_tokens,
    has_lost_server,
    repeated_death_error,
    require_versions,
    rids_of_batch,
    take_router_fields,
    validate_id,
    validate_timeout,
)
from verl_server.router.result_cache import ResultCache
from verl_server.router.resumable_generation import ResumableGeneration
from verl_server.router.routed_replica import RoutedReplica
from verl_server.router.snapshot import RouterCounters, RouterSnapshot
from verl_server.types import Json

R = TypeVar("R")

RETRY_DELAY_S = 0.05
"""Seconds before the next attempt when the server answered with an error, that is, when it still runs."""
MAX_STREAM_EVENTS = 64
"""Maximum number of stream events per attempt. Each event repeats all tokens so far, so the number of transferred bytes
would otherwise grow with the square of the output's length."""


@dataclass
class _RunningGeneration:
    """A generation and the calls that wait for it."""

    generation: ResumableGeneration
    task: asyncio.Future[Json]
    waiting_calls: int = 0
    orphan_timer: asyncio.TimerHandle | None = None
    """Cancels the generation, which no call waits for, when `orphan_timeout_s` has passed."""


class Dispatcher:
    """The core of a router. All methods except `snapshot` must be called in one event loop."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self.counters = RouterCounters()
        self.pool = ReplicaPool(self.config, self.counters)
        """The replicas that requests are distributed over."""
        self._running: dict[str, _RunningGeneration] = {}
        self._results = ResultCache(self.config.result_cache_bytes)
        self._router_id = uuid.uuid4().hex[:8]  # part of each attempt's id: another router may have tried the same rid
        self._attempt_numbers = itertools.count()

    def snapshot(self) -> RouterSnapshot:
        """A frozen copy of the replicas' states and of the counters. Any thread may call this."""
        replicas = tuple(replica.snapshot() for replica in list(self.pool.replicas.values()))
        return RouterSnapshot(replicas, self.pool.queued_requests, len(self._results), replace(self.counters))

    def lease_replica(self, session_id: str | None, prompt_tokens: int) -> AbstractAsyncContextManager[RoutedReplica]:
        """A replica for a request that is forwarded unchanged. `prompt_tokens` may be an estimate."""
        validate_id(session_id, "session_id")
        return self.pool.lease(RoutingRequest(session_id=session_id, prompt_tokens=prompt_tokens))

    async def generate_request(self, request: Mapping[str, Any], *, keep_orphan: bool = False) -> Any:
        """The reply to a request with one prompt, or the list of replies to a request with several prompts.

        `request` holds the arguments of `RolloutRouter.generate`: those of the router and those of SGLang.
        """
        rid, options, request = take_router_fields(request)
        options["keep_orphan"] = keep_orphan
        requests = split_batch(request)
        if requests is None:
            return await self.generate(request, rid=rid, **options)
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
        keep_orphan: bool = False,
    ) -> Json:
        """Run one generation for one prompt. See `RolloutRouter.generate` for arguments and errors.

        `keep_orphan`: when the last waiting call is cancelled, the generation continues for `orphan_timeout_s`
        seconds, so that the caller can connect again.
        """
        self.pool.require_open()
        validate_id(rid, "rid")
        validate_id(session_id, "session_id")
        validate_timeout(timeout_s)
        routing_request = RoutingRequest(
            requirement or VersionRequirement(), session_id, estimate_prompt_tokens(request)
        )
        key = rid or uuid.uuid4().hex
        running = self._attach(key, request, routing_request, keep_result=rid is not None)
        running.waiting_calls += 1
        if running.orphan_timer is not None:
            running.orphan_timer.cancel()
            running.orphan_timer = None
        try:
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
            raise DeadlineError(
                f"the generation was not finished within {timeout_s:g} s", operation="generate", seconds=timeout_s
            ) from None
        finally:
            running.waiting_calls -= 1
            if not running.waiting_calls and not running.task.done():
                self._handle_orphan(key, running, keep_orphan)
        # Another call with another requirement may have started the generation.
        require_versions(reply, routing_request.requirement, _other_weights(key))
        return reply

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
        running.task.cancel()

    def _attach(
        self, key: str, request: Mapping[str, Any], routing_request: RoutingRequest, keep_result: bool
    ) -> _RunningGeneration:
        """The generation with this id: running, finished, continued after an abort, or new.

        Raises BadInputError when the id belongs to another request, NotReadyError when the known tokens do not have the
        required weight version.
        """
        running = self._running.get(key)
        known = running.generation if running is not None else self._results.get(key)
        if known is not None and known.request != plain_prompts(request):
            raise BadInputError(f"rid {key!r} belongs to another request; choose a new rid for a new request")
        if running is not None:
            self.counters.attached += 1
            return running
        if known is not None:
            if known.tokens:
                require_versions(known.reply(), routing_request.requirement, _other_weights(key))
            if not known.is_aborted:
                self.counters.attached += 1
                finished: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
                finished.set_result(known.reply())
                return _RunningGeneration(known, finished)
            known.end_attempt()
            self._results.remove(key)
        generation = known or ResumableGeneration(request)
        self.counters.requests += 1
        task = asyncio.get_running_loop().create_task(self._run(generation, key, routing_request))
        running = _RunningGeneration(generation, task)
        self._running[key] = running
        task.add_done_callback(lambda _: self._record_end(key, running, keep_result))
        return running

    def _record_end(self, key: str, running: _RunningGeneration, keep_result: bool) -> None:
        if self._running.get(key) is running:
            del self._running[key]
        if running.task.cancelled():
            return
        if running.task.exception() is not None:
            self.counters.failed += 1
            return
        self.counters.finished += 1
        if keep_result:
            self._results.add(key, running.generation)

    async def _run(self, generation: ResumableGeneration, key: str, routing_request: RoutingRequest) -> Json:
        """Start attempts until one of them finishes or `max_attempts` attempts have failed."""
        server_deaths = 0
        while True:
            replica = await self.pool.acquire(routing_request)
            # The counter comes before the router's id, so that no attempt's id is a prefix of another one's.
            attempt_id = f"{key}~{next(self._attempt_numbers):x}~{self._router_id}"
            was_alone = replica.starts_alone()
            try:
                await self._attempt(generation, replica, attempt_id)
            except (ServerDiedError, ServerError, ShutDownError, DeadlineError) as error:
                server_deaths += was_alone() and has_lost_server(error) and not generation.attempt_has_tokens
                generation.end_attempt()
                if server_deaths >= MAX_SERVER_DEATHS:
                    self.pool.mark_unreachable(replica)
                    raise repeated_death_error(error, generation.request) from error
                if self.pool.closed or generation.attempts >= self.config.max_attempts:
                    raise
                if "status" in error.details:  # the server answered, so it still runs
                    await asyncio.sleep(RETRY_DELAY_S)
                else:
                    self.pool.mark_unreachable(replica)
                saved_tokens = len(generation.tokens)
                self.counters.continued += bool(saved_tokens)
                self.counters.restarted += not saved_tokens
                self.counters.saved_tokens += saved_tokens
                if not generation.is_complete:
                    continue
            finally:
                self.pool.release(replica, attempt_id)
            reply = generation.reply()
            self._count_tokens(reply["meta_info"])
            require_versions(reply, routing_request.requirement, "the weights changed during the generation")
            return reply

    async def _attempt(self, generation: ResumableGeneration, replica: RoutedReplica, attempt_id: str) -> None:
        """One attempt on one replica. Returns when the generation has finished there."""
        body = generation.begin_attempt()
        prompt_tokens = len(body.get("input_ids") or ())
        replica.start_request(attempt_id, prompt_tokens)

        def record(event: Json) -> bool:
            """Record the reply so far. Whether it is the last event."""
            generation.record_event(event)
            replica.record_progress(attempt_id, prompt_tokens + len(event["output_ids"]))
            return event["meta_info"].get("finish_reason") is not None

        remaining = generation.remaining_tokens
        interval = max(self.config.min_tokens_per_event, remaining // MAX_STREAM_EVENTS)
        if remaining <= interval:  # a stream would have its last event only
            record(await replica.server.generate(**body, rid=attempt_id))
            return
        body["sampling_params"] = {"stream_interval": interval, **body["sampling_params"]}
        async with contextlib.aclosing(replica.server.generate_stream(**body, rid=attempt_id)) as stream:
            async for event in stream:
                if record(event):
                    return
        raise ServerError(f"the stream of replica {replica.name} ended before its generation finished")

    def _count_tokens(self, meta: Json) -> None:
        self.counters.output_tokens += meta.get("completion_tokens") or 0
        self.counters.prompt_tokens += meta.get("prompt_tokens") or 0
        self.counters.cached_tokens += meta.get("cached_tokens") or 0

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


def _other_weights(rid: str) -> str:
    return f"rid {rid!r} belongs to a generation with other weights, choose a new rid"
