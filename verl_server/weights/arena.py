"""The arena: staging memory for the whole model. Trainer ranks write it; servers on the same machine read it in place.

The arena is an anonymous memory file (`memfd_create`). It has no name in /dev/shm, so nothing is left behind when a
process is killed, and a small /dev/shm (64 MB in a default container) does not limit it. Other processes of the same
user open it as `/proc/PID/fd/N` while its owner runs. A mapping stays valid after the owner has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

from verl_server.errors import UnsupportedError, VerlServerError
from verl_server.weights.checksum import compute_checksum
from verl_server.weights.layout import TABLE_OFFSET, Layout
from verl_server.weights.reports import SharedReports
from verl_server.weights.views import tensor_view

if TYPE_CHECKING:
    import torch


class Arena:
    """One process's mapping of the staging memory. `create` makes the memory; `open` maps another process's memory."""

    def __init__(self, fd: int, layout: Layout, path: str) -> None:
        self._fd, self._layout, self.path = fd, layout, path
        self._tensors: dict[str, torch.Tensor] = {}
        self._flat: torch.Tensor | None = None
        try:
            self._memory = mmap.mmap(fd, layout.size_bytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise VerlServerError(f"cannot map {layout.size_bytes} bytes of staging memory: {error}") from error
        self.reports = SharedReports(self._memory, layout.checksums_offset, len(layout.slots))

    @classmethod
    def create(cls, layout: Layout) -> Arena:
        """Create an arena that this process owns. The machine provides a page when it is first written.

        Raises UnsupportedError on a system without `memfd_create`, VerlServerError if the memory cannot be mapped.
        """
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError("staging memory for weights needs memfd_create, which only Linux has")
        fd = os.memfd_create("verl_server_arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.size_bytes)
        return cls(fd, layout, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str, layout: Layout) -> Arena:
        """Map the arena of another process on this machine. Raises OSError if this process cannot open it."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), layout, path)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` as a view of the arena: writing the tensor writes the arena."""
        import torch

        if name in self._tensors:
            return self._tensors[name]
        if self._flat is None:
            self._flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        slot = self._layout.slots[name]
        self._tensors[name] = tensor_view(self._flat, slot.offset, slot.spec)
        return self._tensors[name]

    def write_table(self, names: list[str]) -> int:
        """Write the table of the current update. Returns its length in bytes."""
        table = self._layout.table(names)
        self._memory[TABLE_OFFSET : TABLE_OFFSET + len(table)] = table
        return len(table)

    def checksum(self, name: str) -> int:
        """The checksum of the tensor `name` as it is in the arena now."""
        return compute_checksum(self.tensor(name))

    @property
    def memory(self) -> memoryview:
        """All bytes of the arena."""
        return memoryview(self._memory)

    def close(self) -> None:
        """Close the file. The mapping is closed when no tensor uses it: a trainer may keep its parameters in it."""
        self._tensors.clear()
        self._flat = None
        with contextlib.suppress(BufferError):
            self._memory.close()
        os.close(self._fd)
