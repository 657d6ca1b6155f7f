"""Weights as shards instead of verl's gathered tensors.

verl's `FSDPEngine.get_per_tensor_param` gathers every tensor on every rank. `VerlEngine` needs no gathered tensors:
each rank copies its shard to its place in the staging memory. So this module replaces the method, only in the processes
of a run with the rollout `verl_server`. verl's own method is used for what is not a plain FSDP2 model: FSDP1, LoRA,
quantization-aware training, and models whose experts verl stores as one tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any


def install() -> None:
    """Replace the method of verl's FSDP engine. May be called again."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    original = FSDPEngine.get_per_tensor_param
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def get_per_tensor_param(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_plain(self):
            return _shards(self), None
        return original(self, *args, **kwargs)

    FSDPEngine.get_per_tensor_param = get_per_tensor_param


def _is_plain(engine: Any) -> bool:
    """Whether the state dict of the engine's module has the tensors that the servers load, as shards of FSDP2."""
    from verl.utils.fsdp_utils import fsdp_version

    module = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
    return (
        fsdp_version(engine.module) == 2
        and not hasattr(module, "peft_config")
        and not getattr(engine, "_qat_enabled", False)
        and not _fuses_experts(engine)
    )


def _fuses_experts(engine: Any) -> bool:
    """Whether verl splits fused experts of this model into tensors of single experts (`unfuse_moe_params`)."""
    config = engine.model_config.hf_config
    parts = (config, getattr(config, "text_config", None))
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(getattr(part, name, None) for part in parts for name in names)


def _shards(engine: Any) -> Iterator[tuple[str, Any]]:
    """Names and shards. Each shard is moved to the device when it is asked for, if it was offloaded."""
    from torch.distributed.tensor import DTensor
    from verl.utils.device import get_device_id
    from verl.utils.model import convert_weight_keys

    module = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
    for name, param in convert_weight_keys(engine.module.state_dict(), module).items():
        yield name, param.to(get_device_id(), non_blocking=True) if isinstance(param, DTensor) else param
