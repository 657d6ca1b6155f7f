"""Reports where a fork of a session diverges from the path that was recorded before. Pure.

Each fork has a reason. `find_divergences` adds the exact position: after how many turns, and at which token the new
path differs from the earlier path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verl_server.trajectory.graph import TrajectoryGraph, require_graph
from verl_server.trajectory.nodes import ForkReason


@dataclass(frozen=True)
class Divergence:
    """The position at which one fork differs from the earlier path."""

    node: int
    """Id of the first node of the new path."""
    original_node: int
    """Id of the node that the parent had as its first child."""
    fork_reason: ForkReason
    num_turns: int
    """Number of sampled turns before the fork."""
    position: int
    """Offset of the first token that differs, counted from the root."""
    original_token: int | None
    """Token id of the earlier path at this position. None if the earlier path ends before it."""
    new_token: int | None
    """Token id of the new node at this position. None if the new node ends before it."""


def find_divergences(graph: TrajectoryGraph) -> list[Divergence]:
    """The divergences of all forks of a session, in the order in which the forks were recorded.

    Raises BadInputError if `graph` is no `TrajectoryGraph`.
    """
    require_graph(graph)
    return list(_iterate_divergences(graph))


def _iterate_divergences(graph: TrajectoryGraph) -> Iterator[Divergence]:
    for node in graph.nodes:
        original = graph.children(node.parent)[0]
        if node.id == original or node.fork_reason is None:
            continue
        num_shared_tokens = 0 if node.parent is None else graph.num_tokens(node.parent)
        old, new = _first_path_below(graph, original), list(node.token_ids)
        offset = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        yield Divergence(
            node=node.id,
            original_node=original,
            fork_reason=node.fork_reason,
            num_turns=0 if node.parent is None else graph.num_turns(node.parent),
            position=num_shared_tokens + offset,
            original_token=old[offset] if offset < len(old) else None,
            new_token=new[offset] if offset < len(new) else None,
        )


def _first_path_below(graph: TrajectoryGraph, node: int) -> list[int]:
    """Token ids of a node and of the path through the first child of each node below it."""
    token_ids: list[int] = []
    current: int | None = node
    while current is not None:
        token_ids.extend(graph.node(current).token_ids)
        children = graph.children(current)
        current = children[0] if children else None
    return token_ids
