"""Memory files: anonymous memory that one process creates and other processes of the same user map.

A memory file (`memfd_create`) has no name in /dev/shm, so nothing is left behind when a process is killed, and a small
/dev/shm (64 MB in a default container) does not limit it. Other processes of the same user open it as `/proc/PID/fd/N`
while its owner runs. A mapping stays valid after the owner has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import TYPE_CHECKING

from verl_server.errors import UnsupportedError, VerlServerError

if TYPE_CHECKING:
    import torch


class SharedMemoryFile:
    """One process's mapping of a memory file. `create` makes the file; `open` maps the file of another process."""

    def __init__(self, fd: int, size_bytes: int, path: str) -> None:
        self._fd, self.path = fd, path
        try:
            self.memory = mmap.mmap(fd, size_bytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise VerlServerError(f"cannot map {size_bytes} bytes of staging memory: {error}") from error

    @classmethod
    def create(cls, name: str, size_bytes: int) -> SharedMemoryFile:
        """Create a file that this process owns. The machine provides a page when it is first written.

        Raises UnsupportedError on a system without `memfd_create`, VerlServerError if the memory cannot be mapped.
        """
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError("staging memory for weights needs memfd_create, which only Linux has")
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, size_bytes)
        return cls(fd, size_bytes, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str, size_bytes: int) -> SharedMemoryFile:
        """Map the file of another process on this machine. Raises OSError if this process cannot open it."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), size_bytes, path)

    @property
    def inode(self) -> int:
        """Inode of the file. Together with `path` it identifies the file on this machine."""
        return os.fstat(self._fd).st_ino

    def close(self) -> None:
        """Close the file. The mapping is closed when no object uses it any more."""
        with contextlib.suppress(BufferError):
            self.memory.close()
        os.close(self._fd)


def memory_contains(memory: mmap.mmap, tensor: torch.Tensor) -> bool:
    """Whether a tensor is in this memory."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return bool(start <= tensor.data_ptr() < start + len(memory))
