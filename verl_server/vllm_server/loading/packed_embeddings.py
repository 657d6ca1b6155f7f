"""Embeddings and output heads during a fast load: they are loaded in place, then packed where logits are computed.

Modules with tied weights share one parameter. vLLM would pack it for each of them, and would not pack it at all for a
head whose tensor is not in the update.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload.meta import get_numel_loaded
from vllm.model_executor.model_loader.weight_utils import default_weight_loader


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
