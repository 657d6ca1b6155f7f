"""Order between the stream of the thread that calls an update and the work of another thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class CallerOrder:
    """A point in the work that the present thread has given to a tensor's device.

    A new thread has streams of its own. What it reads there may not be computed yet: a trainer may compute on a side
    stream. `continue_here` makes the new thread wait for this point.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        import torch

        self._device = tensor.device
        self._module: Any = None if tensor.device.type == "cpu" else torch.get_device_module(tensor.device)
        self._event: Any = None
        if self._module is not None:
            self._event = self._module.current_stream(self._device).record_event()

    @contextlib.contextmanager
    def continue_here(self) -> Iterator[None]:
        """Run the body in this thread after that point, on the tensor's device. At its end, wait for the device.

        A new thread starts with device 0 as its current device.
        """
        if self._module is None:
            yield
            return
        with self._module.device(self._device):
            stream = self._module.current_stream(self._device)
            stream.wait_event(self._event)
            yield
            stream.synchronize()


def accelerator() -> torch.device | None:
    """The current accelerator of this thread, if this process can use one."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def as_current(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which this thread has `device` as its current device, if there is one.

    A new thread starts with device 0, and `accelerator` would return that.
    """
    import torch

    return contextlib.nullcontext() if device is None else torch.get_device_module(device).device(device)


def wait_for_device(device: torch.device) -> None:
    """Wait for everything that runs on a device."""
    import torch

    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
