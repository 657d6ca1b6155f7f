"""The interface of the two ways to load an update into a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from verl_server.vllm_server.loading.reloaded_modules import Unwritten

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
