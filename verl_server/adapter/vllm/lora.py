"""LoRA adapters of vLLM servers: the body of the request that loads one, and the sizes that vLLM knows."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError
from verl_server.types import Json

if TYPE_CHECKING:
    import torch

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's option `--max-lora-rank`."""


def vllm_lora_payload(name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Json:
    """The body of our route: the tensors as a safetensors file, which the server can read without pickle."""
    from safetensors.torch import save

    content = save({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()})
    return {
        "lora_name": name,
        "config_dict": dict(config),
        "safetensors": base64.b64encode(content).decode(),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def round_rank(rank: int) -> int:
    """The smallest `--max-lora-rank` of vLLM for adapters of `rank`. Raises BadInputError above its maximum."""
    fitting = next((each for each in RANKS if each >= rank), None)
    if fitting is None:
        raise BadInputError(f"max_lora_rank={rank} is above vLLM's maximum of {RANKS[-1]}", argument="max_lora_rank")
    return fitting
