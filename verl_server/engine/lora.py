"""Names of the LoRA adapters that an engine's servers have, on rank 0.

The engine refuses requests for other names, because SGLang takes an unknown `lora_path` for a model on the Hugging Face
Hub and tries to download it.
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
    """The LoRA adapters of one engine: loads, replaces and removes them by name."""

    def __init__(self, lora_paths: Any) -> None:
        """`lora_paths`: SGLang's server argument with the adapters that the servers load when they start."""
        self._started_with = _names_in(lora_paths)
        self._loaded: set[str] = set()

    def load(self, backend: Backend, name: str, tensors: Mapping[str, torch.Tensor], config: Json) -> None:
        """Load an adapter. An adapter of the same name is removed first, when no request uses it any more.

        When the load fails, no adapter has the name, and requests for it are refused.
        """
        if name in self._loaded:
            self._loaded.discard(name)
            backend.unload_lora_adapter(name)
        backend.load_lora_adapter(name, tensors, config)
        self._loaded.add(name)

    def unload(self, backend: Backend, name: str) -> None:
        """Remove an adapter. Raises BadInputError when there is no adapter of that name."""
        self.require(name)
        self._loaded.discard(name)
        self._started_with.discard(name)
        backend.unload_lora_adapter(name)

    def require(self, lora_path: Any) -> None:
        """Raise BadInputError unless all adapters that a request names are loaded. `lora_path`: a name or a list."""
        known = self._loaded | self._started_with
        for name in lora_path if isinstance(lora_path, (list, tuple)) else [lora_path]:
            if name is not None and name not in known:
                raise BadInputError(
                    f"there is no LoRA adapter {name!r}; loaded are {sorted(known)}. Load it with load_lora_adapter"
                )


def _names_in(lora_paths: Any) -> set[str]:
    """Names in SGLang's server argument `lora_paths`: a dict by name, or a list of `name=path`, paths or dicts."""
    if isinstance(lora_paths, Mapping):
        return {str(name) for name in lora_paths}
    names = set()
    for item in lora_paths or ():
        names.add(str(item.get("lora_name")) if isinstance(item, Mapping) else str(item).partition("=")[0])
    return names
