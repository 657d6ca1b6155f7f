"""How many KV cache tokens a server on a shared machine may take when nobody said a number."""

from __future__ import annotations

import logging
from typing import Any

import psutil

logger = logging.getLogger(__name__)

# A server is a guest on somebody's laptop, next to the trainer: an eighth of what is free, and never more
# than sixteen requests of full length need.
SHARE_OF_FREE_MEMORY = 1 / 8
FULL_LENGTH_REQUESTS = 16
SMALLEST_POOL_TOKENS = 2048


def pool_tokens(context_length: int, bytes_per_token: int, free_bytes: int) -> int:
    """Tokens of a KV pool: bounded by length, by memory, and from below so that something fits."""
    wanted = context_length * FULL_LENGTH_REQUESTS
    affordable = int(free_bytes * SHARE_OF_FREE_MEMORY) // max(bytes_per_token, 1)
    return max(SMALLEST_POOL_TOKENS, min(wanted, affordable))


def kv_budget_tokens(args: Any) -> int:
    """The default of `max_total_tokens` for the model and the free memory of this moment."""
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(args)
    element = 2 if str(model.dtype) in ("torch.bfloat16", "torch.float16") else 4
    # Key and value, every layer; all ranks live in the same memory, so TP does not divide it.
    per_token = (
        model.num_hidden_layers
        * model.get_total_num_kv_heads()
        * (model.head_dim + getattr(model, "v_head_dim", model.head_dim))
        * element
    )
    tokens = pool_tokens(model.context_len, per_token, psutil.virtual_memory().available)
    logger.info("KV cache: %d tokens of %d bytes (set --max-total-tokens to change)", tokens, per_token)
    return tokens
