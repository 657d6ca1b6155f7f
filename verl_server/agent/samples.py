"""Tasks, turns of the policy, finished samples of tasks, and groups of samples of one task."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pydantic import InstanceOf

from verl_server.config import Name
from verl_server.errors import BadInputError
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.recorder import digest
from verl_server.trajectory.rendering.messages import Message, ParsedToolCall, copy_json, validate_messages
from verl_server.types import Json
from verl_server.validation import check_fields


@check_fields(skip=("messages",))
@dataclass(frozen=True)
class Task:
    """A task for an agent.

    Raises BadInputError for an id that is not a string, and for messages that cannot be rendered and recorded; the
    error names the index of the message.
    """

    id: Name
    """Unique name of the task. Recorded sessions are named after it."""
    messages: Sequence[Message]
    """Messages of the first prompt: dicts with the keys `role` and `content`, of plain JSON values."""
    data: InstanceOf[Mapping[str, Any]] = field(default_factory=dict)
    """Data for tools and rewards, for example the correct answer. The policy does not see it. Only a digest is
    recorded, so the values can be of any type. See `digests` for data that a tool changes."""

    def __post_init__(self) -> None:
        try:
            validate_messages(self.messages)
        except BadInputError as error:
            raise BadInputError(f"the messages of task {self.id!r} are invalid: {error.message}") from None

    @functools.cached_property
    def digests(self) -> Mapping[str, str]:
        """Digests of messages and data, by which a recorded sample is found to be of the same task.

        They are computed at the first use: before the first run with a `run_dir`. Later changes of `data`, for example
        by a tool, do not count. For other data, make another task.
        """
        return {"task.messages": digest(self.messages), "task.data": digest(self.data)}

    def copy(self) -> Self:
        """The task of one sample: a copy of the messages, and a shallow copy of `data`. The digests are the same.

        A key of `data` that the agent loop of one sample sets is not seen by the other samples of its group. Values of
        `data` are shared, for example a list or a client of a service.
        """
        task = copy.copy(self)
        object.__setattr__(task, "messages", copy_json(self.messages))
        if isinstance(self.data, MutableMapping):
            object.__setattr__(task, "data", copy.copy(self.data))
        return task


@dataclass(frozen=True)
class Turn:
    """A turn that the policy generated."""

    text: str
    token_ids: list[int]
    node: int
    """Id of the turn's node in the trajectory graph."""
    finish_reason: str
    """Why sampling ended: the type of SGLang's `finish_reason` (`stop`, `length`, ...)."""
    tool_calls: Sequence[ParsedToolCall] | None = None
    """Tool calls of the turn. None if the renderer does not know the tool tokens of the model family; then the calls
    must be parsed from `raw_text`."""
    raw_text: str = ""
    """Text of the turn with special tokens, which are the tags of calls in some model families, but without the end
    marker of the turn."""
    begins_in_thought: bool = False
    """Whether the prompt ends with `<think>`: the turn begins with the rest of a thought."""


@dataclass(frozen=True)
class Segment:
    """A path of a sample that is trained: from a root to the last node of a branch."""

    leaf: int
    """Id of the last node."""
    loss_weight: float = 1.0
    """Weight of the segment in the loss, as the agent loop set it (`Episode.loss_weight`)."""


@dataclass(frozen=True)
class Sample:
    """A finished episode of a task."""

    task: Task
    """Copy of the task that this sample had for itself, see `Task.copy`."""
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
    """Weighted sum of the rewards. None if there are no rewards, or if the sample failed."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Result of each reward function and metric by its name."""
    times: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Seconds of each phase (`queue`, `setup`, `generate`, `tool`, `reward`) in this process. Concurrent calls are
    summed."""
    tool_counts: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Number of tool calls in this process by names: `NAME/calls` for the calls that have begun, `NAME/errors/TYPE` for
    those of them that failed, and `errors/TYPE` for calls that name no known tool or cannot be parsed. TYPE is a
    `ToolResult.error_type`, or `failed` for a call that ended the sample or one attempt at the sample. A call that is
    cancelled or reaches a limit of its episode has no error."""
    segments: Sequence[Segment] = ()
    """Paths that are trained, for example those before and after a compaction, and those of sub-agents, in the order in
    which their branches were made. Each sampled token is in at least one of them, unless its branch has the weight 0 or
    a later attempt at the sample has left its path. A token that several paths share is trained with the first of these
    paths, with the weight of this path. A path that is the beginning of a later, longer path is a segment of its own
    only if the weights of the two differ."""

    @property
    def paths(self) -> list[tuple[TrajectoryGraph, int]]:
        """The paths of all segments, as `to_batch` takes them. Empty if the sample has no turn."""
        return [(self.graph, segment.leaf) for segment in self.segments]

    @property
    def path(self) -> tuple[TrajectoryGraph, int]:
        """The sample's path, as `to_batch` takes it.

        Raises BadInputError if the sample has no tokens, and if its branches have other trained paths.
        """
        if self.leaf is None:
            cause = self.error or "its agent loop returned without a turn"
            raise BadInputError(
                f"sample {self.index} of task {self.task.id!r} has no tokens: {cause}; leave out such samples: "
                "[sample.path for sample in samples if sample.num_turns]"
            )
        if self.segments and [segment.leaf for segment in self.segments] != [self.leaf]:
            raise BadInputError(
                f"sample {self.index} of task {self.task.id!r} has {len(self.segments)} trained paths, because its "
                "agent loop has branches; pass all of them: [path for sample in samples for path in sample.paths]"
            )
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


def find_finished_sample(task: Task, index: int, graph: TrajectoryGraph, *, with_failed: bool = False) -> Sample | None:
    """The sample of a recorded session. None if the session has no termination.

    Also None if the sample failed, unless `with_failed` is True.
    """
    if not graph.terminations:
        return None
    termination = next(reversed(graph.terminations.values()))
    if termination.stop_reason == "error" and not with_failed:
        return None
    return Sample(
        task,
        index,
        graph,
        termination.node,
        termination.stop_reason,
        termination.error,
        termination.reward,
        termination.rewards,
        segments=tuple(Segment(leaf, weight) for leaf, weight in graph.segments_of(termination)),
    )


# -- Segments ---------------------------------------------------------------------------------------
# The segments of an episode: the paths that are trained, each with a weight.


def find_segments(graph: TrajectoryGraph, ends: Sequence[tuple[int | None, float]]) -> tuple[Segment, ...]:
    """The segments that end at some nodes, each given with its weight, in the order of `ends`.

    A turn of several paths is trained with the first of them. A path without a sampled token, with the weight 0, or
    whose turns are trained with earlier paths is no segment. Nor is a path that later paths continue, if they give each
    turn that it trains the same weight.
    """
    paths: dict[int, tuple[float, list[int]]] = {}
    """Weight and turns with a token of the path to each node."""
    for leaf, weight in ends:
        turns = [node.id for node in graph.path(leaf) if node.sampled and node.token_ids] if leaf is not None else []
        if leaf is not None and weight and turns:
            paths.setdefault(leaf, (weight, turns))
    next_weights: dict[int, float] = {}
    """Weight of each turn in the first of the later paths that contain the turn."""
    needed: dict[int, set[int]] = {}
    """Turns of each path to which no later path gives the same weight."""
    for leaf, (weight, turns) in reversed(paths.items()):
        needed[leaf] = {turn for turn in turns if next_weights.get(turn) != weight}
        next_weights |= dict.fromkeys(turns, weight)
    segments: list[Segment] = []
    trained: set[int] = set()
    for leaf, (weight, turns) in paths.items():
        if needed[leaf] - trained:
            segments.append(Segment(leaf, weight))
            trained.update(turns)
    return tuple(segments)
