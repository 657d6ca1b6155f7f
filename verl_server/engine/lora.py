"""LoRA adapters by name, on rank 0: load, replace, remove, and refuse names that nobody has loaded.

(SGLang takes an unknown `lora_path` for a model on the Hugging Face Hub and goes there.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_server.engine.backend import Backend
from verl_server.errors import BadInputError

if TYPE_CHECKING:
    import torch

Json = dict[str, Any]


class LoraAdapters:
    """What the servers of one engine have. `served` are those that they were started with."""

    def __init__(self, served: Any) -> None:
        self._served = _names_of(served)
        self._loaded: set[str] = set()

    def load(self, backend: Backend, name: str, tensors: Mapping[str, torch.Tensor], config: Json) -> None:
        """Replaces one of the same name, as soon as no request uses that any more.

        When the load fails then the name is served by nothing, and requests that ask for it are refused.
        """
        if name in self._loaded:
            self._loaded.discard(name)
            backend.unload_lora(name)
        backend.load_lora(name, tensors, config)
        self._loaded.add(name)

    def unload(self, backend: Backend, name: str) -> None:
        self.require(name)
        self._loaded.discard(name)
        self._served.discard(name)
        backend.unload_lora(name)

    def require(self, lora_path: Any) -> None:
        """Raises BadInputError for an adapter that is not there."""
        for name in lora_path if isinstance(lora_path, (list, tuple)) else [lora_path]:
            if name is not None and name not in self._loaded | self._served:
                raise BadInputError(
                    f"there is no LoRA adapter {name!r}; loaded are {sorted(self._loaded | self._served)}"
                )


def _names_of(lora_paths: Any) -> set[str]:
    """Of SGLang's server argument: a dictionary, or a list of `name=path`, paths or dictionaries."""
    if isinstance(lora_paths, Mapping):
        return {str(name) for name in lora_paths}
    found = set()
    for item in lora_paths or ():
        found.add(str(item.get("lora_name")) if isinstance(item, Mapping) else str(item).partition("=")[0])
    return found
