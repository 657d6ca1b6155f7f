"""Agent loops: how an agent acts on a task.

A subclass of `AgentLoop` implements `run`. `AgentLoop` and `Episode` handle limits, recording and errors. Loops can be
registered by name. `ChatScheduler` drives episodes by callbacks instead of a loop.
"""

from __future__ import annotations

import asyncio
import inspect
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, TypeVar

from verl_server.agent.engines import GenerateFn
from verl_server.agent.episode import Episode
from verl_server.agent.limits import EpisodeStopped, RolloutLimits
from verl_server.agent.samples import Task, Turn
from verl_server.agent.tools.parsing import as_tool_call, parse_hermes_tool_calls, parse_json_tool_call
from verl_server.agent.tools.tool import Tool, ToolCall, ToolRegistry, ToolResult, as_tool_registry
from verl_server.agent.user_code import USER_FAILURES, as_exception, await_to_its_end, create_user_task
from verl_server.errors import BadInputError
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.messages import Message
from verl_server.types import Json
from verl_server.validation import check_arguments, did_you_mean, is_bool

AgentLoopClass = TypeVar("AgentLoopClass", bound="type[AgentLoop]")

MAX_IDENTITY_VALUES = 100_000
"""Maximum number of values in an attribute of an agent loop that counts as a setting. Larger attributes are data."""
_LOOPS: dict[str, type[AgentLoop]] = {}
"""Registered agent loops by name."""


class AgentLoop(ABC):
    """A kind of agent. One instance serves any number of episodes at a time, so it must not store their state.

    `tools`: list of the tools and functions that the policy may call. Raises BadInputError if a function cannot be a
    tool (see `FunctionTool`), and if two tools have the same name. A subclass with a constructor of its own calls
    `super().__init__(tools)`.
    """

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]] = ()) -> None:
        self.tools = ToolRegistry(tools)

    @property
    def identity(self) -> Json:
        """What its samples depend on besides its class and its tools, by name, for the check of a `run_dir`.

        These are its attributes with plain values: strings, numbers, bools, None, and lists, tuples and dicts of plain
        values, for example a system prompt and messages with examples. An attribute whose name begins with `_` does not
        count, for example the URL of a service, nor does one with more than `MAX_IDENTITY_VALUES` values. A subclass
        can return other values.
        """
        return plain_attributes(vars(self))

    @abstractmethod
    async def run(self, episode: Episode) -> None:
        """Act until the task is done. Call `await episode.generate(messages)` for each turn."""

    async def run_episode(self, episode: Episode) -> str:
        """Call `run` and return the stop reason: `done`, the name of a limit, or `error`.

        The stop reason is the name of a limit if the limit ended `run`, if it cut off the last turn of the branch
        `episode`, or if `run` caught the EpisodeStopped of this branch and returned. It is `error` if `run` raises an
        `Exception`, the SystemExit of `exit()` or the EpisodeStopped of another episode, returns a value, or returns
        without a turn although no limit was reached. The stop reason and the exception of a failed episode are also
        stored in the episode. Only a cancellation is raised.
        """
        try:
            # In a task of its own: what the agent loop cancels and ignores there does not cancel the sample.
            task = create_user_task(_act(self, episode), episode._state)
            await await_to_its_end(task, f"the agent loop of task {episode.task.id!r}")
        except EpisodeStopped as stopped:
            stop_reason, exception = stopped.stop_reason, None
            # Its frames refer to the task, and the task to the exception: the episode would stay until a collection.
            stopped.__traceback__ = None
        except (asyncio.CancelledError, Exception) as failure:  # noqa: BLE001 - it is a failure of this sample only
            stop_reason, exception = "error", as_exception(failure)
        else:
            stop_reason, exception = episode.reached_limit or "done", None
        if (current := asyncio.current_task()) is not None and current.cancelling():
            raise asyncio.CancelledError  # `run` has ignored it: the sample is not finished
        episode.stop_reason, episode.exception = stop_reason, exception
        return stop_reason


async def _act(loop: AgentLoop, episode: Episode) -> None:
    """Await `run`. Raises BadInputError for the mistakes of an agent loop."""
    name = type(loop).__name__
    value: object = await loop.run(episode)  # type: ignore[func-returns-value]
    if value is not None:
        raise BadInputError(
            f"{name}.run returned {value!r:.80}, but it must return None: the turns of an episode are recorded. A "
            "reward belongs in reward=, or in a method of an Environment with the decorator @reward"
        )
    if not episode._state.has_turns and episode.reached_limit is None:
        raise BadInputError(
            f"{name}.run returned without a turn of the policy, so there is nothing to train; write "
            "`await episode.generate(...)`, with `await`"
        )


def plain_attributes(attributes: Mapping[str, Any]) -> Json:
    """The attributes that are settings: with a name that does not begin with `_`, and with a plain value."""
    public = {name: value for name, value in attributes.items() if not name.startswith("_")}
    return {name: value for name, value in public.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    """Whether a value consists of strings, numbers, bools, None, lists, tuples and dicts of limited size."""
    pending, num_values = [value], 0
    while pending and num_values <= MAX_IDENTITY_VALUES:  # the end of a value that contains itself, too
        item = pending.pop()
        num_values += 1
        if isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, (list, tuple)):
            pending += item
        elif not (item is None or isinstance(item, (str, Number)) or is_bool(item)):
            return False
    return not pending


def register_agent_loop(name: str) -> Callable[[AgentLoopClass], AgentLoopClass]:
    """Class decorator `@register_agent_loop("name")` that registers an agent loop under a name.

    Raises BadInputError for a name that is taken.
    """

    def register(loop_class: AgentLoopClass) -> AgentLoopClass:
        if name in _LOOPS and _LOOPS[name] is not loop_class:
            raise BadInputError(f"an agent loop with the name {name!r} is already registered; choose another name")
        _LOOPS[name] = loop_class
        return loop_class

    return register


def get_agent_loop(name: str) -> type[AgentLoop]:
    """The agent loop that is registered under a name. Raises BadInputError for an unknown name."""
    if name not in _LOOPS:
        hint = did_you_mean(name, _LOOPS)
        raise BadInputError(f"there is no agent loop {name!r}; registered agent loops: {sorted(_LOOPS)}{hint}")
    return _LOOPS[name]


def as_agent_loop(loop: object) -> AgentLoop:
    """The agent loop, or a new one for the name of a registered agent loop."""
    if isinstance(loop, str):
        return get_agent_loop(loop)()
    if not isinstance(loop, AgentLoop):
        raise BadInputError(
            "agent must be a subclass of Environment, an AgentLoop, the name of an agent loop, or a list of tools, got "
            f"{loop!r:.80}"
        )
    return loop


@register_agent_loop("single_turn")
class SingleTurnLoop(AgentLoop):
    """Generates one turn."""

    async def run(self, episode: Episode) -> None:
        await episode.generate(episode.messages)


@register_agent_loop("tool_agent")
class ToolAgentLoop(AgentLoop):
    """Calls tools until a turn contains no tool call or is cut off (finish reason `length`).

    Without tools of its own, the loop calls those of the episode, for example of a sub-agent. The calls of one turn are
    executed concurrently.
    """

    def parse_tool_calls(self, turn: Turn) -> list[ToolCall | ToolResult]:
        """The tool calls of a turn, parsed by the renderer of the family or from Hermes' markers in `raw_text`."""
        if turn.tool_calls is None:
            return parse_hermes_tool_calls(turn.raw_text or turn.text, is_open=turn.begins_in_thought)
        return [as_tool_call(call) for call in turn.tool_calls]

    async def run(self, episode: Episode) -> None:
        tools = self.tools if self.tools.names else episode.tools
        turn = await episode.generate(episode.messages)
        while turn.finish_reason != "length" and (calls := self.parse_tool_calls(turn)):
            results = await tools.call_all(calls)
            turn = await episode.generate([result.message for result in results])


@register_agent_loop("interleaved")
class InterleavedLoop(AgentLoop):
    """Executes tool calls within a turn: stops at the end of a call, appends the result, and continues the turn.

    A call is `<call>{"name": ..., "arguments": {...}}</call>`. Its result is appended as `<result>...</result>`. A long
    result is truncated to `max_tool_tokens` between these tags.
    """

    CALL_START, CALL_END = "<call>", "</call>"

    async def run(self, episode: Episode) -> None:
        tools = self.tools if self.tools.names else episode.tools
        episode.add_messages(episode.messages)
        while True:
            turn = await episode.generate(stop=[self.CALL_END], no_stop_trim=True)
            _, started, call = turn.text.rstrip().rpartition(self.CALL_START)  # a token may have white space at its end
            if not started or not call.endswith(self.CALL_END):
                return
            (result,) = await tools.call_all([parse_json_tool_call(call.removesuffix(self.CALL_END))])
            episode.append_text(result.content, prefix="<result>", suffix="</result>")


# -- Chat scheduler ---------------------------------------------------------------------------------

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
    """Runs conversations on several servers, and reports each turn to a callback. Use it in one event loop.

    It is for programs that have several servers without a router: a new conversation goes to the server with the fewest
    requests and stays there, because that server has its prefix cache. Each conversation is an `Episode`. For a batch
    of tasks, use `RolloutRunner`.

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
        self._servers = list(servers)
        self._settings = renderer, limits, dict(sampling_params), as_tool_registry(tools)
        self._num_requests = [0] * len(self._servers)
        """Number of running turns by server."""
        self._conversations: dict[str, _Conversation] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._callback_errors: list[Exception] = []

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
        turn; a wrong one is the error of the turn. Raises BadInputError for invalid messages of a new conversation, for
        an unknown conversation, and for a conversation whose last turn is still running.
        """
        if session_id is None:
            session_id = uuid.uuid4().hex
            server, task = self.least_loaded(self._num_requests), Task(session_id, messages)
            episode = Episode(task, TrajectoryGraph(session_id), self._servers[server], *self._settings)
            self._conversations[session_id] = _Conversation(episode, server)
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
        return min(range(len(num_requests)), key=num_requests.__getitem__)

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

    def _require_idle(self, session_id: str) -> _Conversation:
        """The conversation with this id. Raises BadInputError if it is unknown or has a running turn."""
        if session_id not in self._conversations:
            raise BadInputError(f"there is no conversation {session_id!r}; omit session_id to start a new one")
        conversation = self._conversations[session_id]
        if conversation.has_running_turn:
            raise BadInputError(f"conversation {session_id!r} has a running turn; wait for its callback")
        return conversation

    async def _run_turn(
        self, conversation: _Conversation, callback: TurnCallback, messages: list[Message], info: Any, params: Json
    ) -> None:
        turn, error = None, None
        try:
            turn = await conversation.episode.generate(messages, **params)
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
