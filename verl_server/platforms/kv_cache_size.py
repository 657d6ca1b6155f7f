"""Default size of the KV cache on a CPU, in tokens."""

from __future__ import annotations

import logging
from typing import Any

from verl_server.platforms.available_memory import available_memory

logger = logging.getLogger(__name__)

# A server shares the machine with the trainer and with the user's programs. By default it takes at most an eighth of
# the free memory, and at most the memory of sixteen requests of full length.
SHARE_OF_FREE_MEMORY = 1 / 8
FULL_LENGTH_REQUESTS = 16
SMALLEST_POOL_TOKENS = 2048


def pool_tokens(context_length: int, bytes_per_token: int, free_bytes: int) -> int:
    """Number of tokens in the KV pool, limited by the context length and by free memory; at least the smallest pool."""
    useful = context_length * FULL_LENGTH_REQUESTS
    affordable = int(free_bytes * SHARE_OF_FREE_MEMORY) // max(bytes_per_token, 1)
    return max(SMALLEST_POOL_TOKENS, min(useful, affordable))


def default_kv_cache_tokens(args: Any) -> int:
    """The default of `max_total_tokens` for this model and the memory that is free now."""
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(args)
    element_bytes = 2 if str(model.dtype) in ("torch.bfloat16", "torch.float16") else 4
    # Keys and values of all layers. All TP ranks use the same host memory, so the size is not divided by the TP size.
    bytes_per_token = (
        model.num_hidden_layers
        * model.get_total_num_kv_heads()
        * (model.head_dim + getattr(model, "v_head_dim", model.head_dim))
        * element_bytes
    )
    tokens = pool_tokens(model.context_len, bytes_per_token, available_memory())
    logger.info("KV cache: %d tokens of %d bytes (set --max-total-tokens to change)", tokens, bytes_per_token)
    return tokens
