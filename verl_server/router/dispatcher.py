"""The router's inside: it lives in one event loop and sees every request and every replica.

A request has an id. Asked again with the same id it is not sampled again: the call waits for the one that runs,
or gets its result. When a replica is lost in the middle the sample goes on with another (see `sample`).
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from verl_server.config import RouterConfig
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    ServerDiedError,
    ServerError,
    ShutDownError,
    VerlServerError,
)
from verl_server.router.policy import VersionRequirement
from verl_server.router.replica_pool import Replica, ReplicaPool, RoutingRequest, checked_id
from verl_server.router.resumable_generation import ResumableGeneration

Json = dict[str, Any]
R = TypeVar("R")

RETRY_S = 0.05
CHARACTERS_A_TOKEN = 4
MAX_WORDS = 64
"""Of an engine, on one sample. Each repeats all tokens so far: their bytes must not grow with the square of these."""


@dataclass
class Running:
    """One sample under way, and who waits for it."""

    sample: ResumableGeneration
    task: asyncio.Task[Json]
    waiters: int = 0
    lingering: asyncio.TimerHandle | None = None


class Dispatcher(ReplicaPool):
    """Made and used in one event loop."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        super().__init__(config)
        self._running: dict[str, Running] = {}
        self._finished: OrderedDict[str, ResumableGeneration] = OrderedDict()
        self._name = uuid.uuid4().hex[:8]
        """Of this router: a sample may have been tried by another before."""
        self._attempts = itertools.count()

    async def generate(
        self,
        request: Mapping[str, Any],
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        need: VersionRequirement | None = None,
        timeout_s: float | None = None,
        linger: bool = False,
    ) -> Json:
        """One sample: the adapter's `generate` for one prompt. See `RolloutRouter.generate`."""
        if self._closed:
            raise ShutDownError("the router was shut down")
        request_id = checked_id(request_id, "request_id") or uuid.uuid4().hex
        session_id = checked_id(session_id, "session_id")
        if timeout_s is not None:
            if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool):
                raise BadInputError(f"timeout_s must be a number of seconds, got {timeout_s!r}")
            if not timeout_s > 0:
                raise BadInputError(f"timeout_s is {timeout_s}: the deadline has passed already")
        ask = RoutingRequest(need or VersionRequirement(), session_id, size_of(request))
        running = self._attach(request_id, request, ask)
        running.waiters += 1
        if running.lingering is not None:
            running.lingering.cancel()
            running.lingering = None
        try:
            if timeout_s is None:
                return await asyncio.shield(running.task)
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if self.closed and running.task.cancelled():
                raise ShutDownError("the router was shut down") from None
            raise
        except TimeoutError as error:
            if isinstance(error, VerlServerError):
                raise
            linger = False
            raise DeadlineError(
                f"the sample was not finished within {timeout_s:g} s", operation="generate", seconds=timeout_s
            ) from None
        finally:
            running.waiters -= 1
            if not running.waiters and not running.task.done():
                if linger:
                    loop = asyncio.get_running_loop()
                    running.lingering = loop.call_later(
                        self.config.orphan_timeout_s, self._give_up, request_id, running
                    )
                else:
                    self._give_up(request_id, running)

    def _give_up(self, request_id: str, running: Running) -> None:
        """Nobody wants it: closing its stream aborts the request in the engine."""
        if self._running.get(request_id) is running:
            del self._running[request_id]
        running.task.cancel()

    def _attach(self, request_id: str, request: Mapping[str, Any], ask: RoutingRequest) -> Running:
        """The sample of that id: under way, finished, partial (it goes on), or new."""
        running = self._running.get(request_id)
        before = running.sample if running is not None else self._finished.get(request_id)
        if before is not None and before.request != dict(request):
            raise BadInputError(f"request_id {request_id!r} belongs to another request")
        if running is not None:
            self.counters.attached += 1
            return running
        self.counters.requests += 1
        if before is None:
            sample = ResumableGeneration(request)
        else:
            self.counters.attached += 1
            sample = before
            if not sample.is_partial:
                done: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
                done.set_result(sample.reply())
                return Running(sample, done)  # type: ignore[arg-type]
            sample.interrupted()
            del self._finished[request_id]
        task = asyncio.get_running_loop().create_task(self._run(sample, request_id, ask))
        running = Running(sample, task)
        self._running[request_id] = running
        task.add_done_callback(lambda _: self._ended(request_id, running))
        return running

    def _ended(self, request_id: str, running: Running) -> None:
        if self._running.get(request_id) is running:
            del self._running[request_id]
        if running.task.cancelled():
            return
        if running.task.exception() is not None:
            self.counters.failed += 1
            return
        self.counters.finished += 1
        self._finished[request_id] = running.sample
        while len(self._finished) > self.config.keep_results:
            self._finished.popitem(last=False)

    async def _run(self, sample: ResumableGeneration, request_id: str, ask: RoutingRequest) -> Json:
        """Attempts until one finishes."""
        while True:
            replica = await self._place(ask)
            attempt = f"{request_id}~{next(self._attempts):x}~{self._name}"  # never the prefix of another
            try:
                await self._attempt(sample, replica, attempt)
            except (ServerDiedError, ServerError, ShutDownError, DeadlineError) as error:
                sample.interrupted()
                if self._closed or sample.attempts >= self.config.max_attempts:
                    raise
                if "status" in error.details:
                    await asyncio.sleep(RETRY_S)  # it lives
                else:
                    self.lost(replica)
                kept = len(sample.tokens)
                self.counters.continued += bool(kept)
                self.counters.restarted += not kept
                self.counters.saved_tokens += kept
                if not sample.is_full:
                    continue
            finally:
                self._leave(replica, attempt)
            reply = sample.reply()
            self._count(reply["meta_info"])
            _require_version(reply, ask.need)
            return reply

    async def _attempt(self, sample: ResumableGeneration, replica: Replica, attempt: str) -> None:
        body = sample.begin()
        prompt = len(body.get("input_ids") or ())
        replica.tokens[attempt] = prompt
        if len(replica.tokens) == 1:
            replica.progress_at = time.monotonic()
        interval = max(self.config.stream_interval, sample.left // MAX_WORDS)
        if sample.left <= interval:  # there is no word before the last one: spare the engine the stream
            self._hear(sample, replica, attempt, prompt, await replica.engine.generate(**body, rid=attempt))
            return
        body["sampling_params"] = {"stream_interval": interval, **body["sampling_params"]}
        stream = replica.engine.generate_stream(**body, rid=attempt)
        try:
            async for event in stream:
                if self._hear(sample, replica, attempt, prompt, event):
                    return
        finally:
            await stream.aclose()
        raise ServerError(f"the stream of {replica.name} ended before the sample had")

    def _hear(self, sample: ResumableGeneration, replica: Replica, attempt: str, prompt: int, event: Json) -> bool:
        """The reply so far has come from the engine. Whether it is whole."""
        sample.arrived(event)
        replica.progress_at = time.monotonic()
        replica.tokens[attempt] = prompt + len(event["output_ids"])
        return event["meta_info"].get("finish_reason") is not None

    def _count(self, meta: Json) -> None:
        self.counters.output_tokens += meta.get("completion_tokens") or 0
        self.counters.prompt_tokens += meta.get("prompt_tokens") or 0
        self.counters.cached_tokens += meta.get("cached_tokens") or 0

    async def close(self) -> None:
        """End everything that runs."""
        self._turn_away()
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def together(calls: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """All results, or the first failure, and then none goes on."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


def _require_version(reply: Json, need: VersionRequirement) -> None:
    """An update may have come between the placing and the last token."""
    wanted, meta = need.weight_version, reply["meta_info"]
    if wanted is None:
        return
    made = {str(span["version"]) for span in meta.get("weight_versions") or [{"version": meta.get("weight_version")}]}
    if made != {str(wanted)}:
        raise NotReadyError(f"the weights changed while it was sampled: version {wanted} was asked for, it has {made}")


def size_of(request: Mapping[str, Any]) -> int:
    """Tokens of its prompt, about. What is no prompt is refused later, by its replica's adapter."""
    ids, text = request.get("input_ids"), request.get("prompt")
    if isinstance(ids, list):
        return len(ids)
    return len(text) // CHARACTERS_A_TOKEN if isinstance(text, str) else 0
