"""Conversion of a session to tensors that contain each node once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.errors import BadInputError
from verl_server.trajectory.batches.routed_experts import ExpertLayout, read_tree_experts
from verl_server.trajectory.batches.rows import loss_weights, token_rewards
from verl_server.trajectory.graph import TrajectoryGraph, require_graph
from verl_server.trajectory.nodes import concatenate_nodes

if TYPE_CHECKING:
    import torch


def to_tree(graph: TrajectoryGraph, *, expert_layout: ExpertLayout | None = None) -> dict[str, torch.Tensor]:
    """Convert all paths of a session to tensors that contain each node once. Shared turns are trained once.

    T is the number of all tokens, N the number of nodes. Fields [T]: `input_ids`, `position_ids` (counted along the
    path), `response_mask`, `rollout_log_probs`, `rm_scores`, `weight_versions`, `node` (id of the token's node), and
    `loss_weight`, the weight of the token in the loss: multiply it with `response_mask`. `parent` [N]: id of the parent
    of each node, -1 for a root. A token must attend to the earlier tokens of its own node and to all tokens of the
    node's ancestors.

    The `loss_weight` of a token is the weight of the first trained segment (`TrajectoryGraph.trained_segments`) that
    contains the token: `to_batch` trains a token that several segments have in common in the row of the first of them.
    A token in no trained segment has the weight 0. All tokens have the weight 1 if the session has not finished.

    Sessions with routed experts need `expert_layout`, see `to_batch`. `routed_experts` are then [T, L, K]. A token that
    several turns have read has the experts of the first recorded of them. Raises BadInputError if `graph` is no
    `TrajectoryGraph`, has images, or has routed experts that `to_batch` refuses.
    """
    import torch

    require_graph(graph)
    if any(map(graph.images, graph.leaves)):
        raise BadInputError("to_tree cannot convert a session with images; pass its paths to to_batch or to_packed")
    experts = read_tree_experts(graph, expert_layout)
    sequence, weights = concatenate_nodes(graph.nodes), loss_weights(graph)
    positions: list[int] = []
    for node in graph.nodes:
        end = graph.num_tokens(node.id)
        positions += range(end - len(node.token_ids), end)
    tree = {
        "input_ids": torch.tensor(sequence.token_ids),
        "position_ids": torch.tensor(positions),
        "response_mask": torch.tensor(sequence.loss_mask),
        "rollout_log_probs": torch.tensor(sequence.logprobs),
        "rm_scores": torch.tensor(token_rewards(graph, graph.nodes)),
        "weight_versions": torch.tensor(sequence.weight_versions),
        "loss_weight": torch.tensor([weights[node] for node in sequence.node_ids], dtype=torch.float32),
        "node": torch.tensor(sequence.node_ids),
        "parent": torch.tensor([-1 if node.parent is None else node.parent for node in graph.nodes]),
    }
    return tree if experts is None else tree | {"routed_experts": experts}
