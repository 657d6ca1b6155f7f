"""A client that sends each request twice, drops every third stream, and sends a request again after each failure."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from gateway_chaos.dialects import PATHS, Reply, RetryableError, body_of, read_events, read_reply

TURNS_PER_CONVERSATION = 6
TURN_DEADLINE_S = 240.0
RETRY_DELAY_S = 0.3
RETRYABLE_STATUSES = (429, 503, 529)


@dataclass(frozen=True)
class Turn:
    """A turn that the client has got completely."""

    session_id: str
    history: tuple[tuple[str, str], ...]
    """Questions and answers before the turn."""
    question: str
    reply: Reply
    num_attempts: int


@dataclass
class Conversations:
    """Conversations of several sessions over HTTP. `keys`: the key of each session."""

    url: str
    keys: dict[str, str]
    num_turns: int
    seed: int
    turns: list[Turn] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)
    _streams: Any = field(default_factory=itertools.count)

    async def run(self) -> None:
        """Make all turns. Each session has one conversation at a time."""
        async with httpx.AsyncClient(base_url=self.url, timeout=httpx.Timeout(120.0, connect=5.0)) as client:
            await asyncio.gather(*(self._run_session(client, session_id) for session_id in self.keys))

    async def _run_session(self, client: httpx.AsyncClient, session_id: str) -> None:
        history = list[tuple[str, str]]()
        while (number := next(self._numbers)) < self.num_turns:
            if len(history) == TURNS_PER_CONVERSATION:
                history = []
            question = f"question {number}"
            request = _Request(self, client, session_id, tuple(history), question)
            try:
                async with asyncio.timeout(TURN_DEADLINE_S):
                    reply = await request.send()
            except TimeoutError:
                self.violations.append(f"{session_id}: {question} got no reply in {TURN_DEADLINE_S:g} s")
                return
            self.turns.append(Turn(session_id, tuple(history), question, reply, request.num_attempts))
            history.append((question, reply.text))

    def next_stream(self) -> int:
        """Number of the next stream."""
        return int(next(self._streams))


class _Request:
    """One request, which is sent until two replies to it are complete."""

    def __init__(
        self,
        owner: Conversations,
        client: httpx.AsyncClient,
        session_id: str,
        history: tuple[tuple[str, str], ...],
        question: str,
    ) -> None:
        self._owner, self._client = owner, client
        rng = random.Random(f"{owner.seed} {question}")
        self._dialect, self._stream = rng.choice(sorted(PATHS)), rng.random() < 0.6
        self._events_before_drop = rng.randrange(1, 6)
        self._key = owner.keys[session_id]
        self._content = json.dumps(body_of(self._dialect, history, question, self._stream)).encode()
        self._name = f"{session_id}: {question} ({self._dialect}{', stream' if self._stream else ''})"
        self.num_attempts = 0

    async def send(self) -> Reply:
        """The reply. The request is sent again after the first complete reply, and both replies must be equal."""
        first = await self._until_complete()
        second = await self._until_complete()
        if first != second:
            self._owner.violations.append(f"{self._name} got two different replies: {first} and {second}")
        return first

    async def _until_complete(self) -> Reply:
        while True:
            number, self.num_attempts = self.num_attempts, self.num_attempts + 1
            self._owner.counts["requests"] += 1
            self._owner.counts["repeated requests"] += number > 0
            try:
                reply = await self._attempt(number)
            except (httpx.HTTPError, RetryableError) as error:
                self._owner.counts[f"failed attempts: {type(error).__name__}"] += 1
                reply = None
            if reply is not None:
                return reply
            await asyncio.sleep(RETRY_DELAY_S)

    async def _attempt(self, number: int) -> Reply | None:
        headers = {"x-api-key": self._key, "x-stainless-retry-count": str(number)}
        path = PATHS[self._dialect]
        if not self._stream:
            answer = await self._client.post(path, content=self._content, headers=headers)
            self._require_success(answer)
            return read_reply(self._dialect, answer.json())
        drop = self._owner.next_stream() % 3 == 2
        async with self._client.stream("POST", path, content=self._content, headers=headers) as answer:
            if answer.status_code != 200:
                await answer.aread()
            self._require_success(answer)
            events = list[Any]()
            async for line in _lines(answer):
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ")
                    events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
                if drop and len(events) >= self._events_before_drop:
                    self._owner.counts["dropped streams"] += 1
                    return None
            reply = read_events(self._dialect, events)
            if reply is None:
                raise RetryableError("the stream ended too early")
            return reply

    def _require_success(self, answer: httpx.Response) -> None:
        if answer.status_code in RETRYABLE_STATUSES:
            raise RetryableError(answer.text[:300])
        if answer.status_code != 200:
            self._owner.violations.append(f"{self._name}: status {answer.status_code}, {answer.text[:300]}")
            raise RetryableError(answer.text[:300])


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a stream. `aiter_lines` also splits at the line separators of Unicode, which JSON texts may have."""
    rest = b""
    async for chunk in answer.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
