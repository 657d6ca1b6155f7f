"""The mirror: a copy of the trainer's arena on a server's machine, which all TP ranks of that machine map."""

from __future__ import annotations

import contextlib
import zlib
from typing import TYPE_CHECKING

from verl_server.errors import VerlServerError
from verl_server.platforms.available_memory import available_memory
from verl_server.weights.layout import PAGE_BYTES
from verl_server.weights.memory_file import SharedMemoryFile, SharedWords, memory_contains

if TYPE_CHECKING:
    import torch


class Mirror:
    """One process's mapping of a mirror and of its progress counter. The machine's leading receiver creates the mirror.

    The progress counter is the number of chunks of the current update that have been received.
    """

    FAILED = 0xFFFFFFFF
    """Progress of an update that failed."""

    def __init__(self, file: SharedMemoryFile, size_bytes: int) -> None:
        self._file, self.location = file, file.location
        self.view = memoryview(file.memory)[:size_bytes]
        """All bytes of the copy, at the same offsets as in the arena."""
        self._progress = SharedWords(file.memory, size_bytes, 1)

    @classmethod
    def create(cls, size_bytes: int) -> Mirror:
        """Create a mirror of an arena of that size.

        Raises VerlServerError if that memory is not available (the kernel would kill the server while the weights
        arrive), and the errors of `SharedMemoryFile.create`.
        """
        if size_bytes > (available := available_memory()):
            raise VerlServerError(
                f"the mirror of the weights takes {size_bytes} bytes of memory, but only {available} bytes are "
                "available on the server's machine or in its container; free memory, raise the limit of the container, "
                "or use WeightsConfig(transport='distributed_buckets')"
            )
        return cls(SharedMemoryFile.create("mirror", size_bytes + PAGE_BYTES), size_bytes)

    @classmethod
    def open(cls, location: str, size_bytes: int) -> Mirror:
        """Map the mirror of another process on this machine. Raises OSError if this process cannot open it."""
        return cls(SharedMemoryFile.open(location, size_bytes + PAGE_BYTES), size_bytes)

    def exists(self) -> bool:
        """Whether the process that created the mirror is alive. A zombie has no open files, so it counts as dead."""
        return self._file.exists()

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this memory."""
        return memory_contains(self._file.memory, tensor)

    def set_progress(self, update_id: str, num_chunks: int) -> None:
        """Record that `num_chunks` chunks of an update are in the mirror, or `FAILED`."""
        self._progress[0] = zlib.crc32(update_id.encode()) << 32 | num_chunks

    def progress(self, update_id: str) -> int:
        """Number of chunks of an update that are in the mirror, or `FAILED`."""
        word = self._progress[0]
        return word & 0xFFFFFFFF if word >> 32 == zlib.crc32(update_id.encode()) else 0

    def close(self) -> None:
        """Close the mapping and the file."""
        self._progress.release()
        with contextlib.suppress(BufferError):
            self.view.release()
        self._file.close()
