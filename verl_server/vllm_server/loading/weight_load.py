"""The interface of the two ways to load an update into a model, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from vllm.logger import init_logger

from verl_server.vllm_server.loading.fast_load import FastLoad
from verl_server.vllm_server.loading.layerwise_load import LayerwiseLoad
from verl_server.vllm_server.loading.module_kinds import UnknownModuleError
from verl_server.vllm_server.loading.reloaded_modules import Unwritten

logger = init_logger("vllm.verl_server")

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


def choose_weight_load(model: Any, model_config: Any) -> WeightLoad:
    """The fast load if it knows all modules of the model, otherwise vLLM's own reload. The choice is logged."""
    try:
        load = FastLoad(model)
    except UnknownModuleError as error:
        logger.info("weight updates use vLLM's layerwise reload, because the fast load does not know %s", error)
    except Exception:
        logger.exception("weight updates use vLLM's layerwise reload, because the fast load could not be prepared")
    else:
        logger.info("weight updates use the fast load")
        return load
    return LayerwiseLoad(model, model_config)
