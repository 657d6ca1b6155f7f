"""The arena: staging memory for the whole model. Trainer ranks write it; servers on the same machine read it in place.

The arena is a memory file (see `memory_file`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.weights.device.pinned_memory import PinnedMemory
from verl_server.weights.layout import TABLE_OFFSET, Layout
from verl_server.weights.memory_file import SharedMemoryFile
from verl_server.weights.reports import SharedReports
from verl_server.weights.views import tensor_view

if TYPE_CHECKING:
    import torch


class Arena:
    """One process's mapping of the staging memory. `create` makes the memory; `open` maps another process's memory."""

    def __init__(self, file: SharedMemoryFile, layout: Layout) -> None:
        self._file, self._layout, self._memory, self.location = file, layout, file.memory, file.location
        self._tensors: dict[str, torch.Tensor] = {}
        self._flat: torch.Tensor | None = None
        self._pinned = PinnedMemory(self._memory)
        self.reports = SharedReports(self._memory, layout.checksums_offset, len(layout.slots))

    @classmethod
    def create(cls, layout: Layout) -> Arena:
        """Create an arena that this process owns. Raises the errors of `SharedMemoryFile.create`."""
        return cls(SharedMemoryFile.create("arena", layout.size_bytes), layout)

    @classmethod
    def open(cls, location: str, layout: Layout) -> Arena:
        """Map the arena of another process on this machine. Raises OSError if this process cannot open it."""
        return cls(SharedMemoryFile.open(location, layout.size_bytes), layout)

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

    def pin(self) -> None:
        """Pin the memory, so that copies from and to a GPU of this process are asynchronous."""
        self._pinned.pin()

    @property
    def memory(self) -> memoryview:
        """All bytes of the arena."""
        return memoryview(self._memory)

    def close(self) -> None:
        """Close the file. The mapping is closed when no tensor uses it: a trainer may keep its parameters in it."""
        self._pinned.unpin()
        self._tensors.clear()
        self._flat = None
        self._file.close()
