"""The rows of a batch: its paths, which of their tokens are trained, and the reward of each token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verl_server.errors import BadInputError
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.nodes import NO_VERSION, Node, TokenSequence
from verl_server.validation import is_whole_number

GraphPath = tuple[TrajectoryGraph, int]
"""A session, and the id of the last node of one of its paths."""


PATHS = "[sample.path for sample in samples]"
"""The list of paths that a batch needs, for errors."""
FAILED = "failed samples: [sample.path for sample in samples if sample.error is None]"
"""How failed samples are left out, for errors."""
SET_REWARD = "sample.graph.set_rewards(sample.leaf, [-1.0])"
"""How a sample gets a reward, for errors."""


@dataclass(frozen=True)
class Row:
    """One path of a batch."""

    graph: TrajectoryGraph
    leaf: int
    """Id of the last node of the path."""
    sequence: TokenSequence
    rewards: list[float]
    """Reward of each token."""
    images: list[str]
    """Images of the path in their order."""
    loss_weight: float
    """Weight of the path in the loss."""

    @property
    def prompt_length(self) -> int:
        return self.sequence.prompt_length

    @property
    def length(self) -> int:
        return len(self.sequence.token_ids)


def make_rows(paths: Iterable[GraphPath]) -> list[Row]:
    """The rows of a batch. Raises BadInputError if they cannot be one batch, see `to_batch`."""
    if not isinstance(paths, Iterable) or _is_path(paths):
        problem = "got one path; pass [path]" if _is_path(paths) else f"got {type(paths).__name__}; pass {PATHS}"
        raise BadInputError(f"a batch needs a list of paths, {problem}")
    checked = list(paths)
    if not checked:
        raise BadInputError("a batch needs at least one path")
    for index, path in enumerate(checked):
        if not _is_path(path):
            got = type(path).__name__
            raise BadInputError(
                f"path {index} must be a tuple of a graph and the id of a node, got {got}; pass {PATHS}"
            )
    has_reward = [any(node.id in graph.rewards for node in graph.path(leaf)) for graph, leaf in checked]
    for index, (graph, leaf) in enumerate(checked):
        session, termination = f"(session {graph.session_id!r})", graph.terminations.get(leaf)
        is_failed = termination is not None and termination.stop_reason == "error"
        if is_failed and not has_reward[index]:
            raise BadInputError(
                f"path {index} is of a failed sample {session} without a reward; leave out {FAILED}, or give each of "
                f"them a reward: {SET_REWARD}"
            )
        if is_failed and not graph.num_sampled_tokens(leaf):
            raise BadInputError(
                f"path {index} is of a failed sample {session} without a sampled token, so there is nothing to train; "
                "leave out such samples: [sample.path for sample in samples if sample.num_turns]"
            )
        if any(has_reward) and not has_reward[index]:
            raise BadInputError(
                f"path {index} {session} has no reward, but other paths have rewards; set its reward: {SET_REWARD}, or "
                f"leave out {FAILED}"
            )
        if (node := _node_with_lost_reward(graph, leaf)) is not None:
            raise BadInputError(
                f"path {index} {session} has a reward at node {node}, before its first sampled token, so the reward "
                f"would be lost; set the reward on a turn: {SET_REWARD}"
            )
    rows, seen = [], _SeenNodes()
    weights = {key: loss_weights(graph) for key, graph in {id(graph): graph for graph, _ in checked}.items()}
    for index, (graph, leaf) in enumerate(checked):
        shared = seen.add(graph, leaf)
        if shared and not any(node.sampled and node.token_ids for node in graph.path(leaf) if node.id not in shared):
            raise BadInputError(
                f"path {index} (session {graph.session_id!r}) is the beginning of an earlier path of the batch, so it "
                "has no token of its own; pass sample.paths, which leaves out such paths"
            )
        rows.append(_make_row(graph, leaf, shared, weights[id(graph)][leaf]))
    return rows


class _SeenNodes:
    """The nodes of the paths of a batch so far."""

    def __init__(self) -> None:
        self._nodes: dict[int, set[int]] = {}
        self._leaves: set[tuple[int, int]] = set()

    def add(self, graph: TrajectoryGraph, leaf: int) -> set[int]:
        """Add a path. Returns its nodes that are also in earlier paths, unless it is equal to one of them."""
        seen, path = self._nodes.setdefault(id(graph), set()), {node.id for node in graph.path(leaf)}
        shared = set() if (id(graph), leaf) in self._leaves else seen & path
        self._leaves.add((id(graph), leaf))
        seen |= path
        return shared


def _make_row(graph: TrajectoryGraph, leaf: int, shared: set[int], loss_weight: float) -> Row:
    """The row of a path, in which the tokens of the nodes `shared` are not trained and have no reward."""
    path = graph.path(leaf)
    sequence, rewards = graph.token_sequence(leaf), token_rewards(graph, path)
    if shared:
        beginning = [node for node in path if node.id in shared]
        length = sum(len(node.token_ids) for node in beginning)
        sequence = dataclasses.replace(
            sequence,
            loss_mask=[0] * length + sequence.loss_mask[length:],
            logprobs=[0.0] * length + sequence.logprobs[length:],
            weight_versions=[NO_VERSION] * length + sequence.weight_versions[length:],
        )
        # A reward of this path alone may belong to a token that is trained in another row or not at all.
        first = sequence.loss_mask.index(1)
        moved = sum(rewards[:first]) - sum(token_rewards(graph, beginning))
        rewards = [0.0] * first + [rewards[first] + moved] + rewards[first + 1 :]
    return Row(graph, leaf, sequence, rewards, graph.images(leaf), loss_weight)


def _is_path(value: object) -> bool:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return isinstance(value[0], TrajectoryGraph) and is_whole_number(value[1])


def _node_with_lost_reward(graph: TrajectoryGraph, leaf: int) -> int | None:
    """The first node with a reward before the first sampled token of a path. None for a path without such tokens."""
    first: int | None = None
    for node in graph.path(leaf):
        if node.sampled and node.token_ids:
            return first
        if first is None and node.id in graph.rewards:
            first = node.id
    return None


def token_rewards(graph: TrajectoryGraph, nodes: Sequence[Node]) -> list[float]:
    """The reward of each token of `nodes`, in which each node follows its parent.

    A reward of a whole node belongs to its last token. If the policy did not sample the node, for example because the
    episode reached a limit after the result of a tool, the reward belongs to the last sampled token before the node.
    """
    rewards: list[float] = []
    last_sampled: dict[int | None, int] = {}
    """Position of the last sampled token on the path to each node."""
    for node in nodes:
        values, count = graph.rewards.get(node.id, []), len(node.token_ids)
        has_token_values = len(values) == count and (node.sampled or count > 1)
        rewards += values if has_token_values else [0.0] * count
        if node.sampled and count:
            last_sampled[node.id] = len(rewards) - 1
        elif node.parent in last_sampled:
            last_sampled[node.id] = last_sampled[node.parent]
        position = last_sampled.get(node.id, len(rewards) - 1 if count else None)
        if values and not has_token_values and position is not None:
            rewards[position] += values[0]
    return rewards


def loss_weights(graph: TrajectoryGraph) -> list[float]:
    """The weight of each node in the loss: that of the first trained segment that contains the node, else 0.

    All nodes have the weight 1 if the session has not finished.
    """
    segments = graph.trained_segments
    if segments is None:
        return [1.0] * len(graph.nodes)
    weights: dict[int, float] = {}
    for leaf, weight in segments:
        for node in graph.path(leaf):
            weights.setdefault(node.id, weight)
    return [weights.get(node.id, 0.0) for node in graph.nodes]
