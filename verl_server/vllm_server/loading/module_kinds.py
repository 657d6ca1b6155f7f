"""Which modules of a vLLM model the fast load of `fast_load.py` knows, by what vLLM does with their weights on a CPU.

The fast load is used only if it knows every module with weights. Everything else is left to vLLM's own reload.
"""

from __future__ import annotations

import enum
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.platforms import current_platform

from verl_server.vllm_server.loading.reloaded_modules import raw_parameters

VLLMS_RELOAD = "online_process_loader"
"""Name of the loaders of vLLM's reload, and of its quantization at load time."""


class ModuleKind(enum.Enum):
    """What happens with the weights of a module after they have been loaded."""

    EMPTY = "it has no weights"
    PLAIN = "the loaded tensors are used as they are"
    LINEAR = "the weight is packed, and the raw weight is dropped"
    EMBEDDING = "the raw weight stays; if the module computes logits, they are computed with a packed copy"
    EXPERTS = "the weights of all experts are packed"


class UnknownModuleError(Exception):
    """A module that the fast load does not know."""


def kinds_of(model: nn.Module) -> dict[str, ModuleKind]:
    """The kind of each module by name. Raises UnknownModuleError with the first module that has no known kind."""
    if not current_platform.is_cpu():
        raise UnknownModuleError("the worker has an accelerator")
    if find_spec("zentorch") is not None:
        raise UnknownModuleError("zentorch computes with the raw weights, or packs them in another way")
    kinds = {}
    for name, module in model.named_modules():
        try:
            kinds[name] = _kind_of(module)
        except UnknownModuleError as error:
            raise UnknownModuleError(f"{name} ({type(module).__name__}): {error}") from None
    return kinds


def _kind_of(module: Any) -> ModuleKind:
    raw = raw_parameters(module)
    persistent = [name for name, _ in module.named_buffers(recurse=False) if _is_persistent(module, name)]
    if is_deferred_attention_layer(module):
        if raw or not isinstance(module, Attention) or module.quant_config is not None:
            raise UnknownModuleError("an attention layer that loads or computes weights")
        return ModuleKind.EMPTY  # its buffers are scales, which are 1 without quantization
    if persistent:
        raise UnknownModuleError(f"the model loads its buffers {persistent}")
    if not raw:
        return ModuleKind.EMPTY
    if any(getattr(getattr(tensor, "weight_loader", None), "__name__", "") == VLLMS_RELOAD for tensor in raw.values()):
        raise UnknownModuleError("vLLM's reload has replaced its loaders")
    method: Any = getattr(module, "quant_method", None)
    if not isinstance(method, QuantizeMethodBase):
        _require(all(_same_form(raw[name], live) for name, live in module.named_parameters(recurse=False)), raw)
        return ModuleKind.PLAIN
    if type(method) is UnquantizedLinearMethod:
        _require(
            {"weight"} <= set(raw) <= {"weight", "bias"} and raw["weight"].ndim == 2 and not module.weight.is_meta, raw
        )
        return ModuleKind.LINEAR
    if type(method) is UnquantizedEmbeddingMethod and isinstance(module, VocabParallelEmbedding):
        _require({"weight"} <= set(raw) <= {"weight", "bias"} and _same_form(raw["weight"], module.weight), raw)
        return ModuleKind.EMBEDDING
    if type(method) is UnquantizedFusedMoEMethod and method.unquantized_backend == UnquantizedMoeBackend.CPU:
        _require(set(raw) == {"w13_weight", "w2_weight"}, raw)
        return ModuleKind.EXPERTS
    raise UnknownModuleError(f"the method {type(method).__name__}")


def _is_persistent(module: nn.Module, buffer: str) -> bool:
    return buffer in module.state_dict(keep_vars=True)


def _same_form(raw: torch.Tensor, live: torch.Tensor) -> bool:
    return (raw.shape, raw.dtype, live.is_meta) == (live.shape, live.dtype, False)


def _require(known: bool, raw: dict[str, torch.Tensor]) -> None:
    if not known:
        raise UnknownModuleError(f"its parameters { ({name: list(tensor.shape) for name, tensor in raw.items()}) }")
