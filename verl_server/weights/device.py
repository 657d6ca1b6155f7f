"""What a weight update does with accelerators: the order of streams, copies, and pinned memory.

It does the plain thing, or nothing, where tensors are on the CPU. It has not been run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import torch

logger = logging.getLogger(__name__)


# -- Loading ----------------------------------------------------------------------------------------


def copies_on(device: torch.device, named_tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    """Copies of host tensors on an accelerator. The next copy runs while the model loads the present one.

    What a model writes to a tensor while it loads stays in the copy. The generator holds a reference to a host tensor
    until its copy is finished: a bucket is filled again when no reference to it is left. Tensors that are on an
    accelerator already are passed on. Where the accelerator has no memory for a copy, the copy is on the host.
    """
    module = torch.get_device_module(device)
    stream = module.Stream(device)
    ahead: Any = None

    def start(name: str, tensor: torch.Tensor) -> Any:
        try:
            with module.stream(stream):
                copy = tensor.to(device, non_blocking=True)
                return name, tensor, copy, stream.record_event()
        except torch.OutOfMemoryError:
            return name, tensor, tensor.clone(), None

    def finish(started: Any) -> tuple[str, torch.Tensor]:
        name, _, copy, event = started
        if event is not None:
            event.synchronize()
            copy.record_stream(module.current_stream(device))
        return name, copy

    for name, tensor in named_tensors:
        if tensor.device.type != "cpu":
            # The model holds this tensor until it gets the next one. A reader that is asked for a tensor in advance
            # would wait for the bucket of a tensor that the model still holds.
            yield name, tensor
            del tensor
            continue
        started = start(name, tensor)
        del tensor
        if ahead is not None:
            yield finish(ahead)
        ahead, started = started, None
    if ahead is not None:
        yield finish(ahead)


# -- Pinned memory ----------------------------------------------------------------------------------
# Host memory that is registered with the CUDA driver, so that copies need no buffer of the driver's own.


class PinnedMemory:
    """The registration of a mapping. Registering makes the machine provide all of its pages."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._address = 0
        """Address of the registered mapping. 0: not registered."""
        self._was_tried = False

    def pin(self) -> bool:
        """Register the mapping, once. Returns whether it is registered: not without a GPU, or if CUDA refuses it.

        Copies work in any case. Without registration they are slower.
        """
        if self._was_tried or not torch.cuda.is_available():
            return self._address != 0
        self._was_tried = True
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        status = int(_cuda_runtime().cudaHostRegister(address, len(self._memory), 0))
        if status == 0:
            self._address = address
        else:
            logger.warning("CUDA does not pin the staging memory (error %d): copies are slower", status)
            with contextlib.suppress(RuntimeError):  # torch would raise CUDA's last error in a later operation
                torch.ones(1, device="cuda")
        return self._address != 0

    def unpin(self) -> None:
        """End the registration. To be called before the mapping is closed."""
        address, self._address = self._address, 0
        if address:
            _cuda_runtime().cudaHostUnregister(address)


def _cuda_runtime() -> Any:
    """torch's own binding of the CUDA runtime."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


# -- Staging copies ---------------------------------------------------------------------------------


class StagingCopies:
    """Copies tensors into staging memory. `wait` returns when all copies that were started are finished.

    A copy from an accelerator runs while the next tensor is prepared, and a tensor of another dtype is cast on the
    accelerator first, if it has memory for that: float32 parameters of a bfloat16 model then need half of the bus.
    `pin` is called before the first copy from an accelerator to the host.
    """

    def __init__(self, pin: Callable[[], object] = lambda: None) -> None:
        self._pin = pin
        self._is_pinned = False
        self._devices: set[torch.device] = set()
        """The accelerators from which copies may still run."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Start to copy `source` to `target`, unless they are the same memory.

        A trainer may keep its parameters in the arena. `source` must not be changed before `wait`. Returns a tensor
        that has the elements of `target` now already: `target`, or `source` in the dtype of `target`.
        """
        is_same = target.data_ptr() == source.data_ptr() and target.stride() == source.stride()
        if (is_same and target.dtype == source.dtype) or not source.numel():
            return target
        if source.device.type == "cpu":
            target.copy_(source)
            return target
        if target.device.type == "cpu":
            if not self._is_pinned:
                self._pin()
                self._is_pinned = True
            try:
                source = source.to(target.dtype)
            except torch.OutOfMemoryError:
                target.copy_(source)  # a blocking copy casts on the CPU
                return target
        target.copy_(source, non_blocking=target.is_contiguous())
        self._devices.add(source.device)
        return source

    def wait(self) -> None:
        """Wait for the copies."""
        for device in self._devices:
            torch.get_device_module(device).current_stream(device).synchronize()
        self._devices.clear()


# -- Streams ----------------------------------------------------------------------------------------
# Order between the stream of the thread that calls an update and the work of another thread.


class CallerOrder:
    """A point in the work that the present thread has given to a tensor's device.

    A new thread has streams of its own. What it reads there may not be computed yet: a trainer may compute on a side
    stream. `continue_here` makes the new thread wait for this point.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
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
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def as_current(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which this thread has `device` as its current device, if there is one.

    A new thread starts with device 0, and `accelerator` would return that.
    """
    return contextlib.nullcontext() if device is None else torch.get_device_module(device).device(device)


def wait_for_device(device: torch.device) -> None:
    """Wait for everything that runs on a device."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
