"""The paths of a session that an export contains, and the links between these paths. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verl_server.trajectory.conversations import MAIN_KINDS, SUMMARY_KIND, recorded_kinds
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

    The record of a gateway has the kinds of the conversations. Other records have the branches of an episode.
    """
    kinds = recorded_kinds(graph)
    links = _links_of_conversations(graph, kinds, node_ids) if kinds else _links_of_branches(graph, node_ids)
    return list(links)


def _links_of_conversations(graph: TrajectoryGraph, kinds: Mapping[int, str], node_ids: set[int]) -> Iterator[PathLink]:
    """A compacted conversation continues the last summary, unless an earlier conversation has continued the summary.

    Without such a summary, and for a sub-agent: the source is the last turn of the main agent before the conversation.
    """
    main_nodes = set[int]()
    last_turn: int | None = None
    last_summary: int | None = None
    for node in graph.nodes:
        kind = kinds.get(node.id)
        if node.parent is None and kind in LINKING_REASONS:
            source = last_turn
            if kind == ForkReason.COMPACTED and last_summary is not None:
                source, last_summary = last_summary, None
            if source is not None and node.id in node_ids:
                yield PathLink(source, node.id, ForkReason(kind))
        is_first_of_main = node.parent is None and kind is not None
        if (is_first_of_main or node.parent in main_nodes) and (kind is None or kind in MAIN_KINDS):
            main_nodes.add(node.id)
        if node.sampled and node.parent is not None and node.id in node_ids:
            last_turn = node.id if node.id in main_nodes else last_turn
            is_summary = kinds.get(node.parent) == SUMMARY_KIND and node.id not in kinds  # no sample beside the summary
            last_summary = node.id if is_summary else last_summary


def _links_of_branches(graph: TrajectoryGraph, node_ids: set[int]) -> Iterator[PathLink]:
    """The source of a link can be on the branch of its target: a branch that adopts a compacted path keeps its name."""
    for node_id in sorted(node_ids):
        node = graph.node(node_id)
        if node.fork_reason in LINKING_REASONS:
            source = _find_source(graph, node_id, node_ids)
            if source is not None:
                yield PathLink(source, node_id, node.fork_reason)


def _find_source(graph: TrajectoryGraph, target: int, node_ids: set[int]) -> int | None:
    """The last turn before `target` on its branch, which has adopted the new path, or on the branch that made it."""
    branch = graph.node(target).branch
    for name in (branch, branch.rpartition(".")[0]):
        for node in reversed(graph.nodes[:target]):
            if node.sampled and node.branch == name and node.id in node_ids:
                return node.id
    return None
