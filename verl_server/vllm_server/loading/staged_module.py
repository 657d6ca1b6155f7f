"""One module during a fast load: its tensors are collected in scratch memory, then packed by vLLM's own method."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, get_numel_loaded, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from verl_server.vllm_server.loading.module_kinds import ModuleKind
from verl_server.vllm_server.loading.reloaded_modules import raw_parameters
from verl_server.vllm_server.loading.scratch import Scratch


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
