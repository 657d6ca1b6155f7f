"""The paths of a session that an export contains, and the links between these paths. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.nodes import ForkReason
from verl_server.trajectory.termination import Termination

LINKING_REASONS = (ForkReason.COMPACTED, ForkReason.SUB_AGENT)
"""Fork reasons that exports write as links between paths."""


@dataclass(frozen=True)
class ExportedPaths:
    """The paths of a session that an export contains."""

    ends: list[tuple[int, float]]
    """Last node and weight in the loss of each path."""
    are_trained: bool
    """Whether the paths are trained. False for unfinished sessions and for samples without a turn."""
    termination: Termination | None
    """Last termination of the session. None if the session is unfinished."""


@dataclass(frozen=True)
class PathLink:
    """A path that continues another path with a compacted history, or that a sub-agent of another path made."""

    source: int
    """Last turn of the other path before the link. A node id."""
    target: int
    """First node of the new path. A node id."""
    reason: ForkReason


def find_exported_paths(graph: TrajectoryGraph) -> ExportedPaths:
    """The trained paths of the last termination.

    Without trained paths: the path of the termination. Without a termination: the paths to all leaves.
    """
    termination = graph.last_termination
    if termination is None:
        return ExportedPaths([(leaf, 0.0) for leaf in graph.leaves], False, None)
    ends = list(dict(graph.trained_segments or ()).items())
    return ExportedPaths(ends or [(termination.node, 0.0)], bool(ends), termination)


def find_links(graph: TrajectoryGraph, node_ids: set[int]) -> list[PathLink]:
    """The links between the exported nodes `node_ids`, in the order of their targets.

    A branch that adopts a compacted path keeps its name, so the source of a link can be on the branch of its target.
    """
    links = []
    for node_id in sorted(node_ids):
        node = graph.node(node_id)
        if node.fork_reason in LINKING_REASONS:
            source = _find_source(graph, node_id, node_ids)
            if source is not None:
                links.append(PathLink(source, node_id, node.fork_reason))
    return links


def _find_source(graph: TrajectoryGraph, target: int, node_ids: set[int]) -> int | None:
    """The last turn before `target` on its branch, which has adopted the new path, or on the branch that made it."""
    branch = graph.node(target).branch
    for name in (branch, branch.rpartition(".")[0]):
        for node in reversed(graph.nodes[:target]):
            if node.sampled and node.branch == name and node.id in node_ids:
                return node.id
    return None
