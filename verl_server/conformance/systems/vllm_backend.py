"""A weight transfer backend for vLLM that does what vLLM's documentation says, and nothing else.

The system `vllm` copies this file into a folder of its own and registers it there as a plugin (`vllm.general_plugins`),
as a user of vLLM would do. So this file imports no module of this library. It runs in vLLM's processes only.
"""

from __future__ import annotations

from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "safetensors_file"


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The backend has no settings."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The file with the tensors of one update, by checkpoint name."""

    path: str


class FileEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads the tensors of a safetensors file through vLLM's layerwise reload."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing has to be prepared."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing has to be released."""


def register() -> None:
    """Entry point of the plugin. vLLM calls it in each of its processes."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileEngine)
