"""Conversion of recorded paths to the tensors that trainers take.

Shapes: B is the number of paths, P the number of tokens of the longest prompt, R that of the longest response, T the
number of all tokens, L the number of layers, K the number of experts per token. `to_batch` can set P and R. Fields and
padding follow verl's `DataProto`: prompts are padded on the left, responses on the right. The response of a path
contains all tokens after its first prompt: sampled tokens (mask 1) and tokens from tools and messages (mask 0).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError
from verl_server.trajectory.batches.routed_experts import ExpertLayout, read_experts
from verl_server.trajectory.batches.rows import GraphPath, Row, make_rows
from verl_server.trajectory.nodes import NO_VERSION
from verl_server.trajectory.vision import VisionInputs, require_vision_inputs
from verl_server.validation import require_whole_number

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


def to_batch(
    paths: Iterable[GraphPath],
    pad_token_id: int,
    *,
    vision: VisionInputs | None = None,
    expert_layout: ExpertLayout | None = None,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> TensorDict:
    """Convert paths to padded tensors with B rows.

    `prompts` [B, P]; `responses`, `response_mask`, `rollout_log_probs`, `rm_scores`, `weight_versions` [B, R];
    `input_ids`, `attention_mask`, `position_ids` [B, P + R]; `loss_weight` [B]. Masked positions have log prob 0, score
    0 and weight version `NO_VERSION` (-1). A reward per token is stored at its token. A reward of a whole node is
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
    if pad_token_id is None:
        raise BadInputError("pad_token_id is None: this tokenizer has no padding token; pass tokenizer.eos_token_id")
    require_whole_number("pad_token_id", pad_token_id, minimum=0)
    import torch
    from tensordict import TensorDict

    rows, experts = _read(paths, vision, expert_layout)
    prompt_width = _width("prompt", prompt_length, rows, [row.prompt_length for row in rows])
    width = _width("response", response_length, rows, [row.length - row.prompt_length for row in rows])
    fields = _input_fields(rows, prompt_width, width, int(pad_token_id)) | _response_fields(rows, width)
    fields["loss_weight"] = torch.tensor([row.loss_weight for row in rows])
    if experts:
        fields["routed_experts"] = _pad_experts(experts, fields["attention_mask"])
    batch = TensorDict(fields, batch_size=[len(rows)])
    if vision is not None:
        vision.add_padded(batch, [(row.sequence.token_ids, row.images) for row in rows])
    return batch


def to_packed(
    paths: Iterable[GraphPath], *, vision: VisionInputs | None = None, expert_layout: ExpertLayout | None = None
) -> dict[str, torch.Tensor]:
    """Convert paths to tensors without padding, one path after the other.

    The fields `input_ids`, `position_ids`, `response_mask`, `rollout_log_probs`, `rm_scores`, `weight_versions` and
    `loss_weight` (see `to_batch`) have the shape [T]. `cu_seqlens` [B + 1] (int32) has the offsets of the paths. Raises
    BadInputError for the same paths as `to_batch`. With `vision`, `position_ids` are [4, T], and `pixel_values` and
    `image_grid_thw` have the images of all paths, one after the other. With `expert_layout`, `routed_experts` are
    [T, L, K].
    """
    import torch

    rows, experts = _read(paths, vision, expert_layout)
    lengths = [row.length for row in rows]
    fields = {
        "input_ids": torch.tensor([token for row in rows for token in row.sequence.token_ids]),
        "position_ids": torch.tensor([position for length in lengths for position in range(length)]),
        "response_mask": torch.tensor([bit for row in rows for bit in row.sequence.loss_mask]),
        "rollout_log_probs": torch.tensor([logprob for row in rows for logprob in row.sequence.logprobs]),
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
    if longest > require_whole_number(f"{part}_length", width):
        index = lengths.index(longest)
        raise BadInputError(
            f"the {part} of path {index} (session {rows[index].graph.session_id!r}) has {longest} tokens, but "
            f"{part}_length is {width}; pass {part}_length={longest} or more, on all ranks, or leave out such paths",
            argument=f"{part}_length",
        )
    return int(width)


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
        "rm_scores": _zeros(rows, width).float(),
        "weight_versions": torch.full((len(rows), width), NO_VERSION),
    }
    for index, row in enumerate(rows):
        sequence = row.sequence
        columns: list[Sequence[Any]] = [sequence.loss_mask, sequence.logprobs, row.rewards, sequence.weight_versions]
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
