"""`ChatScheduler`: runs conversations on several servers and reports each turn to a callback.

It is for programs that drive conversations with callbacks, and that have several servers without a router. A new
conversation goes to the server with the fewest requests and stays there, because that server has its prefix cache. With
a router there is only one generate function, and the router selects the server. Conversations are recorded token by
token, as in every `Episode`. For a batch of tasks, use `RolloutRunner`.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_server.agent.engines import GenerateFn, require_sampling_params
from verl_server.agent.episodes.episode import Episode
from verl_server.agent.episodes.episode_state import require_token_limit
from verl_server.agent.limits import EpisodeStopped, RolloutLimits
from verl_server.agent.samples import Task, Turn
from verl_server.agent.tools.tool import Tool, ToolRegistry, as_tool_registry
from verl_server.agent.user_code import USER_FAILURES, as_exception
from verl_server.errors import BadInputError
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.messages import Message, validate_messages
from verl_server.validation import check_arguments

TurnCallback = Callable[[Turn | None, Any, Exception | EpisodeStopped | None], Awaitable[None] | None]
"""Called as `callback(turn, info, error)` when a turn ends. Exactly one of `turn` and `error` is None.

`info` is the value that was passed to `submit`. `error` is an `EpisodeStopped` if the conversation reached a limit.
"""


@dataclass
class _Conversation:
    """A conversation and its server."""

    episode: Episode
    server: int
    """Index of the server."""
    has_running_turn: bool = False


class ChatScheduler:
    """Runs conversations on several servers. Create and use it in one event loop.

    `servers`: list with one generate function per server. `limits`: limits of each conversation. `sampling_params`:
    SGLang's sampling parameters of every turn. `tools`: tools and functions whose schemas are in the first prompt of
    each conversation. The scheduler does not execute calls: the callback reads the calls of a turn with
    `ToolAgentLoop.parse_tool_calls`, executes them with `ToolRegistry.call_all`, and submits the messages of the
    results. Raises BadInputError if there is no server, for an argument of a wrong type, and for a function that cannot
    be a tool.
    """

    @check_arguments(skip=("sampling_params", "tools"))
    def __init__(
        self,
        servers: Sequence[GenerateFn],
        renderer: ChatRenderer,
        limits: RolloutLimits,
        sampling_params: Mapping[str, Any],
        *,
        tools: ToolRegistry | Sequence[Tool | Callable[..., Any]] = (),
    ) -> None:
        if not servers:
            raise BadInputError("a ChatScheduler needs at least one server")
        require_token_limit(limits)
        require_sampling_params(sampling_params)
        self._servers, self._renderer = list(servers), renderer
        self._limits, self._sampling_params = limits, dict(sampling_params)
        self._tools = as_tool_registry(tools)
        self._num_requests = [0] * len(self._servers)
        """Number of running turns by server."""
        self._conversations: dict[str, _Conversation] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._callback_errors: list[Exception] = []

    @check_arguments(skip=("messages",))
    def submit(
        self,
        callback: TurnCallback,
        messages: Sequence[Message],
        *,
        session_id: str | None = None,
        info: Any = None,
        **sampling_params: Any,
    ) -> str:
        """Start a turn after `messages`, which are the new messages only. Returns the id of the conversation at once.

        `session_id`: id of the conversation; None starts a new conversation. `callback(turn, info, error)` is called
        when the turn ends, and may submit the next turn. `sampling_params` override those of the scheduler for this
        turn. Raises BadInputError for invalid messages, for a callback that is no function, for an
        unknown conversation, and for a conversation whose last turn is still running.
        """
        require_sampling_params(sampling_params)
        if session_id is None:
            session_id = uuid.uuid4().hex
            self._conversations[session_id] = self._start_conversation(session_id, messages)  # validates the messages
        else:
            validate_messages(messages)
        conversation = self._require_idle(session_id)
        conversation.has_running_turn = True
        self._num_requests[conversation.server] += 1
        running = asyncio.create_task(self._run_turn(conversation, callback, list(messages), info, sampling_params))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return session_id

    def finish(self, session_id: str) -> Episode:
        """Remove a conversation and return its episode.

        Raises BadInputError for an unknown conversation, and for a conversation whose last turn is still running.
        """
        self._require_idle(session_id)
        return self._conversations.pop(session_id).episode

    @staticmethod
    def least_loaded(num_requests: Sequence[int]) -> int:
        """Index of the server that takes a new conversation: the first server with the fewest requests."""
        return min(range(len(num_requests)), key=lambda server: (num_requests[server], server))

    async def join(self) -> None:
        """Wait until no turn is running, including turns that callbacks submit.

        Raises an ExceptionGroup with the exceptions of callbacks, in which an EpisodeStopped is a RuntimeError. An
        exception of one callback does not affect other conversations.
        """
        while self._running:
            await asyncio.wait(set(self._running))
        errors, self._callback_errors = self._callback_errors, []
        if errors:
            raise ExceptionGroup("callbacks failed", errors)

    async def close(self) -> None:
        """Cancel all running turns, also on the servers, and remove all conversations."""
        running = set(self._running)
        for turn in running:
            turn.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._conversations.clear()

    def _start_conversation(self, session_id: str, messages: Sequence[Message]) -> _Conversation:
        server = self.least_loaded(self._num_requests)
        episode = Episode(
            Task(session_id, messages),
            TrajectoryGraph(session_id),
            self._servers[server],
            self._renderer,
            self._limits,
            self._sampling_params,
            self._tools,
        )
        return _Conversation(episode, server)

    def _require_idle(self, session_id: str) -> _Conversation:
        """The conversation with this id. Raises BadInputError if it is unknown or has a running turn."""
        if session_id not in self._conversations:
            raise BadInputError(f"there is no conversation {session_id!r}; omit session_id to start a new one")
        conversation = self._conversations[session_id]
        if conversation.has_running_turn:
            raise BadInputError(f"conversation {session_id!r} has a running turn; wait for its callback")
        return conversation

    async def _run_turn(
        self,
        conversation: _Conversation,
        callback: TurnCallback,
        messages: list[Message],
        info: Any,
        sampling_params: Mapping[str, Any],
    ) -> None:
        episode = conversation.episode
        turn, error = None, None
        try:
            turn = await episode.generate(messages, **sampling_params)
        except (Exception, EpisodeStopped) as failure:  # noqa: BLE001 - the callback handles the failure
            error = failure  # the episode ends where it ended before, so the same messages can be submitted again
        except asyncio.CancelledError as cancellation:
            error = as_exception(cancellation)
        finally:
            conversation.has_running_turn = False
            self._num_requests[conversation.server] -= 1
        try:
            result = callback(turn, info, error)
            if inspect.isawaitable(result):
                await result
        except USER_FAILURES as failure:  # raised by `join`
            self._callback_errors.append(as_exception(failure))
