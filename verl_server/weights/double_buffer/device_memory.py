"""Buckets in GPU memory, which another process of the same machine opens by their CUDA IPC handle.

The memory comes from `cudaMalloc` itself. torch's allocator hands out parts of larger blocks, its expandable segments
have no IPC handle, and its own sharing keeps counters in /dev/shm that stay there when a process is killed.
This module has not been run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

from verl_server.errors import UnsupportedError, VerlServerError
from verl_server.weights.double_buffer.layout import NUM_BUCKETS
from verl_server.weights.layout import round_up

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE."""
ALLOCATION_BYTES = 2 << 20
"""Allocations are multiples of this size. Smaller ones share a block, which an IPC handle would open as a whole
(CUDA's guide on interprocess communication)."""


class _MemoryRange:
    """A range of device memory, described by `__cuda_array_interface__` (version 3)."""

    def __init__(self, pointer: int, size: int) -> None:
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "data": (pointer, False), "shape": (size,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip


class DeviceBucketMemory:
    """Two buckets on the current GPU. `create` allocates the memory; `open` maps another process's memory."""

    def __init__(self, pointer: int, bucket_bytes: int, owned: bool) -> None:
        import torch

        self._pointer, self._bucket_bytes, self._owned = pointer, bucket_bytes, owned
        self._device = torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def create(cls, bucket_bytes: int) -> DeviceBucketMemory:
        """Allocate two buckets. Raises UnsupportedError without a usable GPU, VerlServerError if its memory is full."""
        runtime = _cuda_runtime()
        size = round_up(NUM_BUCKETS * bucket_bytes, ALLOCATION_BYTES)
        pointer = _call(runtime.cudaMalloc, size)
        return cls(int(pointer), bucket_bytes, owned=True)

    @classmethod
    def open(cls, handle: bytes, bucket_bytes: int) -> DeviceBucketMemory:
        """Map the buckets of another process, on this GPU or on a GPU that this one can access."""
        runtime = _cuda_runtime()
        ipc_handle = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(ipc_handle.getPtr(), handle, HANDLE_BYTES)
        pointer = _call(runtime.cudaIpcOpenMemHandle, ipc_handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        return cls(int(pointer), bucket_bytes, owned=False)

    def handle(self) -> bytes:
        """The CUDA IPC handle with which another process opens the buckets."""
        ipc_handle = _call(_cuda_runtime().cudaIpcGetMemHandle, self._pointer)
        return ctypes.string_at(ipc_handle.getPtr(), HANDLE_BYTES)

    def view(self, bucket: int) -> _MemoryRange:
        return _MemoryRange(self._pointer + bucket * self._bucket_bytes, self._bucket_bytes)

    def as_tensor(self, view: _MemoryRange) -> torch.Tensor:
        import torch

        flat = torch.as_tensor(view, device=self._device)
        if flat.data_ptr() != view.pointer:
            raise VerlServerError("torch copied the staging memory of another GPU instead of mapping it")
        return flat

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)  # models load on streams of their own

    def contains(self, tensor: torch.Tensor) -> bool:
        end = self._pointer + NUM_BUCKETS * self._bucket_bytes
        return bool(tensor.is_cuda and self._pointer <= tensor.data_ptr() < end)

    def close(self) -> None:
        pointer, self._pointer = self._pointer, 0
        if pointer:
            runtime = _cuda_runtime()
            with contextlib.suppress(VerlServerError):  # the driver may be gone at the end of a process
                _call(runtime.cudaFree if self._owned else runtime.cudaIpcCloseMemHandle, pointer)


def _cuda_runtime() -> Any:
    """NVIDIA's Python bindings of the CUDA runtime, set to torch's current device. Raises UnsupportedError."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("the weight transport 'cuda_ipc' needs an NVIDIA GPU on the trainer and on the server")
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise UnsupportedError(f"the weight transport 'cuda_ipc' needs the package cuda-bindings: {error}") from error
    _call(runtime.cudaSetDevice, torch.cuda.current_device())
    return runtime


def _call(function: Any, *arguments: Any) -> Any:
    """Call a function of the CUDA runtime and return its result.

    Raises VerlServerError with CUDA's name of the error.
    """
    status, *results = function(*arguments)
    if int(status) != 0:
        raise VerlServerError(f"{function.__name__} failed: {status.name}")
    return results[0] if results else None
