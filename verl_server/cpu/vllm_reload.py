"""The fast load of an update: one copy and one packing of each module, on a CPU that knows all modules of the model."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import inspect
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, get_numel_loaded, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from verl_server.vllm_plugin.reload import Unwritten, in_module_order, raw_parameters

if TYPE_CHECKING:
    from verl_server.vllm_plugin.reload import NamedTensors, ReadTensors


# -- Module kinds -----------------------------------------------------------------------------------
# Which modules of a vLLM model the fast load of this file knows, by what vLLM does with their weights on a CPU.
#
# The fast load is used only if it knows every module with weights. Everything else is left to vLLM's own reload.

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


# -- Packed embeddings ------------------------------------------------------------------------------
# Embeddings and output heads during a fast load: they are loaded in place, then packed where logits are computed.
#
# Modules with tied weights share one parameter. vLLM would pack it for each of them, and would not pack it at all for
# a head whose tensor is not in the update.


class LoadedEmbedding:
    """The embeddings and heads that share one weight."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self.names = list(modules)
        """Names of the modules."""
        self.is_loaded = False
        """Whether a tensor of these modules was loaded in this update."""
        self._modules = list(modules.values())
        self._loaders: dict[torch.Tensor, Callable[..., Any]] = {}

    def start(self) -> None:
        """Watch the loaders of the parameters."""
        self.is_loaded = False
        parameters = {p for module in self._modules for p in module.parameters(recurse=False)}
        for parameter in parameters:
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            self._loaders[parameter] = loader
            parameter.weight_loader = self._watching_loader(loader)

    def _watching_loader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def load(*args: Any, **kwargs: Any) -> Any:
            # vLLM's counter refuses a tensor that would be broadcast, before anything is written
            _, result = get_numel_loaded(original, signature.bind(*args, **kwargs))
            self.is_loaded = True
            return result

        return load

    def finish(self) -> None:
        """Put the loaders back, and pack the weight if it was loaded."""
        for parameter, loader in self._loaders.items():
            parameter.weight_loader = loader  # type: ignore[attr-defined]
        self._loaders = {}
        if self.is_loaded:
            self._pack()

    def _pack(self) -> None:
        for module in self._modules:
            module.cpu_linear = PackedWhenUsed(module)  # frees the old copies, whose memory the new one takes
        heads = [module for module in self._modules if isinstance(module, ParallelLMHead)]
        if not heads:
            return
        try:
            heads[0].quant_method.process_weights_after_loading(heads[0])
        except BaseException:
            for module in self._modules:
                module.cpu_linear = torch.nn.functional.linear  # slower, but right
            raise
        for module in self._modules:
            module.cpu_linear = heads[0].cpu_linear


class PackedWhenUsed:
    """`cpu_linear` of a module that perhaps computes no logits: packs the weight at the first call."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self._module.quant_method.process_weights_after_loading(self._module)
        result: torch.Tensor = self._module.cpu_linear(x, weight, bias)
        return result


def group_embeddings(modules: Mapping[str, Any]) -> list[LoadedEmbedding]:
    """The embeddings of a model, those that share a weight together."""
    groups: dict[torch.Tensor, dict[str, Any]] = {}
    for name, module in modules.items():
        groups.setdefault(module.weight, {})[name] = module
    return [LoadedEmbedding(group) for group in groups.values()]


# -- Scratch ----------------------------------------------------------------------------------------
# Memory for the raw weights of one module at a time, before they are packed.
#
# The memory is kept between updates, because the pages of new memory cost more time than the copy of the weights. It
# is backed by huge pages where the system has them.

MAX_KEPT_BYTES = 2**26
"""Size of the largest block that is kept between updates. Experts of large models need more."""
HUGE_PAGE_BYTES = 2**21
ALIGNMENT = 64


class Scratch:
    """Blocks of memory. There is one for each module that is being loaded, which is usually one."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Uninitialised tensors with the shapes, strides and dtypes of `tensors`, and the block that they lie in."""
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        block = self._take_block(size)
        return block, [
            block[offset : offset + tensor.untyped_storage().nbytes()]
            .view(tensor.dtype)
            .as_strided(tensor.shape, tensor.stride())
            for offset, tensor in zip(offsets, tensors, strict=True)
        ]

    def _take_block(self, size: int) -> torch.Tensor:
        fitting = [position for position, block in enumerate(self._free) if len(block) >= size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda position: len(self._free[position])))
        if self._free:
            self._free.pop()  # the new block takes its place
        length = max(-(-size // HUGE_PAGE_BYTES), 1) * HUGE_PAGE_BYTES
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def give_back(self, block: torch.Tensor) -> None:
        """Let the next module use a block."""
        self._free.append(block)

    def shrink(self) -> None:
        """Release the blocks that are too large to be kept, and all but one."""
        small = [block for block in self._free if len(block) <= MAX_KEPT_BYTES]
        self._free = sorted(small, key=len)[-1:]


# -- Staged module ----------------------------------------------------------------------------------


class StagedModule:
    """The raw parameters of one module, and what has been loaded into them.

    Between `start` and the arrival of all elements, or `finish`, the module has parameters on the meta device, whose
    loaders write into scratch memory.
    """

    def __init__(self, module: Any, kind: ModuleKind, scratch: Scratch) -> None:
        self._module, self._kind, self._scratch = module, kind, scratch
        self._raw: dict[str, torch.Tensor] = {}
        self._loaders: dict[str, Callable[..., Any]] = {}
        for name, parameter in raw_parameters(module).items():
            if name not in SKIP_LOAD_TENSORS:
                raw = restore_layer_refs(to_meta_tensor(parameter), module)
                self._loaders[name] = getattr(raw, "weight_loader", default_weight_loader)
                raw.weight_loader = self._counting_loader(name)
                self._raw[name] = raw
        self._total = sum(map(get_tensor_load_numel, self._raw.values()))
        self._live: dict[str, nn.Parameter] = {}
        self._block: torch.Tensor | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_loaded = 0
        self.is_loaded = False
        """Whether the module has got all its tensors in this update."""

    @property
    def is_incomplete(self) -> bool:
        """Whether the module has got only a part of its tensors in this update."""
        return self._num_loaded > 0 and not self.is_loaded

    def start(self) -> None:
        """Give the module the parameters that the model's loader fills."""
        self._num_loaded, self.is_loaded = 0, False
        self._live = dict(self._module.named_parameters(recurse=False))
        for name, raw in self._raw.items():
            self._module.register_parameter(name, raw)

    def finish(self) -> None:
        """Give the module its own parameters back, and forget what was loaded of an incomplete module."""
        for name, parameter in self._live.items():
            self._module.register_parameter(name, parameter)
        self._live = {}
        self._drop()

    def _counting_loader(self, name: str) -> Callable[..., Any]:
        """A loader for the raw parameter that writes into scratch memory and counts the elements."""
        original = self._loaders[name]
        signature = inspect.signature(original)

        def load(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.is_loaded:
                return None  # vLLM ignores such tensors too
            arguments = signature.bind(self._tensor(name), *args, **kwargs)
            num_loaded, result = get_numel_loaded(original, arguments)
            self._num_loaded += num_loaded
            if self._num_loaded >= self._total:
                self._commit()
            return result

        return load

    def _tensor(self, name: str) -> torch.Tensor:
        """A raw parameter in scratch memory."""
        if self._block is None:
            self._block, tensors = self._scratch.take(list(self._raw.values()))
            for tensor, (key, raw) in zip(tensors, self._raw.items(), strict=True):
                tensor.__class__ = raw.__class__
                tensor.__dict__ = raw.__dict__.copy()
                tensor.weight_loader = self._loaders[key]  # type: ignore[attr-defined]
            self._tensors = dict(zip(self._raw, tensors, strict=True))
        return self._tensors[name]

    def _drop(self) -> None:
        if self._block is not None:
            self._scratch.give_back(self._block)
        self._block, self._tensors = None, {}

    def _commit(self) -> None:
        """Make the loaded tensors the module's weights."""
        module, live, tensors = self._module, self._live, self._tensors
        for name, tensor in tensors.items():
            module.register_parameter(name, tensor)
        if self._kind is not ModuleKind.PLAIN:
            self._pack()
        for name, parameter in live.items():
            new = getattr(module, name)
            if parameter.shape == new.shape:
                parameter.data.copy_(new)
                module.register_parameter(name, parameter)
            else:  # vLLM could not pack as it did before
                module.register_parameter(name, nn.Parameter(new.detach().clone(), requires_grad=False))
        self._live = {}
        self.is_loaded = True
        self._drop()

    def _pack(self) -> None:
        module, method = self._module, self._module.quant_method
        if hasattr(module, "_already_called_process_weights_after_loading"):
            del module._already_called_process_weights_after_loading
        if self._kind is ModuleKind.LINEAR:
            method.process_weights_after_loading(module)
            return
        kernel, method.moe_kernel = method.moe_kernel, None  # otherwise vLLM does not pack the experts again
        try:
            method.process_weights_after_loading(module)
        except BaseException:
            method.moe_kernel = kernel
            raise


# -- Allocator --------------------------------------------------------------------------------------
# The C library's allocator during an update.
#
# glibc returns large blocks to the system when they are freed. oneDNN allocates the packed weights of every module
# anew, so that an update would take all their pages from the system again, which costs more time than packing.

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt` in `malloc.h`."""
LARGEST = 2**31 - 1
MMAP_BYTES, TRIM_BYTES = 2**25, 2**26
"""The thresholds to which glibc's own adaptation grows. It ends at the first call of `mallopt`."""


@contextlib.contextmanager
def freed_memory_is_kept() -> Iterator[None]:
    """In the body, freed memory stays in the process and serves the next allocation of its size."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        yield
        return
    mallopt(M_MMAP_THRESHOLD, LARGEST)
    mallopt(M_TRIM_THRESHOLD, LARGEST)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


# -- Fast load --------------------------------------------------------------------------------------
# A fast load of the weights of a vLLM model on a CPU: one copy of each tensor, one packing of each module.
#
# vLLM's own reload runs each loader twice, first on the meta device to count elements, packs embeddings that compute
# no logits, and takes new memory for every module. The fast load gives the model's loader parameters whose own loaders
# write into scratch memory. When all elements of a module have arrived, vLLM's own method packs the module from there.
# Until then the module keeps its old weights, so that tensors that are missing or have a wrong shape change nothing in
# it. Embeddings are loaded in place, because they consist of one tensor.


class FastLoad:
    """Loads updates into a model whose modules are all known.

    Raises UnknownModuleError for other models.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._scratch = model, Scratch()
        kinds, modules = kinds_of(model), dict(model.named_modules())
        self._staged = {
            name: StagedModule(modules[name], kind, self._scratch)
            for name, kind in kinds.items()
            if kind not in (ModuleKind.EMPTY, ModuleKind.EMBEDDING)
        }
        embeddings = {name: modules[name] for name, kind in kinds.items() if kind is ModuleKind.EMBEDDING}
        self._embeddings = group_embeddings(embeddings)
        self._parts: list[LoadedEmbedding | StagedModule] = [*self._embeddings, *self._staged.values()]
        self._names = [name for name, kind in kinds.items() if kind is not ModuleKind.EMPTY]
        self._unwritten = Unwritten(self._names, [])

    def start(self) -> None:
        """The model keeps its weights until `load`, and can generate."""
        self._unwritten = Unwritten(self._names, [])

    def load(self, tensors: NamedTensors, read: ReadTensors) -> None:
        """Load the tensors. Those of one module come together, so that one block of scratch memory is enough.

        When it returns or raises, all modules have their own parameters, and embeddings that were loaded are packed.
        """
        with contextlib.ExitStack() as last_steps:
            last_steps.callback(self._find_unwritten)
            last_steps.enter_context(freed_memory_is_kept())
            last_steps.callback(self._scratch.shrink)
            for part in self._parts:
                last_steps.callback(part.finish)
                part.start()
            self._model.load_weights(read(in_module_order(self._model, tensors)))

    def _find_unwritten(self) -> None:
        incomplete = [name for name, module in self._staged.items() if module.is_incomplete]
        written = {name for name, module in self._staged.items() if module.is_loaded}
        written.update(name for embedding in self._embeddings if embedding.is_loaded for name in embedding.names)
        untouched = [name for name in self._names if name not in {*written, *incomplete}]
        self._unwritten = Unwritten(untouched, incomplete, is_unchanged=not written)

    def finish(self, *, is_loaded: bool) -> Unwritten:
        """The modules that have their old weights."""
        return self._unwritten
