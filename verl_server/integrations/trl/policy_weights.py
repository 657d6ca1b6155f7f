"""The weights of TRL's model by the names of its checkpoint, as `VerlEngine` takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from verl_server.errors import UnsupportedError

#: Parts of parameter names that wrappers insert: DDP, activation checkpointing, `torch.compile`.
WRAPPER_PARTS = ("module.", "_checkpoint_wrapped_module.", "_orig_mod.")
FSDP2 = 2
ZERO_STAGE_3 = 3


def require_pushable(accelerator: Any) -> None:
    """Raise UnsupportedError if the parameters of the trainer's model are sharded in a way that cannot be pushed."""
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    if deepspeed is not None and deepspeed.zero_stage == ZERO_STAGE_3:
        raise UnsupportedError(
            "the parameters of a model under DeepSpeed ZeRO-3 are no tensors of their own, so they cannot be pushed: "
            "use FSDP2, which is `fsdp_version: 2` in the configuration of accelerate, or ZeRO-2"
        )
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None and fsdp.fsdp_version != FSDP2:
        raise UnsupportedError(
            "FSDP1 flattens the parameters of a model, so they cannot be pushed: use FSDP2, which is "
            "`fsdp_version: 2` in the configuration of accelerate"
        )


@contextlib.contextmanager
def named_weights(model: Any) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Pairs of name and tensor of all parameters. Sharded parameters of FSDP2 are DTensors.

    `model` is the trainer's model without wrappers of Accelerate. The adapters of a PEFT model are merged into its base
    model until the end of the context.
    """
    if not _is_peft(model):
        yield ((_clean(name), parameter.detach()) for name, parameter in model.named_parameters())
        return
    model.merge_adapter()
    try:
        yield _merged_weights(model)
    finally:
        model.unmerge_adapter()


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "merge_adapter")


def _merged_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of the base model of a PEFT model. The adapters and the originals of replaced modules are left out."""
    for name, parameter in model.named_parameters():
        base_name = _clean(name).removeprefix("base_model.model.").replace(".base_layer.", ".")
        if model.prefix in base_name or ".original_module." in base_name:
            continue
        for adapter in model.active_adapters:
            base_name = base_name.replace(f".modules_to_save.{adapter}.", ".")
        yield base_name, parameter.detach()


def _clean(name: str) -> str:
    for part in WRAPPER_PARTS:
        name = name.removeprefix(part) if part == "module." else name.replace(part, "")
    return name
