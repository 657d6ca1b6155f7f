"""Plans of sessions: plain data, which hypothesis generates and shrinks, and which a child process can be given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from verl_server.agent import RolloutLimits
from verl_server.trajectory import ForkReason
from verl_server.types import Json


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a turn. With them, the recorded log probabilities are those of logits / temperature."""

    max_new_tokens: int = 4
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    num_stop_tokens: int = 0
    """The turn ends at tokens with smaller ids."""
    ignore_eos: bool = False
    no_stop_trim: bool = False

    @property
    def arguments(self) -> Json:
        """The parameters as `Episode.generate` takes them."""
        arguments = {**vars(self), "stop": list(self.stop), "stop_token_ids": list(range(self.num_stop_tokens))}
        del arguments["num_stop_tokens"]
        return arguments


@dataclass(frozen=True)
class Generate:
    """A turn of the policy after messages of the user and results of tools. It is repeated after injected failures.

    A branch that ends with messages gets no others: the turn follows at once.
    """

    texts: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    faults: tuple[str, ...] = ()
    """What happens to the first requests of the turn: they fail before or after the server has generated."""
    retries: int = 3
    reward: float | None = None


@dataclass(frozen=True)
class AddMessages:
    """Messages without a turn. Left out where the branch ends with messages."""

    texts: tuple[str, ...] = ("more",)


@dataclass(frozen=True)
class AppendText:
    """A text within the last turn."""

    text: str = "result"
    prefix: str = ""
    suffix: str = ""


@dataclass(frozen=True)
class SetWeight:
    """The weight of the branch in the loss."""

    weight: float = 0.0


@dataclass(frozen=True)
class Fail:
    """The agent loop raises an exception."""


@dataclass(frozen=True)
class Fork:
    """A branch that continues `back` nodes before the end, and that this branch may adopt afterwards."""

    back: int
    steps: tuple[Step, ...]
    adopt: bool = False


@dataclass(frozen=True)
class NewRoot:
    """A sub-agent with messages and tools of its own, or a compaction, which this branch adopts before its steps."""

    texts: tuple[str, ...]
    tools: tuple[str, ...] | None
    steps: tuple[Step, ...]
    adopt: bool = False


@dataclass(frozen=True)
class Together:
    """Branches that generate concurrently. `is_awaited`: whether the agent loop waits for all after an exception."""

    branches: tuple[tuple[Step, ...], ...]
    is_awaited: bool = True


@dataclass(frozen=True)
class LeaveBehind:
    """A branch that is started and never awaited."""

    steps: tuple[Step, ...]


Step: TypeAlias = Generate | AddMessages | AppendText | SetWeight | Fail | Fork | NewRoot | Together | LeaveBehind


@dataclass(frozen=True)
class SessionPlan:
    """What one sample does."""

    texts: tuple[str, ...] = ("hello",)
    """Messages of the task."""
    steps: tuple[Step, ...] = (Generate(),)
    reward: float | None = 1.0
    """Result of the reward function. None: it raises an exception."""

    @property
    def all_steps(self) -> list[Step]:
        """All steps, also those within steps."""
        return list(_walk(self.steps))

    @property
    def leaves_branches(self) -> bool:
        """Whether the agent loop may return while a branch generates, whose turn is then cancelled."""
        return any(
            isinstance(step, LeaveBehind) or (isinstance(step, Together) and not step.is_awaited)
            for step in self.all_steps
        )

    @property
    def is_repeatable(self) -> bool:
        """Whether another run with the same turns has the same tool results, and awaits the same branches."""
        has_clock = any(isinstance(step, Generate) and "clock" in step.calls for step in self.all_steps)
        return not has_clock and not self.leaves_branches

    @property
    def is_sequential(self) -> bool:
        """Whether at most one turn is generated at a time."""
        return not any(isinstance(step, (Together, LeaveBehind)) for step in self.all_steps)


@dataclass(frozen=True)
class Interruption:
    """The end of a run before its sessions have finished."""

    is_kill: bool = False
    """SIGKILL of a child process. Otherwise the run is cancelled in this process."""
    at_event: int = 5
    delay_s: float = 0.0
    """Seconds between the event and the kill."""
    torn_bytes: int = 0
    """Bytes that are cut off from the end of each session's file."""


@dataclass(frozen=True)
class BatchPlan:
    """Sessions that run concurrently in one `RolloutRunner`, which is interrupted and resumed."""

    limits: RolloutLimits
    sessions: tuple[SessionPlan, ...]
    interruptions: tuple[Interruption, ...] = ()
    max_concurrency: int = 8
    update_events: tuple[int, ...] = ()
    """Numbers of the events at which other weights are pushed."""


def _walk(steps: tuple[Step, ...]) -> Iterator[Step]:
    for step in steps:
        yield step
        if isinstance(step, (Fork, NewRoot, LeaveBehind)):
            yield from _walk(step.steps)
        elif isinstance(step, Together):
            for branch in step.branches:
                yield from _walk(branch)


def fork_reason(step: Fork | NewRoot) -> ForkReason:
    """The reason that is recorded for a branch."""
    if isinstance(step, NewRoot):
        return ForkReason.COMPACTED if step.adopt else ForkReason.SUB_AGENT
    return ForkReason.EDITED if step.adopt else ForkReason.SAMPLE
