"""Which trainer rank starts a server, with which arguments. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError


@dataclass(frozen=True)
class Placement:
    """The part of one trainer rank in a server that may span nodes."""

    node_rank: int
    is_node_leader: bool
    """The first rank of each node starts its node's server process."""
    tp_size: int
    ranks_per_node: int
    """TP ranks of the server on each node."""
    nnodes: int


def place(rank: int, mesh_size: int, nnodes: int, server_args: Mapping[str, Any]) -> Placement:
    """The placement of `rank` (0 to mesh_size - 1, ranks of a node are neighbours).

    The server's `tp_size` is that of the mesh unless given. Raises BadInputError for sizes that do not fit.
    """
    if not isinstance(nnodes, int) or isinstance(nnodes, bool) or nnodes < 1:
        raise BadInputError(f"nnodes must be a whole number of at least 1, got {nnodes!r}")
    if mesh_size % nnodes:
        raise BadInputError(f"{mesh_size} trainer ranks cannot be spread evenly over {nnodes} nodes")
    tp_size = server_args.get("tp_size", mesh_size)
    if not isinstance(tp_size, int) or isinstance(tp_size, bool) or tp_size < 1:
        raise BadInputError(f"tp_size must be a whole number of at least 1, got {tp_size!r}")
    if tp_size % nnodes:
        raise BadInputError(f"tp_size {tp_size} cannot be spread evenly over {nnodes} nodes")
    per_node = mesh_size // nnodes
    return Placement(
        node_rank=rank // per_node,
        is_node_leader=rank % per_node == 0,
        tp_size=tp_size,
        ranks_per_node=tp_size // nnodes,
        nnodes=nnodes,
    )
