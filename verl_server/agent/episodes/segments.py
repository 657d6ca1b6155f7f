"""The segments of an episode: the paths that are trained, each with a weight."""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.agent.samples import Segment
from verl_server.errors import BadInputError
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.validation import is_finite_number


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


def require_loss_weight(loss_weight: object) -> float:
    """The weight of a segment. Raises BadInputError unless it is a finite number of at least 0."""
    if not is_finite_number(loss_weight) or loss_weight < 0:
        raise BadInputError(f"the loss_weight of a branch must be a finite number of at least 0, got {loss_weight!r}")
    return float(loss_weight)
