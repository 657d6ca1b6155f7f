"""`AsyncGRPOTrainer` without a GPU: TRL's tree attention written in PyTorch.

The trainer packs samples with equal beginnings as a tree of tokens. A segment is a part of the tree without
branches; its tokens attend to the tokens on the path from the root to the segment, and to those before them in the
segment.
"""

from __future__ import annotations

from typing import Any

import torch

from verl_server.errors import UnsupportedError


def enable_async_grpo_on_cpu() -> None:
    """Let `AsyncGRPOTrainer` work in this process without a GPU. Call it before the trainer is made.

    TRL's trainer asks CUDA for the name of the GPU, and its attention is a kernel of FlashAttention 3. This function
    replaces both: the trainer then logs no `perf/mfu_*`, and its attention is `torch_tree_attention`. It is meant for
    tests and small models: the memory grows with the square of the number of tokens of a micro-batch.

    Raises UnsupportedError for another version of TRL.
    """
    from verl_server.integrations.trl.servers import require_trl  # the package imports this file

    require_trl()
    from trl.experimental.async_grpo import async_grpo_trainer

    async_grpo_trainer.register_tree_attention = _register
    async_grpo_trainer.get_peak_flops_per_device = _no_peak_flops


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    AttentionInterface.register(TREE_ATTENTION, torch_tree_attention)
    AttentionMaskInterface.register(TREE_ATTENTION, lambda **_: None)  # the attention makes its own mask


def _no_peak_flops(*_: Any) -> None:
    """Instead of TRL's function that asks CUDA for the name of the GPU."""


def torch_tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the packed tokens. `query`, `key` and `value` are (1, heads, tokens, head size).

    `tree_kv_index` has the positions of the paths of all segments, one after the other. `tree_cu_seqlens_q` and
    `tree_cu_seqlens_k` have the ends of the segments among the tokens and of their paths in `tree_kv_index`.
    """
    if softcap:
        raise UnsupportedError("the tree attention in PyTorch does not support models with a soft cap of the attention")
    mask = _tree_mask(query.shape[2], tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k, sliding_window)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


def _tree_mask(
    num_tokens: int,
    kv_index: torch.Tensor,
    query_ends: torch.Tensor,
    path_ends: torch.Tensor,
    sliding_window: int | None,
) -> torch.Tensor:
    """(tokens, tokens): whether the token of the row attends to the token of the column."""
    mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool, device=kv_index.device)
    queries, paths = query_ends.tolist(), path_ends.tolist()
    for segment in range(len(queries) - 1):
        rows = torch.arange(queries[segment], queries[segment + 1], device=mask.device)
        columns = kv_index[paths[segment] : paths[segment + 1]]
        # A path ends with its segment: place of each row and of each column in the path.
        row_places = torch.arange(len(columns) - len(rows), len(columns), device=mask.device)[:, None]
        column_places = torch.arange(len(columns), device=mask.device)[None, :]
        allowed = column_places <= row_places
        if sliding_window:
            allowed &= column_places > row_places - sliding_window
        mask[rows[:, None], columns[None, :]] = allowed
    return mask
