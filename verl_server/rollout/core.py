"""The router's inside: it lives in one event loop and sees every request and every replica.

A request has an id. Asked again with the same id it is not sampled again: the call waits for the one that runs,
or gets its result. When a replica is lost in the middle the sample goes on with another (see `sample`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    ServerDiedError,
    ServerError,
    ShutDownError,
    VerlServerError,
)
from verl_server.rollout.sample import Sample
from verl_server.rollout.strategies import Limits, Load, Need, choose, require_place_in_queue

Json = dict[str, Any]
R = TypeVar("R")

RETRY_S = 0.05
MAX_ID = 512
"""Characters of a request's or session's id."""


class Engine(Protocol):
    """What the router needs of a replica: the asynchronous adapter's generation."""

    base_url: str
    api_key: str | None

    def generate_stream(self, **request: Any) -> Any: ...


@dataclass(frozen=True)
class RouterConfig:
    """How requests are spread, and how long things are remembered."""

    limits: Limits = field(default_factory=Limits)
    max_waiting: int = 4096
    """Requests that wait for a place; one more is refused (ServerBusyError)."""
    max_attempts: int = 8
    """Replicas that one sample may lose before its error is raised."""
    stream_interval: int = 16
    """Tokens between two words from the engine: what a lost replica costs at most, for each of its requests."""
    keep_results: int = 4096
    """Finished samples that can still be asked for by their id."""
    keep_sessions: int = 65536
    linger_s: float = 10.0
    """How long a sample goes on when nobody waits for it any more, for a caller that comes again."""


@dataclass
class Replica:
    """What the router knows of one replica."""

    name: str
    engine: Engine
    load: Load
    expected: bool = True
    """It serves, or will serve again by itself."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Of each of its requests."""
    progress_at: float = 0.0
    """When it last made progress (`time.monotonic`)."""


@dataclass
class Running:
    """One sample under way, and who waits for it."""

    sample: Sample
    task: asyncio.Task[Json]
    waiters: int = 0
    lingering: asyncio.TimerHandle | None = None


@dataclass
class Counters:
    """Since the start."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    refused: int = 0
    attached: int = 0
    continued: int = 0
    """Samples that went on elsewhere with the tokens that they had."""
    restarted: int = 0
    """Samples that began again elsewhere."""
    saved_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class RouterCore:
    """Made and used in one event loop."""

    def __init__(self, config: RouterConfig | None = None) -> None:
        self.config = config or RouterConfig()
        self.replicas: dict[str, Replica] = {}
        self.counters = Counters()
        self._running: dict[str, Running] = {}
        self._finished: OrderedDict[str, Sample] = OrderedDict()
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._waiting: deque[tuple[Need, str | None, asyncio.Future[Replica]]] = deque()
        self._closed = False

    # -- the fleet's side ---------------------------------------------------------------------------

    def put(self, name: str, engine: Engine, version: int, *, admitted: bool = True) -> None:
        """A replica, new or with another server behind it."""
        self.replicas[name] = Replica(name, engine, Load(name, 0, 0, version, admitted), progress_at=time.monotonic())
        self._place_waiting()

    def update(
        self,
        name: str,
        *,
        version: int | None = None,
        admitted: bool | None = None,
        suspect: bool | None = None,
        expected: bool | None = None,
    ) -> None:
        """What has changed of a replica; None leaves a thing as it is. Raises BadInputError for an unknown one."""
        one = self.replica(name)
        before = one.load
        one.load = replace(
            before,
            version=before.version if version is None else version,
            admitted=before.admitted if admitted is None else admitted,
            suspect=before.suspect if suspect is None else suspect,
        )
        if expected is not None:
            one.expected = expected
        self._place_waiting()

    def drop(self, name: str) -> None:
        """Forget a replica; what runs on it goes on elsewhere."""
        self.replicas.pop(name, None)
        self._place_waiting()

    def lost(self, replica: Replica) -> None:
        """The connection to it broke: it gets nothing until somebody says that it is back."""
        replica.load = replace(replica.load, admitted=False)

    def replica(self, name: str) -> Replica:
        if name not in self.replicas:
            raise BadInputError(f"there is no replica {name!r}; there are {sorted(self.replicas)}")
        return self.replicas[name]

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Requests that have no replica yet."""
        return len(self._waiting)

    # -- the callers' side --------------------------------------------------------------------------

    async def generate(
        self,
        request: Mapping[str, Any],
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        need: Need | None = None,
        timeout_s: float | None = None,
        linger: bool = False,
    ) -> Json:
        """One sample: the adapter's `generate` for one prompt. See `RolloutRouter.generate`."""
        if self._closed:
            raise ShutDownError("the router was shut down")
        request_id = _id(request_id, "request_id") or uuid.uuid4().hex
        session_id = _id(session_id, "session_id")
        if timeout_s is not None:
            if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool):
                raise BadInputError(f"timeout_s must be a number of seconds, got {timeout_s!r}")
            if not timeout_s > 0:
                raise BadInputError(f"timeout_s is {timeout_s}: the deadline has passed already")
        running = self._attach(request_id, request, session_id, need or Need())
        running.waiters += 1
        if running.lingering is not None:
            running.lingering.cancel()
            running.lingering = None
        try:
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
                    running.lingering = loop.call_later(self.config.linger_s, self._give_up, request_id, running)
                else:
                    self._give_up(request_id, running)

    def _give_up(self, request_id: str, running: Running) -> None:
        """Nobody wants it: closing its stream aborts the request in the engine."""
        if self._running.get(request_id) is running:
            del self._running[request_id]
        running.task.cancel()

    def _attach(self, request_id: str, request: Mapping[str, Any], session_id: str | None, need: Need) -> Running:
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
            sample = Sample(request)
        else:
            self.counters.attached += 1
            sample = before
            if not sample.is_partial:
                done: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
                done.set_result(sample.reply())
                return Running(sample, done)  # type: ignore[arg-type]
            sample.interrupted()
            del self._finished[request_id]
        task = asyncio.get_running_loop().create_task(self._run(sample, request_id, session_id, need))
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

    async def _run(self, sample: Sample, request_id: str, session_id: str | None, need: Need) -> Json:
        """Attempts until one finishes."""
        while True:
            replica = await self._place(need, session_id)
            attempt = f"{request_id}~{sample.attempts}~{uuid.uuid4().hex[:8]}"  # never the prefix of another
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
            self._count(sample)
            return sample.reply()

    async def _attempt(self, sample: Sample, replica: Replica, attempt: str) -> None:
        body = sample.begin()
        params = {"stream_interval": self.config.stream_interval, **body.pop("sampling_params")}
        prompt = len(body.get("input_ids") or ())
        replica.tokens[attempt] = prompt
        if len(replica.tokens) == 1:
            replica.progress_at = time.monotonic()
        stream = replica.engine.generate_stream(**body, sampling_params=params, rid=attempt)
        try:
            async for event in stream:
                sample.arrived(event)
                replica.progress_at = time.monotonic()
                replica.tokens[attempt] = prompt + len(event["output_ids"])
                if event["meta_info"].get("finish_reason") is not None:
                    return
        finally:
            await stream.aclose()
        raise ServerError(f"the stream of {replica.name} ended before the sample had")

    def _count(self, sample: Sample) -> None:
        meta = sample.reply()["meta_info"]
        self.counters.output_tokens += meta.get("completion_tokens") or 0
        self.counters.prompt_tokens += meta.get("prompt_tokens") or 0
        self.counters.cached_tokens += meta.get("cached_tokens") or 0

    # -- places -------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def place(self, session_id: str | None) -> AsyncIterator[Replica]:
        """A replica for a request that is passed on as it is."""
        replica = await self._place(Need(), _id(session_id, "session_id"))
        ticket = uuid.uuid4().hex
        replica.tokens[ticket] = 0
        if len(replica.tokens) == 1:
            replica.progress_at = time.monotonic()
        try:
            yield replica
        finally:
            self._leave(replica, ticket)

    def _loads(self) -> list[Load]:
        return [
            replace(one.load, tokens=sum(one.tokens.values()), requests=len(one.tokens))
            for one in self.replicas.values()
        ]

    def _choose(self, need: Need, session_id: str | None) -> Replica | None:
        """The replica for a request, None when it has to wait for one."""
        sticky = None if session_id is None else self._sessions.get(session_id)
        try:
            name = choose(self._loads(), need, sticky, self.config.limits)
        except NotReadyError:
            if any(not one.load.admitted and one.expected for one in self.replicas.values()):
                return None
            self.counters.refused += 1
            raise
        if name is None:
            return None
        if session_id is not None:
            self._sessions[session_id] = name
            self._sessions.move_to_end(session_id)
            while len(self._sessions) > self.config.keep_sessions:
                self._sessions.popitem(last=False)
        return self.replicas[name]

    async def _place(self, need: Need, session_id: str | None) -> Replica:
        """A replica with room; waits for one, in turn."""
        found = self._choose(need, session_id) if not self._waiting else None
        if found is not None:
            return found
        require_place_in_queue(len(self._waiting), self.config.max_waiting)
        ticket: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._waiting.append((need, session_id, ticket))
        self._place_waiting()
        return await ticket

    def _place_waiting(self) -> None:
        """Give places to those who wait, the first come first, as far as there is room."""
        still: deque[tuple[Need, str | None, asyncio.Future[Replica]]] = deque()
        while self._waiting:
            need, session_id, ticket = self._waiting.popleft()
            if ticket.done():  # its caller has gone
                continue
            try:
                replica = self._choose(need, session_id)
            except VerlServerError as error:
                ticket.set_exception(error)
                continue
            if replica is None:
                still.append((need, session_id, ticket))
                if not self._has_room():
                    break
                continue
            replica.tokens[f"placed-{id(ticket)}"] = 0  # until its request has begun
            ticket.add_done_callback(functools.partial(self._forget_place, replica))
            ticket.set_result(replica)
        still.extend(self._waiting)
        self._waiting = still

    def _forget_place(self, replica: Replica, ticket: asyncio.Future[Replica]) -> None:
        replica.tokens.pop(f"placed-{id(ticket)}", None)
        self._place_waiting()

    def _has_room(self) -> bool:
        limit = self.config.limits.requests
        return any(one.load.admitted and len(one.tokens) < limit for one in self.replicas.values())

    def _leave(self, replica: Replica, attempt: str) -> None:
        replica.tokens.pop(attempt, None)
        self._place_waiting()

    async def close(self) -> None:
        """End everything that runs."""
        self._closed = True
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        for _, _, ticket in self._waiting:
            if not ticket.done():
                ticket.set_exception(ShutDownError("the router was shut down"))
        self._waiting.clear()
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


def _id(given: str | None, what: str) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not given or len(given) > MAX_ID:
        size = f"{len(given)} characters" if isinstance(given, str) else type(given).__name__
        raise BadInputError(f"{what} must be a string of 1 to {MAX_ID} characters, got {size}")
    return given
