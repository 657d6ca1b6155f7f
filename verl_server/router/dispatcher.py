"""`Dispatcher`: the core of a router. It runs one generation for each request id.

Requests are identified by their request id (`rid`). A repeated call with the same rid does not generate again: it waits
for the running generation or receives the stored result.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from verl_server.adapter.sglang.batch import split_batch
from verl_server.adapter.sglang.request_fields import plain_request
from verl_server.config import RouterConfig
from verl_server.errors import BadInputError, DeadlineError, ShutDownError, VerlServerError
from verl_server.router.attempt_runner import AttemptRunner
from verl_server.router.placement.policy import RoutingRequest, VersionRequirement
from verl_server.router.placement.routed_replica import RoutedReplica, Slot
from verl_server.router.replica_pool import ReplicaPool
from verl_server.router.request_checks import (
    estimate_prompt_tokens,
    require_versions,
    rids_of_batch,
    take_router_fields,
    validate_id,
    validate_timeout,
)
from verl_server.router.result_cache import ResultCache
from verl_server.router.resumable_generation import ResumableGeneration
from verl_server.router.snapshot import RouterCounters, RouterSnapshot
from verl_server.router.token_reports import OnTokens, report_tokens
from verl_server.server.open_files import raise_open_file_limit
from verl_server.types import Json

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
