"""The mirror: a copy of the trainer's arena on a server's machine, which all TP ranks of that machine map."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import zlib
from typing import TYPE_CHECKING

from verl_server.weights.layout import PAGE_BYTES

if TYPE_CHECKING:
    import torch


class Mirror:
    """One process's mapping of a mirror and of its progress counter. The machine's leading receiver creates the mirror.

    The progress counter is the number of chunks of the current update that have been received.
    """

    FAILED = 0xFFFFFFFF
    """Progress of an update that failed."""

    def __init__(self, fd: int, size_bytes: int, path: str) -> None:
        self._fd, self.path = fd, path
        try:
            self._memory = mmap.mmap(fd, size_bytes + PAGE_BYTES)
        except (OSError, ValueError):
            os.close(fd)
            raise
        self.view = memoryview(self._memory)[:size_bytes]
        """All bytes of the copy, at the same offsets as in the arena."""
        self._progress = memoryview(self._memory)[size_bytes : size_bytes + 8].cast("Q")

    @classmethod
    def create(cls, size_bytes: int) -> Mirror:
        """Create a mirror of an arena of that size."""
        fd = os.memfd_create("verl_server_mirror", os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes + PAGE_BYTES)
        return cls(fd, size_bytes, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str, size_bytes: int) -> Mirror:
        """Map the mirror of another process on this machine. Raises OSError if this process cannot open it."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), size_bytes, path)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this memory."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        return bool(start <= tensor.data_ptr() < start + len(self._memory))

    def set_progress(self, update_id: str, num_chunks: int) -> None:
        """Record that `num_chunks` chunks of an update are in the mirror, or `FAILED`.

        The counter is one word, which is written at once, so that readers never see a half of it.
        """
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
            self._memory.close()
        os.close(self._fd)
