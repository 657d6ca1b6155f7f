"""`AttemptRunner`: runs a generation on a replica, and again on another one when the replica is lost or fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from dataclasses import dataclass, field, replace

from verl_server.config import RouterConfig
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    ServerDiedError,
    ServerError,
    ShutDownError,
    VerlServerError,
)
from verl_server.router.placement.policy import RoutingRequest
from verl_server.router.placement.routed_replica import RoutedReplica, Slot
from verl_server.router.replica_pool import ReplicaPool
from verl_server.router.request_checks import (
    MAX_SERVER_DEATHS,
    has_lost_server,
    is_out_of_files,
    repeated_death_error,
    require_versions,
)
from verl_server.router.resumable_generation import ResumableGeneration
from verl_server.router.snapshot import RouterCounters
from verl_server.types import Json

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
