"""Agent loops: how an agent acts on a task.

A subclass of `AgentLoop` implements `run`. `AgentLoop` and `Episode` handle limits, recording and errors. Loops can be
registered by name.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, TypeVar

from verl_server.agent.episodes.episode import Episode
from verl_server.agent.limits import EpisodeStopped
from verl_server.agent.samples import Turn
from verl_server.agent.tools.parsing import as_tool_call, parse_hermes_tool_calls, parse_json_tool_call
from verl_server.agent.tools.tool import Tool, ToolCall, ToolRegistry, ToolResult
from verl_server.agent.user_code import as_exception, await_to_its_end, create_user_task
from verl_server.errors import BadInputError
from verl_server.types import Json
from verl_server.validation import did_you_mean, is_bool

AgentLoopClass = TypeVar("AgentLoopClass", bound="type[AgentLoop]")

MAX_IDENTITY_VALUES = 100_000
"""Maximum number of values in an attribute of an agent loop that counts as a setting. Larger attributes are data."""
_LOOPS: dict[str, type[AgentLoop]] = {}
"""Registered agent loops by name."""


class AgentLoop(ABC):
    """A kind of agent. One instance serves any number of episodes at a time, so it must not store their state.

    `tools`: list of the tools and functions that the policy may call. Raises BadInputError if it is not a list, if a
    function cannot be a tool (see `FunctionTool`), and if two tools have the same name. A subclass with a constructor
    of its own calls `super().__init__(tools)`.
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

    Raises BadInputError for a name that is taken, and for a class that is no agent loop.
    """

    def register(loop_class: AgentLoopClass) -> AgentLoopClass:
        if not isinstance(loop_class, type) or not issubclass(loop_class, AgentLoop):
            raise BadInputError(f"only subclasses of AgentLoop can be registered, got {loop_class!r}")
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
    if isinstance(loop, type) and issubclass(loop, AgentLoop):
        raise BadInputError(f"agent must be an instance of an agent loop, got the class; write {loop.__name__}(tools)")
    if not isinstance(loop, AgentLoop):
        raise BadInputError(
            "agent must be a subclass of Environment, an AgentLoop, the name of an agent loop, or a list of tools, got "
            f"{type(loop).__name__}"
        )
    if not isinstance(getattr(loop, "tools", None), ToolRegistry):
        name = type(loop).__name__
        raise BadInputError(f"the agent loop {name} has no tools; call super().__init__(tools) in {name}.__init__")
    return loop


def read_identity(loop: AgentLoop) -> Json:
    """The settings of an agent loop."""
    return dict(loop.identity)


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
