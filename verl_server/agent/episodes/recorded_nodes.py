"""Nodes that an episode finds in its record: branches share prompts, and turns of an earlier process are replayed."""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.nodes import Node
from verl_server.trajectory.rendering.messages import image_sources
from verl_server.types import Json


class RecordedNodes:
    """Finds nodes in the graph of an episode. The nodes that the graph contains now were recorded before."""

    def __init__(self, graph: TrajectoryGraph) -> None:
        self._graph = graph
        self._num_recorded_nodes = len(graph.nodes)
        """Number of nodes that the record contained at the start."""
        self._replayed_nodes: set[int] = set()
        """Ids of recorded turns that were replayed. A turn is replayed once."""
        self._contexts = dict[tuple[int | None, tuple[int, ...]], list[Node]]()
        """The nodes that the policy did not sample, by their parents and their tokens."""
        self._num_indexed_nodes = 0
        """Number of nodes of the graph that were looked at for `_contexts`."""

    def find_context(
        self, parent: int | None, branch: str, token_ids: Sequence[int], message: Json, tools_digest: str | None
    ) -> Node | None:
        """The child of `parent` with these tokens that the policy did not sample, or None. Branches share it.

        A first prompt that the branch had recorded before this episode started is also found by its messages and tools:
        a chat template may write the present date. Earlier versions have not recorded the tools.
        """
        images = _images_of(message)
        for node in self._contexts_of(parent, tuple(token_ids)):
            if _images_of(node.message or {}) == images:  # an image is one placeholder
                return node
        if parent is not None or not self._num_recorded_nodes:
            return None
        for node in map(self._graph.node, self._graph.children(None)):
            has_same_tools = node.tools_digest in (None, tools_digest)
            is_recorded = node.id < self._num_recorded_nodes and node.branch == branch and not node.sampled
            if is_recorded and has_same_tools and node.message == message:
                return node
        return None

    def _contexts_of(self, parent: int | None, token_ids: tuple[int, ...]) -> list[Node]:
        """The children of `parent` with these tokens. The work does not grow with the number of children."""
        for node in self._graph.nodes[self._num_indexed_nodes :]:
            if not node.sampled:
                self._contexts.setdefault((node.parent, node.token_ids), []).append(node)
        self._num_indexed_nodes = len(self._graph.nodes)
        return self._contexts.get((parent, token_ids), [])

    def take_recorded_turn(self, parent: int, branch: str) -> Node | None:
        """The next turn of a branch that was recorded after `parent` before this episode started, or None.

        Each turn is taken once.
        """
        for child in self._graph.children(parent):
            node = self._graph.node(child)
            can_replay = child < self._num_recorded_nodes and child not in self._replayed_nodes
            if can_replay and node.sampled and node.branch == branch:
                self._replayed_nodes.add(child)
                return node
        return None


def _images_of(message: Json) -> list[str]:
    return [source for item in message.get("messages", ()) for source in image_sources(item)]
