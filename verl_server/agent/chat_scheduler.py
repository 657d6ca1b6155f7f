"""`ChatScheduler`: conversations over several servers, driven by callbacks that may submit the next turn.

The interface that agent loops were first written against. A new conversation goes to the server with the fewest
requests and stays there, for the sake of its prefix cache. (Behind a router there is one `Generate`, and the router
chooses.) What a conversation says is recorded token by token, as in every `Rollout`.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_server.agent.episode import Budget, Generate, Rollout, Task, Turn
from verl_server.errors import BadInputError
from verl_server.trajectory.graph import Session
from verl_server.trajectory.rendering import Message, Renderer

Completed = Callable[[Turn | None, Any, Exception | None], Awaitable[None] | None]
"""Called with the turn, or None and the exception it failed with (`EndedError`: the budget is spent); and `info`."""


def fewest(requests: Sequence[int]) -> int:
    """Which server takes a new conversation. Pure."""
    return min(range(len(requests)), key=lambda server: (requests[server], server))


@dataclass
class _Conversation:
    rollout: Rollout
    server: int
    busy: bool = False


class ChatScheduler:
    """Made and used in one event loop. `budget` is each conversation's."""

    def __init__(
        self, servers: Sequence[Generate], renderer: Renderer, budget: Budget, sampling_params: Mapping[str, Any]
    ) -> None:
        if not servers:
            raise BadInputError("a scheduler needs at least one server")
        self._servers, self._renderer = list(servers), renderer
        self._budget, self._params = budget, dict(sampling_params)
        self._requests = [0] * len(self._servers)
        self._conversations: dict[str, _Conversation] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._failures: list[Exception] = []

    def submit(
        self,
        callback: Completed,
        messages: Sequence[Message],
        *,
        session_id: str | None = None,
        info: Any = None,
        **sampling_params: Any,
    ) -> str:
        """Ask for a turn after `messages`: those that are new. Returns the conversation's id at once.

        `callback(turn, info, error)` is called when it is there, and may submit the next one. Raises BadInputError
        for a conversation that is unknown, or has a turn under way.
        """
        if session_id is None:
            session_id = uuid.uuid4().hex
            server = fewest(self._requests)
            task, record = Task(session_id, messages), Session(session_id)
            rollout = Rollout(task, record, self._servers[server], self._renderer, self._budget, self._params)
            self._conversations[session_id] = _Conversation(rollout, server)
        conversation = self._known(session_id)
        if conversation.busy:
            raise BadInputError(f"the conversation {session_id!r} has a turn under way")
        conversation.busy = True
        self._requests[conversation.server] += 1
        running = asyncio.create_task(self._turn(conversation, callback, list(messages), info, sampling_params))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return session_id

    def finish(self, session_id: str) -> Rollout:
        """Forget a conversation; what it was is returned."""
        if self._known(session_id).busy:
            raise BadInputError(f"the conversation {session_id!r} has a turn under way")
        return self._conversations.pop(session_id).rollout

    async def join(self) -> None:
        """Until nothing is under way, callbacks and what they submit included.

        Raises an ExceptionGroup of what callbacks raised; the conversations of other callbacks go on until their end.
        """
        while self._running:
            await asyncio.wait(set(self._running))
        failures, self._failures = self._failures, []
        if failures:
            raise ExceptionGroup("callbacks failed", failures)

    async def close(self) -> None:
        """Give up what is under way; the servers stop working on it."""
        running = set(self._running)
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._conversations.clear()

    def _known(self, session_id: str) -> _Conversation:
        if session_id not in self._conversations:
            raise BadInputError(f"there is no conversation {session_id!r}: leave session_id out to begin one")
        return self._conversations[session_id]

    async def _turn(
        self,
        conversation: _Conversation,
        callback: Completed,
        messages: list[Message],
        info: Any,
        sampling_params: Mapping[str, Any],
    ) -> None:
        turn, failure, before = None, None, conversation.rollout.leaf
        try:
            turn = await conversation.rollout.turn(messages, **sampling_params)
        except Exception as error:  # noqa: BLE001 - the callback decides
            failure = error
            conversation.rollout.leaf = before  # so that the same messages can be submitted again
        finally:
            conversation.busy = False
            self._requests[conversation.server] -= 1
        try:
            called = callback(turn, info, failure)
            if inspect.isawaitable(called):
                await called
        except Exception as error:  # noqa: BLE001 - told by `join`
            self._failures.append(error)
