"""The kinds of the conversations in a recorded session. A gateway records them as notes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from verl_server.trajectory.graph import TrajectoryGraph

KIND_NOTE = "conversation"
"""Name of the notes that have the kind of a conversation or of a branch, at its first node."""

SUMMARY_KIND = "summary"
"""Kind of a request for a summary, with which the main agent goes on."""
MAIN_KINDS = frozenset({"main", "compacted", "edited", "other_tools"})
"""Kinds of the conversations and of the branches in which the main agent works."""


def recorded_kinds(graph: TrajectoryGraph) -> dict[int, str]:
    """The recorded kind of each conversation and of each branch, by the id of its first node."""
    return {note.node: str(note.value) for note in graph.notes if note.name == KIND_NOTE and note.node is not None}


def kind_at(graph: TrajectoryGraph, kinds: Mapping[int, str], node: int) -> str | None:
    """The kind of the conversation or branch that a node belongs to. None if it is not known."""
    while (kind := kinds.get(node)) is None:
        parent = graph.node(node).parent
        if parent is None:
            return None
        node = parent
    return kind
