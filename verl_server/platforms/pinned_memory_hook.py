"""Host memory that is not pinned. Pinned memory speeds up copies to a GPU, and torch refuses it without a GPU.

SGLang's LoRA code requests pinned memory for every tensor in host memory. Around its functions the request is ignored.
SGLang registers the host memory of routed experts with CUDA. On a CPU this memory is allocated without registration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _IgnorePinMemory(TorchFunctionMode):
    """Ignores `pin_memory` as a method and as a keyword argument of torch functions."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.pin_memory:
            return args[0]
        return function(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def without_pinned_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of SGLang's LoRA code, and ignore its requests for pinned memory, which torch would refuse."""
    with _IgnorePinMemory():
        return original(*args, **kwargs)


def allocate_unregistered(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Allocate a tensor with SGLang's `alloc_with_host_register`, and do not register it with CUDA."""
    return original(*args, **{**kwargs, "pin_memory": False})
