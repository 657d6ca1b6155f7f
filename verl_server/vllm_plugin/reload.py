"""The modules of a vLLM model during vLLM's reload: which are loaded, must be dropped, or must be packed again.

On a CPU two kinds of modules keep packed copies of their weights that vLLM 0.32 does not make again when it reloads.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from verl_server.types import TensorSpec

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


class Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which modules of a model read which tensors of its checkpoint: a load by the model's own loader without values.

    Parameters and tensors are on the meta device meanwhile, and the model must not generate. vLLM loads a module only
    with all of its tensors, and through the loaders of its parameters only.
    """

    def __init__(self, model: nn.Module, specs: Mapping[str, TensorSpec]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._readers: defaultdict[str, set[str]] = defaultdict(set)
        self._module, self._tensor = "", ""  # no module: the class of the model writes past the parameter's loader
        live = {path: dict(module.named_parameters(recurse=False)) for path, module in model.named_modules()}
        with contextlib.ExitStack() as last_steps:
            for path, module in model.named_modules():
                last_steps.callback(module._parameters.update, module._parameters.copy())
                last_steps.callback(module._parameters.clear)
                for name, parameter in raw_parameters(module).items():
                    raw = restore_layer_refs(to_meta_tensor(parameter), module)
                    raw.weight_loader = self._recording_loader(
                        path, getattr(raw, "weight_loader", default_weight_loader)
                    )
                    module.register_parameter(name, raw)
            with torch.no_grad(), self:
                model.load_weights(self._tensors_of(specs))  # type: ignore[operator]
        past = self._readers.pop("", set()).difference(*self._readers.values())
        written = {id(parameter) for path in self._readers for parameter in live[path].values()}
        unread = [
            path
            for path, own in live.items()
            if path not in self._readers and not written.issuperset(map(id, own.values()))
        ]
        self.unloadable = sorted(past) if unread else []
        """Tensors that the class of the model writes past the loaders of its parameters: vLLM's reload loses them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._readers[self._module].add(self._tensor)
        return func(*args, **(kwargs or {}))

    def _tensors_of(self, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        for self._tensor, spec in specs.items():
            yield self._tensor, torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")

    def _recording_loader(self, path: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            self._module = path
            try:
                return original(*args, **kwargs)
            finally:
                self._module = ""

        return load

    def fused_modules(self) -> list[list[str]]:
        """See `ServerInfo.fused_modules`."""
        found = set()
        for names in self._readers.values():
            if len(names) > 1:
                parts = [name.split(".") for name in names]
                common = len(list(itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))))
                found.add(tuple(sorted({re.sub(r"\b\d+\b", "*", ".".join(part[common:])) for part in parts})))
        return [list(tails) for tails in sorted(found)]

    def require_whole_modules(self, names: Iterable[str]) -> None:
        """Raise PartialModuleError if `names` are not all tensors of each module of vLLM that they belong to."""
        given = set(names)
        for tensors in self._readers.values():
            if (own := tensors & given) and (missing := sorted(tensors - given)):
                raise PartialModuleError(
                    f"the update has {min(own)!r} without {missing[:6]}, which vLLM loads together"
                )


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


def raw_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters as the model's loader fills them: those that vLLM has recorded before it packed them, on the meta
    device, and those that it does not record because they are not packed."""
    recorded: dict[str, torch.Tensor] = get_layerwise_info(module).restore_metadata[0]
    return dict(module.named_parameters(recurse=False)) | recorded


# -- Weight load ------------------------------------------------------------------------------------
# The interface of the two ways to load an update into a model.

NamedTensors = Sequence[tuple[str, torch.Tensor]]
ReadTensors = Callable[[NamedTensors], Iterable[tuple[str, torch.Tensor]]]
"""Yields named tensors as the model's loader gets them. The loader has taken a tensor when it asks for the next one."""


class WeightLoad(Protocol):
    """Loads updates into one model. Each method may raise, and `finish` is called in any case."""

    def start(self) -> None:
        """Prepare the model for `load`."""

    def load(self, tensors: NamedTensors, read: ReadTensors) -> None:
        """Load tensors of whole modules. Raises what the model's loader raises."""

    def finish(self, *, is_loaded: bool) -> Unwritten:
        """Make the model usable again. `is_loaded`: `start` and `load` have not raised."""


# -- Layerwise load ---------------------------------------------------------------------------------
# A load with vLLM's own layerwise reload, which knows every model.


class LayerwiseLoad:
    """Loads updates with vLLM's reload. Between `start` and `finish` modules have no memory."""

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._kernels: dict[str, tuple[Any, Any]] = {}
        self._in_place: InPlaceTensors | None = None

    def start(self) -> None:
        """Move all modules to the meta device. Generation must be paused."""
        self._kernels = forget_expert_kernels(self._model)
        initialize_layerwise_reload(self._model)
        self._in_place = InPlaceTensors(self._model)

    def load(self, tensors: NamedTensors, read: ReadTensors) -> None:
        """Load the tensors. vLLM reads those of a module when the last of them arrives."""
        self._model.load_weights(read(tensors))

    def finish(self, *, is_loaded: bool) -> Unwritten:
        """Give all modules memory again. All steps are made, also if one of them raises."""
        untouched: dict[str, Any] = {}
        incomplete: list[str] = []
        with contextlib.ExitStack() as last_steps:
            last_steps.callback(lambda: repack_tied(self._model, untouched))
            last_steps.callback(lambda: put_back_expert_kernels(self._kernels))
            last_steps.callback(lambda: finalize_layerwise_reload(self._model, self._model_config))
            in_place, self._in_place = self._in_place, None
            if in_place is None:
                raise RuntimeError("the session was not started")
            incomplete = drop_unfinished(self._model, in_place, keep_padded=is_loaded)
            untouched.update(untouched_modules(self._model))
        self._kernels = {}
        return Unwritten(list(untouched), incomplete)
