"""Transport for a trainer and servers on one machine: every TP rank reads the trainer's arena in place."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator

import torch

from verl_server.types import Json
from verl_server.weights.arena import (
    MAX_TP_RANKS,
    TABLE_OFFSET,
    ReceivedReport,
    Report,
    SharedReports,
    memory_contains,
    open_memory_file,
    tensor_views,
)
from verl_server.weights.device import PinnedMemory
from verl_server.weights.transports import base
from verl_server.weights.transports.base import ReceivingRank, UpdateAttempt, require_few_receivers


class Sender(base.Sender):
    """Lets the servers read the arena in place; nothing is sent."""

    name = "shared_memory"

    def prepare(self, attempt: UpdateAttempt) -> None:
        require_few_receivers(attempt.members)

    def loader_message(self, attempt: UpdateAttempt, member_index: int) -> Json:
        return {
            "arena_locations": list(self.settings.arena_locations) or [self.arena.location],
            "ranks_per_node": self.settings.ranks_per_node or MAX_TP_RANKS,
            "size_bytes": self.layout.size_bytes,
            "table_bytes": len(self.layout.table(attempt.names)),
            "checksums_offset": self.layout.checksums_offset,
            "num_tensors": len(self.layout.slots),
            "first_receiver": attempt.first_receivers[member_index],
            "num_sharing": self.settings.ranks_per_node or attempt.members[member_index].tp_size,
        }

    def read_report(self, attempt: UpdateAttempt, receiver: int) -> ReceivedReport | None:
        num_checksums = len(attempt.names) if attempt.verify else 0
        return self.arena.reports.read(receiver, attempt.id, num_checksums)

    def receiving_ranks(self, attempt: UpdateAttempt) -> Iterator[ReceivingRank]:
        """The TP ranks that write their reports into this arena: with several nodes, those of this node."""
        ranks_per_node = self.settings.ranks_per_node
        for rank in super().receiving_ranks(attempt):
            if not ranks_per_node or rank.tp_rank // ranks_per_node == self.settings.node_rank:
                yield rank


class ArenaMapping:
    """The arena as a TP rank of a server maps it, and views of the tensors in the last table.

    The tensors of a CPU are in a second, private mapping: what a model's loading code writes to them stays in this
    process. The next update then finds the written page instead of the staged one, and the checksums differ. With an
    accelerator there is no private mapping: the kernel may count its whole size as used memory (overcommit).
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.memory = mmap.mmap(fd, size_bytes)
        self._private_memory: mmap.mmap | None = None
        self._fd = os.dup(fd)
        self._pinned = PinnedMemory(self.memory)
        self._table = b""
        self._tensors: list[tuple[str, torch.Tensor]] = []

    def tensors(self, table_bytes: int) -> list[tuple[str, torch.Tensor]]:
        """The named tensors of the current table, which has that many bytes."""
        table = self._read_table(table_bytes)
        if self._private_memory is None:
            self._private_memory = mmap.mmap(self._fd, len(self.memory), flags=mmap.MAP_PRIVATE)
        if table != self._table:
            self._tensors = list(tensor_views(memoryview(self._private_memory), json.loads(table)))
            self._table = table
        return self._tensors

    def shared_tensors(self, table_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors for a caller that does not write to them, in the shared mapping, which is pinned.

        The private mapping is not pinned: that would copy its pages.
        """
        self._pinned.pin()
        return tensor_views(memoryview(self.memory), json.loads(self._read_table(table_bytes)))

    def _read_table(self, table_bytes: int) -> bytes:
        return self.memory[TABLE_OFFSET : TABLE_OFFSET + table_bytes]

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this memory."""
        return any(memory_contains(memory, tensor) for memory in self._mapped())

    def _mapped(self) -> list[mmap.mmap]:
        return [memory for memory in (self.memory, self._private_memory) if memory is not None]

    def close(self) -> None:
        """Close the mappings."""
        self._pinned.unpin()
        self._tensors = []
        os.close(self._fd)
        for memory in self._mapped():
            with contextlib.suppress(BufferError):
                memory.close()


_mappings: dict[str, ArenaMapping] = {}
"""The last mapping, by location. It is kept because a new mapping of a gigabyte costs its page faults."""


def map_arena(location: str, size_bytes: int) -> ArenaMapping:
    """Map an arena, or return the mapping of the last update. Raises OSError if the trainer's process has ended."""
    fd = open_memory_file(location)
    try:
        if location not in _mappings:
            while _mappings:
                _mappings.popitem()[1].close()
            _mappings[location] = ArenaMapping(fd, size_bytes)
        return _mappings[location]
    finally:
        os.close(fd)


class Receiver(base.Receiver):
    """Reads the tensors in the mapped arena."""

    def __init__(self, message: Json, tp_rank: int) -> None:
        super().__init__(message, tp_rank)
        self._mapping = map_arena(
            message["arena_locations"][tp_rank // message["ranks_per_node"]], message["size_bytes"]
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._mapping.tensors(self.message["table_bytes"]))

    def tensors_to_copy(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._mapping.shared_tensors(self.message["table_bytes"])

    @property
    def num_sharing(self) -> int:
        return int(self.message["num_sharing"])

    def contains(self, tensor: torch.Tensor) -> bool:
        return self._mapping.contains(tensor)

    def send_report(self, report: Report, checksums: list[int]) -> None:
        reports = SharedReports(self._mapping.memory, self.message["checksums_offset"], self.message["num_tensors"])
        reports.write(self.message["first_receiver"] + self.tp_rank, report, checksums)
