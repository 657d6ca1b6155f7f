"""Buckets on a GPU, which another process of the same machine opens by their CUDA IPC handle.

The memory is taken by `cudaMalloc` itself: torch's allocator hands out parts of larger blocks, its expandable
segments have no such handle, and its own sharing keeps counters in /dev/shm that stay there when a process is
killed. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

from verl_server.errors import UnsupportedError, VerlServerError
from verl_server.weights.double_buffer import COUNT
from verl_server.weights.layout import aligned

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
#: Smaller allocations share a block, which a handle would open whole (CUDA's guide on interprocess communication).
BLOCK_BYTES = 2 << 20


class _Span:
    """A range of device memory as `__cuda_array_interface__` (version 3) describes it."""

    def __init__(self, pointer: int, size: int) -> None:
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "data": (pointer, False), "shape": (size,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip


class DeviceBuckets:
    """Two buckets on the current device. `create` owns the memory, `open` maps another process's."""

    def __init__(self, pointer: int, bucket_bytes: int, owned: bool) -> None:
        import torch

        self._pointer, self._bucket_bytes, self._owned = pointer, bucket_bytes, owned
        self._device = torch.device("cuda", torch.cuda.current_device())

    @classmethod
    def create(cls, bucket_bytes: int) -> DeviceBuckets:
        """Raises UnsupportedError without a usable GPU, VerlServerError when its memory does not suffice."""
        runtime = _runtime()
        size = aligned(COUNT * bucket_bytes, BLOCK_BYTES)
        pointer = _call(runtime.cudaMalloc, size)
        return cls(int(pointer), bucket_bytes, owned=True)

    @classmethod
    def open(cls, handle: bytes, bucket_bytes: int) -> DeviceBuckets:
        """The buckets of another process, on this GPU or one that it can reach."""
        runtime = _runtime()
        opaque = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(opaque.getPtr(), handle, HANDLE_BYTES)
        pointer = _call(runtime.cudaIpcOpenMemHandle, opaque, runtime.cudaIpcMemLazyEnablePeerAccess)
        return cls(int(pointer), bucket_bytes, owned=False)

    def handle(self) -> bytes:
        """What another process opens them with."""
        opaque = _call(_runtime().cudaIpcGetMemHandle, self._pointer)
        return ctypes.string_at(opaque.getPtr(), HANDLE_BYTES)

    def view(self, which: int) -> _Span:
        return _Span(self._pointer + which * self._bucket_bytes, self._bucket_bytes)

    def flat(self, view: _Span) -> torch.Tensor:
        import torch

        flat = torch.as_tensor(view, device=self._device)
        if flat.data_ptr() != view.pointer:
            raise VerlServerError("torch copied the staging memory of another GPU instead of mapping it")
        return flat

    def settle(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)  # models load on streams of their own

    def holds(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.is_cuda and self._pointer <= tensor.data_ptr() < self._pointer + COUNT * self._bucket_bytes)

    def close(self) -> None:
        pointer, self._pointer = self._pointer, 0
        if pointer:
            runtime = _runtime()
            with contextlib.suppress(VerlServerError):  # the driver may be gone at the end of a process
                _call(runtime.cudaFree if self._owned else runtime.cudaIpcCloseMemHandle, pointer)


def _runtime() -> Any:
    """NVIDIA's bindings of the CUDA runtime, on torch's current device."""
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
    """A call of the CUDA runtime; its result. Raises VerlServerError with CUDA's name for what went wrong."""
    status, *results = function(*arguments)
    if int(status) != 0:
        raise VerlServerError(f"{function.__name__} failed: {status.name}")
    return results[0] if results else None
