"""Finished samples of tasks, and groups of samples of one task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_server.agent.episode import Task
from verl_server.errors import BadInputError
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.types import Json


@dataclass(frozen=True)
class Sample:
    """A finished episode of a task."""

    task: Task
    index: int
    """Number of the sample in its group, from 0."""
    graph: TrajectoryGraph
    leaf: int | None
    """Id of the last node of the sample's path. None if the episode failed before its first prompt."""
    stop_reason: str
    """Why the episode stopped: `done`, the name of a limit in `RolloutLimits`, or `error`."""
    error: Json | None = None
    """Exception of a failed episode as JSON (`verl_server.errors.to_wire`)."""
    reward: float | None = None

    @property
    def path(self) -> tuple[TrajectoryGraph, int]:
        """The sample's path, as `to_batch` takes it. Raises BadInputError if the sample has no tokens."""
        if self.leaf is None:
            raise BadInputError(f"sample {self.index} of task {self.task.id!r} has no tokens: {self.error}")
        return self.graph, self.leaf

    @property
    def text(self) -> str:
        """Text of the last turn on the sample's path, without special tokens. Empty if there is no turn."""
        nodes = [] if self.leaf is None else self.graph.path(self.leaf)
        turns = [node for node in nodes if node.sampled]
        return str((turns[-1].message or {}).get("content", "")) if turns else ""

    @property
    def num_turns(self) -> int:
        """Number of turns that the policy generated on the sample's path."""
        return 0 if self.leaf is None else self.graph.num_turns(self.leaf)


@dataclass(frozen=True)
class SampleGroup:
    """All samples of one task."""

    task: Task
    samples: Sequence[Sample]
