"""A double buffer: staging memory for weights that is smaller than the model.

A double buffer is two buckets and a block of host memory with the progress counters, the tables of the buckets, and the
reports. The buckets follow that block (`HostBucketMemory`) or are on a GPU (`DeviceBucketMemory`). The writers are
trainer ranks. Each writes its own part of every tensor, all in the same order, so all compute the same offsets. The
readers are TP ranks of servers, and the leading trainer rank, which computes checksums.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from verl_server.weights.double_buffer.bucket_memory import BucketMemory, HostBucketMemory
from verl_server.weights.double_buffer.layout import DoubleBufferLayout
from verl_server.weights.double_buffer.progress import ProgressCounters
from verl_server.weights.memory_file import SharedMemoryFile
from verl_server.weights.reports import SharedReports


class DoubleBuffer:
    """One process's mapping of a double buffer. `create` makes the memory; `open` maps another process's memory."""

    def __init__(self, file: SharedMemoryFile, layout: DoubleBufferLayout) -> None:
        self._file, self.layout, self._memory, self.location = file, layout, file.memory, file.location
        self.reports = SharedReports(self._memory, layout.checksums_offset, layout.num_tensors)
        self.buckets: BucketMemory = HostBucketMemory(self._memory, layout.buckets_offset, layout.bucket_bytes)

    @classmethod
    def create(cls, layout: DoubleBufferLayout) -> DoubleBuffer:
        """Create a double buffer that this process owns. Raises the errors of `SharedMemoryFile.create`."""
        return cls(SharedMemoryFile.create("double_buffer", layout.size_bytes), layout)

    @classmethod
    def open(cls, location: str, layout: DoubleBufferLayout) -> DoubleBuffer:
        """Map the double buffer of another process on this machine. Raises OSError if this process cannot open it."""
        return cls(SharedMemoryFile.open(location, layout.size_bytes), layout)

    def progress(self, update_number: int) -> ProgressCounters:
        """The progress counters of one update."""
        return ProgressCounters(self._memory, self.layout, update_number)

    def write_table(self, bucket: int, rows: Sequence[Any]) -> None:
        """Write the table of bucket 0 or 1. `rows`: name, byte offset in the bucket, shape and dtype of each tensor."""
        raw = json.dumps(rows).encode().ljust(self.layout.table_bytes)
        start = self.layout.tables_offset + bucket * self.layout.table_bytes
        self._memory[start : start + self.layout.table_bytes] = raw

    def read_table(self, bucket: int) -> list[Any]:
        """The rows that `write_table` wrote."""
        start = self.layout.tables_offset + bucket * self.layout.table_bytes
        return list(json.loads(self._memory[start : start + self.layout.table_bytes]))

    def owner_is_alive(self) -> bool:
        """Whether the process that created the memory is alive. A zombie has no open files, so it counts as dead."""
        return self._file.exists()

    def close(self) -> None:
        """Release the buckets, the mapping and the file."""
        self.buckets.close()
        self._file.close()
