"""Buckets in GPU memory, which another process of the same machine opens by their CUDA IPC handle.

The memory comes from `cudaMalloc` itself. torch's allocator hands out parts of larger blocks, its expandable segments
have no IPC handle, and its own sharing keeps counters in /dev/shm that stay there when a process is killed.
This module has not been run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from verl_server.errors import UnsupportedError, VerlServerError
from verl_server.weights.arena import round_up
from verl_server.weights.double_buffer.buffer import NUM_BUCKETS

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
    """Two buckets on a GPU. `create` allocates the memory; `open` maps another process's memory.

    `device_index`: number of the GPU on which the memory is, as torch counts GPUs in this process.
    """

    def __init__(self, pointer: int, bucket_bytes: int, device_index: int, owned: bool) -> None:
        self._pointer, self._bucket_bytes, self._owned = pointer, bucket_bytes, owned
        self._device_index = device_index

    @classmethod
    def create(cls, bucket_bytes: int) -> DeviceBucketMemory:
        """Allocate two buckets on torch's current GPU.

        Raises UnsupportedError without a usable GPU, VerlServerError if its memory is full.
        """
        require_cuda()
        index = torch.cuda.current_device()
        with _runtime_on(index) as runtime:
            pointer = _call(runtime.cudaMalloc, round_up(NUM_BUCKETS * bucket_bytes, ALLOCATION_BYTES))
        return cls(int(pointer), bucket_bytes, index, owned=True)

    @classmethod
    def open(cls, handle: bytes, device_uuid: str, bucket_bytes: int) -> DeviceBucketMemory:
        """Map the buckets of another process on the GPU where they are.

        Raises UnsupportedError if this process does not see that GPU.
        """
        require_cuda()
        index = find_device(device_uuid, visible_uuids())
        with _runtime_on(index) as runtime:
            ipc_handle = runtime.cudaIpcMemHandle_t()
            ctypes.memmove(ipc_handle.getPtr(), handle, HANDLE_BYTES)
            pointer = _call(runtime.cudaIpcOpenMemHandle, ipc_handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        return cls(int(pointer), bucket_bytes, index, owned=False)

    @property
    def device_uuid(self) -> str:
        """UUID of the GPU on which the memory is. It is the same in all processes, unlike the GPU's number."""
        return visible_uuids()[self._device_index]

    def handle(self) -> bytes:
        """The CUDA IPC handle with which another process opens the buckets."""
        with _runtime_on(self._device_index) as runtime:
            ipc_handle = _call(runtime.cudaIpcGetMemHandle, self._pointer)
        return ctypes.string_at(ipc_handle.getPtr(), HANDLE_BYTES)

    def view(self, bucket: int) -> _MemoryRange:
        return _MemoryRange(self._pointer + bucket * self._bucket_bytes, self._bucket_bytes)

    def as_tensor(self, view: _MemoryRange) -> torch.Tensor:
        flat = torch.as_tensor(view, device=torch.device("cuda", self._device_index))
        if flat.data_ptr() != view.pointer:
            raise VerlServerError("torch copied the staging memory instead of mapping it")
        return flat

    def synchronize(self) -> None:
        """Wait for this GPU and for the current GPU: models load on streams of their own, also across GPUs."""
        for index in {self._device_index, torch.cuda.current_device()}:
            torch.cuda.synchronize(index)

    def contains(self, tensor: torch.Tensor) -> bool:
        end = self._pointer + NUM_BUCKETS * self._bucket_bytes
        return bool(tensor.is_cuda and self._pointer <= tensor.data_ptr() < end)

    def pin(self) -> None:
        """Nothing to do: the memory is on a GPU."""

    def close(self) -> None:
        pointer, self._pointer = self._pointer, 0
        if pointer:
            with (
                contextlib.suppress(VerlServerError),  # the driver may be gone at the end of a process
                _runtime_on(self._device_index) as runtime,
            ):
                _call(runtime.cudaFree if self._owned else runtime.cudaIpcCloseMemHandle, pointer)


def find_device(uuid: str, visible: Sequence[str]) -> int:
    """The number of the GPU with a UUID among the `visible` GPUs of this process. Raises UnsupportedError."""
    if uuid not in visible:
        raise UnsupportedError(
            f"the weights are staged on the GPU {uuid}, which this server does not see (it sees {list(visible)}): add "
            "the trainer's GPUs to the CUDA_VISIBLE_DEVICES of the server, or use the transport 'shared_memory'"
        )
    return list(visible).index(uuid)


def visible_uuids() -> list[str]:
    """UUIDs of the GPUs that this process sees, by number."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def require_cuda() -> None:
    """Raise UnsupportedError without an NVIDIA GPU or without NVIDIA's Python bindings of the CUDA runtime."""
    if not torch.cuda.is_available():
        raise UnsupportedError("the weight transport 'cuda_ipc' needs an NVIDIA GPU on the trainer and on the server")
    try:
        from cuda.bindings import runtime  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(f"the weight transport 'cuda_ipc' needs the package cuda-bindings: {error}") from error


@contextlib.contextmanager
def _runtime_on(device_index: int) -> Iterator[Any]:
    """NVIDIA's bindings of the CUDA runtime, with a GPU as the current device of this thread in the body."""
    from cuda.bindings import runtime

    with torch.cuda.device(device_index):
        _call(runtime.cudaSetDevice, device_index)
        yield runtime


def _call(function: Any, *arguments: Any) -> Any:
    """Call a function of the CUDA runtime and return its result.

    Raises VerlServerError with CUDA's name of the error.
    """
    status, *results = function(*arguments)
    if int(status) != 0:
        raise VerlServerError(f"{function.__name__} failed: {status.name}")
    return results[0] if results else None
