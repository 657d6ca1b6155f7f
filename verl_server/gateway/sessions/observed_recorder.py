"""`ObservedRecorder`: a `Recorder` that tells about the nodes that it adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

from verl_server.trajectory.nodes import Node, NodeFields
from verl_server.trajectory.recorder import Recorder


class ObservedRecorder(Recorder):
    """A `Recorder` that tells about the nodes that it adds."""

    on_node: Callable[[Node], None] | None = None
    """Called with each added node."""

    def add_node(self, parent: int | None, token_ids: Sequence[int], **fields: Unpack[NodeFields]) -> Node:
        """Add a node, write it, and tell about it."""
        node = super().add_node(parent, token_ids, **fields)
        if self.on_node is not None:
            self.on_node(node)
        return node
