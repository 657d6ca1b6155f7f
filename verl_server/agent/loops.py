"""How agents act: write `run`, register it, and the rest (tokens, budgets, records, errors) is done around it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from verl_server.agent.episode import EndedError, Rollout, Turn
from verl_server.agent.tools import Tool, Toolbox, ToolCall, ToolResult, hermes_call, hermes_calls, read
from verl_server.errors import BadInputError, to_wire

L = TypeVar("L", bound="type[AgentLoop]")

_LOOPS: dict[str, type[AgentLoop]] = {}


class AgentLoop(ABC):
    """One kind of agent. An instance serves any number of rollouts at a time: state belongs to the rollout."""

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]] = ()) -> None:
        self.tools = Toolbox(tools)

    @abstractmethod
    async def run(self, rollout: Rollout) -> None:
        """Act until the task is done: `await rollout.turn(messages)` as often as it takes."""

    async def act(self, rollout: Rollout) -> str:
        """`run`, and how it ended: `done`, what of the budget is spent, or `error`. Only cancelling is raised."""
        try:
            await self.run(rollout)
        except EndedError as ended:
            reason, error = ended.reason, None
        except Exception as failure:  # noqa: BLE001 - it belongs to this sample, not to the batch
            reason, error = "error", to_wire(failure)
        else:
            reason, error = "done", None
        rollout.reason, rollout.error = reason, error
        return reason


def register(name: str) -> Callable[[L], L]:
    """Make a loop known by a name."""

    def known(loop: L) -> L:
        if name in _LOOPS and _LOOPS[name] is not loop:
            raise BadInputError(f"an agent loop {name!r} is registered already")
        _LOOPS[name] = loop
        return loop

    return known


def loop_named(name: str) -> type[AgentLoop]:
    if name not in _LOOPS:
        raise BadInputError(f"there is no agent loop {name!r}; there are {sorted(_LOOPS)}")
    return _LOOPS[name]


@register("single_turn")
class SingleTurnLoop(AgentLoop):
    """One answer."""

    async def run(self, rollout: Rollout) -> None:
        await rollout.turn(rollout.task.messages)


@register("tool_agent")
class ToolAgentLoop(AgentLoop):
    """Calls tools until it answers without: all calls of a turn at the same time, results in their order."""

    def calls(self, turn: Turn) -> list[ToolCall | ToolResult]:
        """The calls in what the policy said: by its family's tokens, or by the marks that most templates teach."""
        return hermes_calls(turn.text) if turn.calls is None else [read(call) for call in turn.calls]

    async def run(self, rollout: Rollout) -> None:
        turn = await rollout.turn(rollout.task.messages)
        while turn.finish != "length" and (calls := self.calls(turn)):
            results = await self.tools.call_all(calls)
            turn = await rollout.turn([result.message for result in results])


@register("interleaved")
class InterleavedLoop(AgentLoop):
    """Stops at a marker, calls, inserts the result there, and goes on with the same turn."""

    OPEN, CLOSE = "<call>", "</call>"

    async def run(self, rollout: Rollout) -> None:
        rollout.put(rollout.task.messages)
        while True:
            turn = await rollout.speak(stop=[self.CLOSE], no_stop_trim=True)
            _, called, text = turn.text.rpartition(self.OPEN)
            if not called or not turn.text.endswith(self.CLOSE):
                return
            (result,) = await self.tools.call_all([hermes_call(text.removesuffix(self.CLOSE))])
            rollout.insert(f"<result>{result.content}</result>")
