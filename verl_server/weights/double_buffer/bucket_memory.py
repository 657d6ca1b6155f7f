"""The memory of the two buckets: the protocol, and buckets in host memory."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, Protocol

from verl_server.weights.device.pinned_memory import PinnedMemory
from verl_server.weights.memory_file import memory_contains

if TYPE_CHECKING:
    import torch


class BucketMemory(Protocol):
    """The memory of two buckets, on the host or on a GPU."""

    def view(self, bucket: int) -> Any:
        """An object for bucket 0 or 1 that lives as long as any tensor in the bucket's memory."""

    def as_tensor(self, view: Any) -> torch.Tensor:
        """The bucket of a view as a uint8 tensor, without a copy."""

    def synchronize(self) -> None:
        """Wait until all copies that were started are finished."""

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this memory."""

    def pin(self) -> None:
        """Prepare the memory for asynchronous copies between a GPU and this memory, if it is host memory."""

    def close(self) -> None:
        """Release the memory, if this object owns it."""


class HostBucketMemory:
    """Two buckets in `memory`, which another object owns, from byte `start` on."""

    def __init__(self, memory: mmap.mmap, start: int, bucket_bytes: int) -> None:
        self._memory, self._start, self._bucket_bytes = memory, start, bucket_bytes
        self._pinned = PinnedMemory(memory)

    def view(self, bucket: int) -> memoryview:
        start = self._start + bucket * self._bucket_bytes
        return memoryview(self._memory)[start : start + self._bucket_bytes]

    def as_tensor(self, view: memoryview) -> torch.Tensor:
        import torch

        return torch.frombuffer(view, dtype=torch.uint8)

    def synchronize(self) -> None:
        """Nothing to do: the writer and the readers wait for their own copies from and to a GPU."""

    def contains(self, tensor: torch.Tensor) -> bool:
        return memory_contains(self._memory, tensor)

    def pin(self) -> None:
        """Pin the memory, so that copies from and to a GPU of this process are asynchronous."""
        self._pinned.pin()

    def close(self) -> None:
        """Unpin the memory. Its owner closes it."""
        self._pinned.unpin()
