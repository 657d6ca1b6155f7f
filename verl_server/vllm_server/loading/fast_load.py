"""A fast load of the weights of a vLLM model on a CPU: one copy of each tensor, one packing of each module.

vLLM's own reload runs each loader twice, first on the meta device to count elements, packs embeddings that compute no
logits, and takes new memory for every module. The fast load gives the model's loader parameters whose own loaders write
into scratch memory. When all elements of a module have arrived, vLLM's own method packs the module from there. Until
then the module keeps its old weights, so that tensors that are missing or have a wrong shape change nothing in it.
Embeddings are loaded in place, because they consist of one tensor.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from verl_server.vllm_server.loading.allocator import freed_memory_is_kept
from verl_server.vllm_server.loading.module_kinds import ModuleKind, kinds_of
from verl_server.vllm_server.loading.packed_embeddings import LoadedEmbedding, group_embeddings
from verl_server.vllm_server.loading.reloaded_modules import Unwritten, in_module_order
from verl_server.vllm_server.loading.scratch import Scratch
from verl_server.vllm_server.loading.staged_module import StagedModule

if TYPE_CHECKING:
    from verl_server.vllm_server.loading.weight_load import NamedTensors, ReadTensors


class FastLoad:
    """Loads updates into a model whose modules are all known.

    Raises `module_kinds.UnknownModuleError` for other models.
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
