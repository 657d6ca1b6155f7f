"""Staging memory that trainer ranks write and the server reads in place.

An anonymous memory file (`memfd_create`): it has no name in /dev/shm, so nothing can be left behind when a
process is killed, and a small /dev/shm (64 MB in a default container) does not limit it. Others of the same
user open it as `/proc/PID/fd/N` while the owner lives; a mapping once made outlives the owner.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

from verl_server.errors import UnsupportedError, VerlServerError
from verl_server.weights.checksum import checksum_of
from verl_server.weights.layout import TABLE_OFFSET, Layout
from verl_server.weights.reports import Reports
from verl_server.weights.views import tensor_in

if TYPE_CHECKING:
    import torch


class Arena:
    """One mapping of the staging memory. `create` owns the file, `open` maps another process's."""

    def __init__(self, fd: int, layout: Layout, path: str) -> None:
        self._fd, self._layout, self.path = fd, layout, path
        self._tensors: dict[str, torch.Tensor] = {}
        self._flat: torch.Tensor | None = None
        try:
            self._memory = mmap.mmap(fd, layout.size)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise VerlServerError(f"cannot map {layout.size} bytes of staging memory: {error}") from error
        self.reports = Reports(self._memory, layout.sums_at, len(layout.slots))

    @classmethod
    def create(cls, layout: Layout) -> Arena:
        """A new arena, owned by this process. Pages are taken from the machine when first written."""
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError("weights travel through memfd_create, which needs Linux")
        fd = os.memfd_create("verl_server_arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.size)
        return cls(fd, layout, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str, layout: Layout) -> Arena:
        """Map the arena that another process of this machine and user owns. Raises OSError if it cannot."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), layout, path)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`, in place: writing it writes the arena."""
        import torch

        if name in self._tensors:
            return self._tensors[name]
        if self._flat is None:
            self._flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        slot = self._layout.slots[name]
        self._tensors[name] = tensor_in(self._flat, slot.offset, slot.spec)
        return self._tensors[name]

    def write_table(self, names: list[str]) -> int:
        """Put the table of the current update; returns its length in bytes."""
        table = self._layout.table(names)
        self._memory[TABLE_OFFSET : TABLE_OFFSET + len(table)] = table
        return len(table)

    def checksum(self, name: str) -> int:
        """Of the tensor `name` as it stands now."""
        return checksum_of(self.tensor(name))

    @property
    def memory(self) -> memoryview:
        """All of it."""
        return memoryview(self._memory)

    def close(self) -> None:
        """Give the file back, and the mapping once no tensor lives in it any more (a trainer may keep its there)."""
        self._tensors.clear()
        self._flat = None
        with contextlib.suppress(BufferError):
            self._memory.close()
        os.close(self._fd)
