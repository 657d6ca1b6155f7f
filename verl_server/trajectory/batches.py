"""Conversion of recorded paths to the tensors that trainers take.

Shapes: B is the number of paths, P the number of tokens of the longest prompt, R that of the longest response, T the
number of all tokens, L the number of layers, K the number of experts per token. `to_batch` can set P and R. Fields and
padding follow verl's `DataProto`: prompts are padded on the left, responses on the right. The response of a path
contains all tokens after its first prompt: sampled tokens (mask 1) and tokens from tools and messages (mask 0).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_server.config import NotNegativeInt, PositiveInt
from verl_server.errors import BadInputError
from verl_server.trajectory.graph import NO_VERSION, Node, TokenSequence, TrajectoryGraph, concatenate_nodes
from verl_server.trajectory.rendering.vision import VisionInputs, require_vision_inputs
from verl_server.trajectory.routed_experts import ExpertLayout, read_experts, read_tree_experts
from verl_server.validation import check_arguments, is_whole_number

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


# -- Rows -------------------------------------------------------------------------------------------
# The rows of a batch: its paths, which of their tokens are trained, and the reward of each token.

GraphPath = tuple[TrajectoryGraph, int]
"""A session, and the id of the last node of one of its paths."""


FAILED = "failed samples: [sample.path for sample in samples if sample.error is None]"
"""How failed samples are left out, for errors."""
SET_REWARD = "sample.graph.set_rewards(sample.leaf, [-1.0])"
"""How a sample gets a reward, for errors."""


@dataclass(frozen=True)
class Row:
    """One path of a batch."""

    graph: TrajectoryGraph
    leaf: int
    """Id of the last node of the path."""
    sequence: TokenSequence
    rewards: list[float]
    """Reward of each token."""
    images: list[str]
    """Images of the path in their order."""
    loss_weight: float
    """Weight of the path in the loss."""

    @property
    def prompt_length(self) -> int:
        return self.sequence.prompt_length

    @property
    def length(self) -> int:
        return len(self.sequence.token_ids)


def make_rows(paths: Iterable[GraphPath]) -> list[Row]:
    """The rows of a batch. Raises BadInputError if they cannot be one batch, see `to_batch`."""
    checked = list(paths) if isinstance(paths, Iterable) else [paths]
    if not checked:
        raise BadInputError("a batch needs at least one path")
    for index, path in enumerate(checked):
        if not _is_path(path):
            raise BadInputError(
                f"path {index} must be a tuple of a graph and the id of a node, got {type(path).__name__}; pass "
                "[sample.path for sample in samples]"
            )
    has_reward = [any(node.id in graph.rewards for node in graph.path(leaf)) for graph, leaf in checked]
    for index, (graph, leaf) in enumerate(checked):
        session, termination = f"(session {graph.session_id!r})", graph.terminations.get(leaf)
        is_failed = termination is not None and termination.stop_reason == "error"
        if is_failed and not has_reward[index]:
            raise BadInputError(
                f"path {index} is of a failed sample {session} without a reward; leave out {FAILED}, or give each of "
                f"them a reward: {SET_REWARD}"
            )
        if is_failed and not graph.num_sampled_tokens(leaf):
            raise BadInputError(
                f"path {index} is of a failed sample {session} without a sampled token, so there is nothing to train; "
                "leave out such samples: [sample.path for sample in samples if sample.num_turns]"
            )
        if any(has_reward) and not has_reward[index]:
            raise BadInputError(
                f"path {index} {session} has no reward, but other paths have rewards; set its reward: {SET_REWARD}, or "
                f"leave out {FAILED}"
            )
        if (node := _node_with_lost_reward(graph, leaf)) is not None:
            raise BadInputError(
                f"path {index} {session} has a reward at node {node}, before its first sampled token, so the reward "
                f"would be lost; set the reward on a turn: {SET_REWARD}"
            )
    rows, leaves = [], set[tuple[int, int]]()
    seen: dict[int, set[int]] = {}
    """Ids of the nodes in the paths so far, by the `id` of the graph."""
    weights = {key: loss_weights(graph) for key, graph in {id(graph): graph for graph, _ in checked}.items()}
    for index, (graph, leaf) in enumerate(checked):
        of_graph, path_ids = seen.setdefault(id(graph), set()), {node.id for node in graph.path(leaf)}
        shared = set() if (id(graph), leaf) in leaves else of_graph & path_ids  # a path may be given twice
        leaves.add((id(graph), leaf))
        of_graph |= path_ids
        if shared and not any(node.sampled and node.token_ids for node in graph.path(leaf) if node.id not in shared):
            raise BadInputError(
                f"path {index} (session {graph.session_id!r}) is the beginning of an earlier path of the batch, so it "
                "has no token of its own; pass sample.paths, which leaves out such paths"
            )
        rows.append(_make_row(graph, leaf, shared, weights[id(graph)][leaf]))
    return rows


def _make_row(graph: TrajectoryGraph, leaf: int, shared: set[int], loss_weight: float) -> Row:
    """The row of a path, in which the tokens of the nodes `shared` are not trained and have no reward."""
    path = graph.path(leaf)
    sequence, rewards = graph.token_sequence(leaf), token_rewards(graph, path)
    if shared:
        beginning = [node for node in path if node.id in shared]
        length = sum(len(node.token_ids) for node in beginning)
        sequence = dataclasses.replace(
            sequence,
            loss_mask=[0] * length + sequence.loss_mask[length:],
            logprobs=[0.0] * length + sequence.logprobs[length:],
            weight_versions=[NO_VERSION] * length + sequence.weight_versions[length:],
            temperatures=[1.0] * length + sequence.temperatures[length:],
        )
        # A reward of this path alone may belong to a token that is trained in another row or not at all.
        first = sequence.loss_mask.index(1)
        moved = sum(rewards[:first]) - sum(token_rewards(graph, beginning))
        rewards = [0.0] * first + [rewards[first] + moved] + rewards[first + 1 :]
    return Row(graph, leaf, sequence, rewards, graph.images(leaf), loss_weight)


def _is_path(value: object) -> bool:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return isinstance(value[0], TrajectoryGraph) and is_whole_number(value[1])


def _node_with_lost_reward(graph: TrajectoryGraph, leaf: int) -> int | None:
    """The first node with a reward before the first sampled token of a path. None for a path without such tokens."""
    first: int | None = None
    for node in graph.path(leaf):
        if node.sampled and node.token_ids:
            return first
        if first is None and node.id in graph.rewards:
            first = node.id
    return None


def token_rewards(graph: TrajectoryGraph, nodes: Sequence[Node]) -> list[float]:
    """The reward of each token of `nodes`, in which each node follows its parent.

    A reward of a whole node belongs to its last token. If the policy did not sample the node, for example because the
    episode reached a limit after the result of a tool, the reward belongs to the last sampled token before the node.
    """
    rewards: list[float] = []
    last_sampled: dict[int | None, int] = {}
    """Position of the last sampled token on the path to each node."""
    for node in nodes:
        values, count = graph.rewards.get(node.id, []), len(node.token_ids)
        has_token_values = len(values) == count and (node.sampled or count > 1)
        rewards += values if has_token_values else [0.0] * count
        if node.sampled and count:
            last_sampled[node.id] = len(rewards) - 1
        elif node.parent in last_sampled:
            last_sampled[node.id] = last_sampled[node.parent]
        position = last_sampled.get(node.id, len(rewards) - 1 if count else None)
        if values and not has_token_values and position is not None:
            rewards[position] += values[0]
    return rewards


def loss_weights(graph: TrajectoryGraph) -> list[float]:
    """The weight of each node in the loss: that of the first trained segment that contains the node, else 0.

    All nodes have the weight 1 if the session has not finished.
    """
    segments = graph.trained_segments
    if segments is None:
        return [1.0] * len(graph.nodes)
    weights: dict[int, float] = {}
    for leaf, weight in segments:
        for node in graph.path(leaf):
            weights.setdefault(node.id, weight)
    return [weights.get(node.id, 0.0) for node in graph.nodes]


# -- Conversion -------------------------------------------------------------------------------------


@check_arguments(skip=("paths",))
def to_batch(
    paths: Iterable[GraphPath],
    pad_token_id: NotNegativeInt,
    *,
    vision: VisionInputs | None = None,
    expert_layout: ExpertLayout | None = None,
    prompt_length: PositiveInt | None = None,
    response_length: PositiveInt | None = None,
) -> TensorDict:
    """Convert paths to padded tensors with B rows.

    `prompts` [B, P]; `responses`, `response_mask`, `rollout_log_probs`, `temperature`, `rm_scores`, `weight_versions`
    [B, R]; `input_ids`, `attention_mask`, `position_ids` [B, P + R]; `loss_weight` [B]. `temperature` is the one that
    the log prob contains. Masked positions have log prob 0, temperature 1, score 0 and weight version `NO_VERSION`
    (-1). A reward per token is stored at its token. A reward of a whole node is
    stored at the last token of the node, or at the last sampled token before a node that the policy did not sample. A
    path without a sampled token has no response: its row is masked, and its reward is in no score. Tokens that several
    paths of one session have in common, for example before a fork, are trained in the row of the first of these paths
    only: in later rows they belong to the prompt.

    `loss_weight` is the weight of the path in the loss: multiply the row's `response_mask` with it. It is the weight of
    the first trained segment (`TrajectoryGraph.trained_segments`) that contains the last node of the path, as in
    `to_tree`. So it is 0 for a path that the agent loop excluded from training. It is 1 if the session has not
    finished.

    Paths with images need `vision`. `position_ids` are then [B, 3, P + R], and `multi_modal_inputs` has one dict for
    each row, with `pixel_values` and `image_grid_thw` if the row has images.

    Paths with routed experts need `expert_layout`. `routed_experts` [B, P + R, L, K] then contains, for each token and
    layer, the ids of the experts that processed the token as an input. If several turns of the path have processed the
    token, the ids are those of the first of these turns. The ids are 0 for padding, and for tokens that were never an
    input: the last sampled token of the path and all later tokens. The dtype is uint8, or int16 if an id is above 255.

    `prompt_length` and `response_length` set P and R, for trainers that need equal shapes on all ranks. None is the
    longest prompt or the longest response of the batch. Longer paths are refused and never cut off.

    `rm_scores` are 0 everywhere if no path has a reward: the trainer then computes its own rewards. Raises
    BadInputError if there are no paths, for a prompt or a response that is longer than its fixed length, for a value
    that is no path, for an unknown node, for the path of a failed sample without a sampled token or without a reward
    (see `TrajectoryGraph.set_rewards`), for a path without a reward beside paths with rewards, for a reward before the
    first sampled token of a path, for a path that is the beginning of an earlier path, for a `pad_token_id` that is no
    token id, for paths with routed experts beside paths without, and for routed experts that do not fit to
    `expert_layout` or to the tokens.
    """
    import torch
    from tensordict import TensorDict

    rows, experts = _read(paths, vision, expert_layout)
    prompt_width = _width("prompt", prompt_length, rows, [row.prompt_length for row in rows])
    width = _width("response", response_length, rows, [row.length - row.prompt_length for row in rows])
    fields = _input_fields(rows, prompt_width, width, pad_token_id) | _response_fields(rows, width)
    fields["loss_weight"] = torch.tensor([row.loss_weight for row in rows])
    if experts:
        fields["routed_experts"] = _pad_experts(experts, fields["attention_mask"])
    batch = TensorDict(fields, batch_size=[len(rows)])
    if vision is not None:
        vision.add_padded(batch, [(row.sequence.token_ids, row.images) for row in rows])
    return batch


@check_arguments(skip=("paths",))
def to_packed(
    paths: Iterable[GraphPath], *, vision: VisionInputs | None = None, expert_layout: ExpertLayout | None = None
) -> dict[str, torch.Tensor]:
    """Convert paths to tensors without padding, one path after the other.

    The fields `input_ids`, `position_ids`, `response_mask`, `rollout_log_probs`, `temperature`, `rm_scores`,
    `weight_versions` and `loss_weight` (see `to_batch`) have the shape [T]. `cu_seqlens` [B + 1] (int32) has the
    offsets of the paths. Raises BadInputError for the same paths as `to_batch`. With `vision`, `position_ids` are [4,
    T], and `pixel_values` and `image_grid_thw` have the images of all paths, one after the other. With `expert_layout`,
    `routed_experts` are [T, L, K].
    """
    import torch

    rows, experts = _read(paths, vision, expert_layout)
    lengths = [row.length for row in rows]
    fields = {
        "input_ids": torch.tensor([token for row in rows for token in row.sequence.token_ids]),
        "position_ids": torch.tensor([position for length in lengths for position in range(length)]),
        "response_mask": torch.tensor([bit for row in rows for bit in row.sequence.loss_mask]),
        "rollout_log_probs": torch.tensor([logprob for row in rows for logprob in row.sequence.logprobs]),
        "temperature": torch.tensor([value for row in rows for value in row.sequence.temperatures]),
        "rm_scores": torch.tensor([reward for row in rows for reward in row.rewards]),
        "weight_versions": torch.tensor([version for row in rows for version in row.sequence.weight_versions]),
        "loss_weight": torch.tensor([row.loss_weight for row in rows for _ in range(row.length)]),
        "cu_seqlens": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32),
    }
    if experts:
        fields["routed_experts"] = torch.cat(experts)
    return fields | ({} if vision is None else vision.packed([(row.sequence.token_ids, row.images) for row in rows]))


def _width(part: str, width: int | None, rows: Sequence[Row], lengths: Sequence[int]) -> int:
    """P or R: `width`, or the longest of `lengths`, those of the prompts or of the responses of `rows`.

    Raises BadInputError that names the longest row if it does not fit into `width`.
    """
    longest = max(lengths)
    if width is None:
        return longest
    if longest > width:
        index = lengths.index(longest)
        raise BadInputError(
            f"the {part} of path {index} (session {rows[index].graph.session_id!r}) has {longest} tokens, but "
            f"{part}_length is {width}; pass {part}_length={longest} or more, on all ranks, or leave out such paths",
            argument=f"{part}_length",
        )
    return width


def _input_fields(rows: Sequence[Row], prompt_width: int, width: int, pad: int) -> dict[str, torch.Tensor]:
    """The token ids [B, P + R], also of the prompts and of the responses alone, their mask and their positions."""
    import torch

    input_ids = torch.full((len(rows), prompt_width + width), pad)
    attention_mask = _zeros(rows, prompt_width + width)
    for index, row in enumerate(rows):
        start = prompt_width - row.prompt_length
        input_ids[index, start : start + row.length] = torch.tensor(row.sequence.token_ids)
        attention_mask[index, start : start + row.length] = 1
    return {
        "prompts": input_ids[:, :prompt_width].clone(),
        "responses": input_ids[:, prompt_width:].clone(),
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
    }


def _response_fields(rows: Sequence[Row], width: int) -> dict[str, torch.Tensor]:
    """The fields [B, R] of the responses, padded on the right to `width` tokens."""
    import torch

    fields = {
        "response_mask": _zeros(rows, width),
        "rollout_log_probs": _zeros(rows, width).float(),
        "temperature": torch.ones((len(rows), width)),
        "rm_scores": _zeros(rows, width).float(),
        "weight_versions": torch.full((len(rows), width), NO_VERSION),
    }
    for index, row in enumerate(rows):
        sequence = row.sequence
        columns: list[Sequence[Any]] = [
            sequence.loss_mask, sequence.logprobs, sequence.temperatures, row.rewards, sequence.weight_versions
        ]  # fmt: skip
        for field, values in zip(fields.values(), columns, strict=True):
            response = values[row.prompt_length :]
            field[index, : len(response)] = torch.tensor(response, dtype=field.dtype)
    return fields


def _read(
    paths: Iterable[GraphPath], vision: VisionInputs | None, layout: ExpertLayout | None
) -> tuple[list[Row], list[torch.Tensor]]:
    """The rows of a batch, and their routed experts if they have some. Raises BadInputError, see `to_batch`."""
    rows = make_rows(paths)
    require_vision_inputs(vision, [len(row.images) for row in rows])
    return rows, read_experts([(row.graph, row.leaf) for row in rows], layout)


def _pad_experts(experts: Sequence[torch.Tensor], attention_mask: torch.Tensor) -> torch.Tensor:
    """The experts [B, P + R, L, K] of the rows, with 0 for padding."""
    import torch

    padded = torch.zeros((*attention_mask.shape, *experts[0].shape[1:]), dtype=experts[0].dtype)
    padded[attention_mask.bool()] = torch.cat(list(experts))
    return padded


def _zeros(rows: Sequence[Row], width: int) -> torch.Tensor:
    import torch

    return torch.zeros((len(rows), width), dtype=torch.long)


# -- Tree -------------------------------------------------------------------------------------------
# Conversion of a session to tensors that contain each node once.


@check_arguments()
def to_tree(graph: TrajectoryGraph, *, expert_layout: ExpertLayout | None = None) -> dict[str, torch.Tensor]:
    """Convert all paths of a session to tensors that contain each node once. Shared turns are trained once.

    T is the number of all tokens, N the number of nodes. Fields [T]: `input_ids`, `position_ids` (counted along the
    path), `response_mask`, `rollout_log_probs`, `temperature`, `rm_scores`, `weight_versions`, `node` (id of the
    token's node), and `loss_weight`, the weight of the token in the loss: multiply it with `response_mask`. `parent`
    [N]: id of the parent of each node, -1 for a root. A token must attend to the earlier tokens of its own node and to
    all tokens of the node's ancestors.

    The `loss_weight` of a token is the weight of the first trained segment (`TrajectoryGraph.trained_segments`) that
    contains the token: `to_batch` trains a token that several segments have in common in the row of the first of them.
    A token in no trained segment has the weight 0. All tokens have the weight 1 if the session has not finished.

    Sessions with routed experts need `expert_layout`, see `to_batch`. `routed_experts` are then [T, L, K]. A token that
    several turns have read has the experts of the first recorded of them. Raises BadInputError if `graph` is no
    `TrajectoryGraph`, has images, or has routed experts that `to_batch` refuses.
    """
    import torch

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
        "temperature": torch.tensor(sequence.temperatures),
        "rm_scores": torch.tensor(token_rewards(graph, graph.nodes)),
        "weight_versions": torch.tensor(sequence.weight_versions),
        "loss_weight": torch.tensor([weights[node] for node in sequence.node_ids], dtype=torch.float32),
        "node": torch.tensor(sequence.node_ids),
        "parent": torch.tensor([-1 if node.parent is None else node.parent for node in graph.nodes]),
    }
    return tree if experts is None else tree | {"routed_experts": experts}
