"""Which turn is sampled next, when many agents wait for the same engine: that of the agent who is furthest behind.

An engine takes requests in the order in which they come. Then an agent whose tools are slow waits twice in each of
its turns, for its tool and in the queue, and at the end of a step the engine runs half empty for such stragglers.
Here turns wait outside of the engine, and who has had the fewest goes in first.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Any

from verl_server.agent.episode import Generate
from verl_server.errors import BadInputError

Json = dict[str, Any]


class Turnstile:
    """A `Generate` that lets `at_once` requests in at a time. Made and used in one event loop.

    `at_once`: what the engines work on at a time (SGLang's `max_running_requests`, times the replicas), and a few
    more that are ready when one ends.
    """

    def __init__(self, generate: Generate, at_once: int) -> None:
        if not isinstance(at_once, int) or isinstance(at_once, bool) or at_once < 1:
            raise BadInputError(f"at_once must be a whole number, 1 or more, got {at_once!r}")
        self._generate, self._room = generate, at_once
        self._turns: dict[str, int] = {}
        """That each session has had."""
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    async def __call__(self, *, request_id: str, session_id: str, **request: Any) -> Json:
        turns = self._turns.get(session_id, 0)
        await self._enter(turns)
        try:
            return await self._generate(request_id=request_id, session_id=session_id, **request)
        finally:
            self._turns[session_id] = turns + 1
            self._leave()

    async def _enter(self, turns: int) -> None:
        if self._room:
            self._room -= 1
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (turns, next(self._order), ticket))
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():  # let in, and cancelled at the same moment
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            *_, ticket = heapq.heappop(self._waiting)
            if not ticket.done():
                ticket.set_result(None)
                return
        self._room += 1
