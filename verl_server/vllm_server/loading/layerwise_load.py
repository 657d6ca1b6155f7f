"""A load with vLLM's own layerwise reload, which knows every model. Faults on a CPU are in `reloaded_modules.py`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from verl_server.vllm_server.loading import reloaded_modules

if TYPE_CHECKING:
    from verl_server.vllm_server.loading.weight_load import NamedTensors, ReadTensors


class LayerwiseLoad:
    """Loads updates with vLLM's reload. Between `start` and `finish` modules have no memory."""

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._kernels: dict[str, tuple[Any, Any]] = {}
        self._in_place: reloaded_modules.InPlaceTensors | None = None

    def start(self) -> None:
        """Move all modules to the meta device. Generation must be paused."""
        self._kernels = reloaded_modules.forget_expert_kernels(self._model)
        initialize_layerwise_reload(self._model)
        self._in_place = reloaded_modules.InPlaceTensors(self._model)

    def load(self, tensors: NamedTensors, read: ReadTensors) -> None:
        """Load the tensors. vLLM reads those of a module when the last of them arrives."""
        self._model.load_weights(read(tensors))

    def finish(self, *, is_loaded: bool) -> reloaded_modules.Unwritten:
        """Give all modules memory again. All steps are made, also if one of them raises."""
        untouched: dict[str, Any] = {}
        incomplete: list[str] = []
        with contextlib.ExitStack() as last_steps:
            last_steps.callback(lambda: reloaded_modules.repack_tied(self._model, untouched))
            last_steps.callback(lambda: reloaded_modules.put_back_expert_kernels(self._kernels))
            last_steps.callback(lambda: finalize_layerwise_reload(self._model, self._model_config))
            in_place, self._in_place = self._in_place, None
            if in_place is None:
                raise RuntimeError("the session was not started")
            incomplete = reloaded_modules.drop_unfinished(self._model, in_place, keep_padded=is_loaded)
            untouched.update(reloaded_modules.untouched_modules(self._model))
        self._kernels = {}
        return reloaded_modules.Unwritten(list(untouched), incomplete)
