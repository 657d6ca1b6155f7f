"""The policy: a tiny transformer with random weights, as a checkpoint and as an FSDP2 module of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl_server.demo import task
from verl_server.tiny import Architecture, make_config

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

INITIAL_STD = 0.1
"""Standard deviation of the initial weights. The initial policy is close to uniform, so that it explores enough."""


def write_policy(folder: Path, seed: int) -> None:
    """Write the checkpoint of an untrained Qwen3 model with two layers and the vocabulary of the task."""
    from transformers import AutoModelForCausalLM

    config = make_config(Architecture.QWEN3, context_length=64, tie_word_embeddings=True)
    config.vocab_size = task.VOCAB_SIZE
    config.eos_token_id = config.pad_token_id = None
    config.initializer_range = INITIAL_STD
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def load_sharded(folder: Path, mesh: DeviceMesh) -> Any:
    """Load the checkpoint as a trainable module whose parameters are sharded over `mesh` (FSDP2)."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def named_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face names and DTensors of this rank, one at a time, as `update_weights_from_tensor` expects them."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (n, t, vocabulary) of token ids (n, t). Causal attention needs no mask for padding on the right."""
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits
