"""Names of the LoRA adapters that an engine's servers have, on rank 0.

The engine refuses requests for other names, because SGLang takes an unknown `lora_path` for a model on the Hugging Face
Hub and tries to download it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_server.adapter.lora_config import lora_paths_by_name
from verl_server.engine.backend import Backend
from verl_server.errors import BadInputError
from verl_server.types import Json
from verl_server.validation import is_list, is_whole_number
from verl_server.weights.unknown_names import fused_with

if TYPE_CHECKING:
    import torch


class LoraAdapters:
    """The LoRA adapters of one engine: loads, replaces and removes them by name."""

    def __init__(self, server_args: Mapping[str, Any]) -> None:
        """`server_args`: SGLang's arguments of the servers, as far as the caller knows them."""
        self._names = set(lora_paths_by_name(server_args.get("lora_paths")))
        self._max_rank = server_args.get("max_lora_rank")
        self._targets = server_args.get("lora_target_modules")

    def load(self, backend: Backend, name: str, tensors: Mapping[str, torch.Tensor], config: Json) -> None:
        """Load a LoRA adapter. A LoRA adapter of the same name is removed first, when no request uses it any more.

        This includes a LoRA adapter that the servers loaded when they started. When the load fails, no LoRA adapter has
        the name, and requests for it are refused. Raises BadInputError, and removes nothing, for a name that is no
        string or is empty, and for a LoRA adapter that is too large for the arguments of the servers.
        """
        if not isinstance(name, str) or not name:
            raise BadInputError(f"the name of a LoRA adapter must be a string, and not empty; got {name!r}")
        self._require_capacity(config)
        if name in self._names:
            self.unload(backend, name)
        backend.load_lora_adapter(name, tensors, config)
        self._names.add(name)

    def unload(self, backend: Backend, name: str) -> None:
        """Remove a LoRA adapter. Raises BadInputError when there is no LoRA adapter of that name."""
        self.require(backend, name)
        self._names.discard(name)
        backend.unload_lora_adapter(name)

    def _require_capacity(self, config: Json) -> None:
        """Raise BadInputError if the servers have no memory for the rank or a target module of a LoRA adapter."""
        rank = config["r"]
        if is_whole_number(self._max_rank) and rank > self._max_rank:
            raise BadInputError(
                f"the LoRA adapter has rank {rank}, but the servers were started with max_lora_rank={self._max_rank}",
                argument="max_lora_rank",
            )
        targets = self._targets
        if not isinstance(targets, (list, tuple, set, frozenset)) or "all" in targets:
            return
        served = {part for target in targets for part in fused_with(str(target).rpartition(".")[2])}
        if unserved := sorted(set(config["target_modules"]) - served):
            raise BadInputError(
                f"the LoRA adapter has the target modules {unserved}, but the servers were started with "
                f"lora_target_modules={sorted(targets)}",
                argument="lora_target_modules",
            )

    def require(self, backend: Backend, lora_path: Any) -> None:
        """Raise BadInputError unless a request's LoRA adapters are all loaded. `lora_path`: a name or a list.

        The backend is asked for a name that this engine has not loaded: an earlier engine, or the start of a fleet, may
        have loaded it.
        """
        for name in lora_path if is_list(lora_path) else [lora_path]:
            if name is None or name in self._names:
                continue
            self._names |= backend.list_lora_adapters()
            if name not in self._names:
                raise BadInputError(
                    f"there is no LoRA adapter {name!r}; loaded are {sorted(self._names)}. "
                    "Load it with load_lora_adapter"
                )
