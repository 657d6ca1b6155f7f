"""LoRA without pinned memory: it is for copies to a GPU, and torch refuses it where there is none.

SGLang's LoRA code asks for it wherever it makes a tensor on the host. Around these functions the wish is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Unpinned(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.pin_memory:
            return args[0]
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def without_pinned_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around a function of SGLang."""
    with _Unpinned():
        return original(*args, **kwargs)
