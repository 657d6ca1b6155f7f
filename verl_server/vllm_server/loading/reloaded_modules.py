"""The modules of a vLLM model during vLLM's reload: which are loaded, must be dropped, or must be packed again.

On a CPU two kinds of modules keep packed copies of their weights that vLLM 0.32 does not make again when it reloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

EXPERTS = ".experts."
"""Part of the names of tensors of single experts."""


class Unwritten(NamedTuple):
    """Names of modules that have their old weights after an update."""

    untouched: list[str]
    """Modules that got no tensor."""
    incomplete: list[str]
    """Modules that got only a part of their tensors, which were dropped."""
    is_unchanged: bool = False
    """Whether it is known that no module has new weights."""


class PartialModuleError(Exception):
    """An update has some tensors of a module of vLLM and lacks others."""


def forget_expert_kernels(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Make vLLM pack the experts again at their next load. Returns what `put_back_expert_kernels` needs."""
    kernels = {}
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None:
            kernels[name] = (method, kernel)
            method.moe_kernel = None
    return kernels


def put_back_expert_kernels(kernels: dict[str, tuple[Any, Any]]) -> None:
    """Give experts that were not loaded their kernel back."""
    for method, kernel in kernels.values():
        if method.moe_kernel is None:
            method.moe_kernel = kernel


def untouched_modules(model: nn.Module) -> dict[str, Any]:
    """Modules with parameters that got no tensor in this session, by name. Call it before the session is finalized."""
    return {
        name: module
        for name, module, info in loadable_modules(model)
        if not info.loaded_weights and info.restore_metadata[0]
    }


def repack_tied(model: nn.Module, untouched: dict[str, Any]) -> list[str]:
    """Make the packed copies of tied output heads again, and remove these from `untouched`. Returns their names.

    A head that shares the weight of the embeddings gets no tensor of its own. It has the new weight, because vLLM
    copies it into the old memory, but computes with its packed copy. Call it after the session is finalized.
    """
    idle = set(untouched.values())
    written = {id(p) for m in model.modules() if m not in idle for p in m.parameters(recurse=False)}
    tied = [name for name, m in untouched.items() if all(id(p) in written for p in m.parameters(recurse=False))]
    repacked = []
    for name in tied:
        module = untouched.pop(name)
        if hasattr(module, "cpu_linear") and module.weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)
            repacked.append(name)
    return repacked


def loadable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Modules with weights that were not completely loaded in this session: name, module, loading information."""
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if info.can_load() and info.load_numel_total and not is_deferred_attention_layer(module):
            yield name, module, info


class InPlaceTensors:
    """Copies of the parameters that vLLM does not move to the meta device, and so overwrites while it loads: biases.

    Create it after `initialize_layerwise_reload`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._copies: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for module in model.modules():
            real = [parameter.data for parameter in module.parameters(recurse=False) if not parameter.is_meta]
            if real and get_layerwise_info(module).can_load():
                self._copies[module] = [(tensor, tensor.clone()) for tensor in real]

    def restore(self, module: nn.Module) -> None:
        """Undo what was loaded into a module."""
        for tensor, copy in self._copies.get(module, ()):
            tensor.copy_(copy)


def drop_unfinished(model: nn.Module, in_place: InPlaceTensors, *, keep_padded: bool) -> list[str]:
    """Forget the tensors of modules that got only a part of them. Returns the names of these modules.

    vLLM would fill the rest with uninitialised memory. `keep_padded`: keep embeddings that got tensors, because their
    padding is never loaded.
    """
    dropped = []
    for name, module, info in loadable_modules(model):
        if info.loaded_weights and not (keep_padded and isinstance(module, VocabParallelEmbedding)):
            info.loaded_weights.clear()
            info.load_numel = 0
            in_place.restore(module)
            dropped.append(name)
    return dropped


def require_whole_modules(model: nn.Module, names: Iterable[str]) -> None:
    """Raise PartialModuleError if `names` are not all tensors of each module of vLLM that they belong to.

    vLLM fuses some modules of checkpoints into one. Its models publish which: `packed_modules_mapping`.
    """
    given = set(names)
    fused = {part: parts for parts in getattr(model, "packed_modules_mapping", {}).values() for part in parts}
    wholes = _fused_modules(model)
    modules = dict(model.named_modules())
    for name in given:
        path, _, tensor = name.rpartition(".")
        parent, _, part = path.rpartition(".")
        if EXPERTS in name or tensor not in ("weight", "bias"):
            continue  # experts: `drop_unfinished` finds them
        module = modules.get(f"{parent}.{wholes.get(part, part)}" if parent else part)
        tensors = [tensor] if module is None else _own_tensors(module)
        start = f"{parent}." if parent else ""
        needed = {f"{start}{sibling}.{leaf}" for sibling in fused.get(part, [part]) for leaf in tensors}
        if missing := sorted(needed - given):
            raise PartialModuleError(f"the update has {name!r} without {missing}, which vLLM loads together")


def in_module_order(model: nn.Module, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """The same named tensors, those of each module of vLLM together."""
    wholes = _fused_modules(model)
    groups: dict[tuple[str, str], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        before, experts, _ = name.partition(EXPERTS)
        parent, _, part = name.rpartition(".")[0].rpartition(".")
        module = (before, experts) if experts else (parent, wholes.get(part, part))
        groups.setdefault(module, []).append((name, tensor))
    return [named for group in groups.values() for named in group]


def _fused_modules(model: nn.Module) -> dict[str, str]:
    """The last name of vLLM's module, by that of each module of the checkpoint that vLLM fuses into it."""
    return {part: whole for whole, parts in getattr(model, "packed_modules_mapping", {}).items() for part in parts}


def _own_tensors(module: nn.Module) -> list[str]:
    """The kinds of tensors that a module has in a checkpoint."""
    return ["weight", "bias"] if getattr(module, "bias", None) is not None else ["weight"]
