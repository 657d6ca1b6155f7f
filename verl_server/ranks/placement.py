"""Placement of the trainer ranks of one engine on nodes: which ranks start a server process. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError
from verl_server.validation import require_whole_number


@dataclass(frozen=True)
class Placement:
    """The role of one trainer rank in starting a server that may span several nodes."""

    node_rank: int
    """Number of this rank's node, from 0."""
    is_node_leader: bool
    """Whether this rank is the first rank of its node, which starts the node's server process."""
    tp_size: int
    """Number of TP ranks of the whole server."""
    ranks_per_node: int
    """Number of TP ranks of the server on each node."""
    nnodes: int
    """Number of nodes that the server spans."""


def compute_placement(rank: int, mesh_size: int, nnodes: int, server_args: Mapping[str, Any]) -> Placement:
    """The placement of trainer rank `rank`, which is between 0 and `mesh_size - 1`.

    The ranks of one node are consecutive. The server's `tp_size` is `mesh_size` unless `server_args` contains it.
    Raises BadInputError if the ranks or the TP ranks cannot be divided evenly among the nodes.
    """
    nnodes = require_whole_number("nnodes", nnodes)
    tp_size = server_args.get("tp_size")
    tp_size = mesh_size if tp_size is None else require_whole_number("tp_size", tp_size)
    if mesh_size % nnodes:
        raise BadInputError(
            f"the {mesh_size} trainer ranks of device_mesh_cpu cannot be divided evenly among nnodes={nnodes} nodes; "
            f"nnodes is the number of machines that one server spans: use 1, or another divisor of {mesh_size}"
        )
    if tp_size % nnodes:
        raise BadInputError(
            f"tp_size={tp_size} cannot be divided evenly among nnodes={nnodes} nodes; use a multiple of {nnodes}"
        )
    trainer_ranks_per_node = mesh_size // nnodes
    return Placement(
        node_rank=rank // trainer_ranks_per_node,
        is_node_leader=rank % trainer_ranks_per_node == 0,
        tp_size=tp_size,
        ranks_per_node=tp_size // nnodes,
        nnodes=nnodes,
    )
