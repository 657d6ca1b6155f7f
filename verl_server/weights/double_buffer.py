"""Weights on their way through two buckets that are filled and emptied in turn: staging smaller than the model.

A lane is the two buckets and a block of host memory with the turns, the tables of the buckets and the
reports. The buckets lie behind that block (`HostBuckets`) or on a GPU (`device.DeviceBuckets`). Writers are
trainer ranks: each puts its own part of every tensor into place, all in the same order, so all compute the
same places. Readers are TP ranks of servers, and the trainer rank that leads the lane and takes checksums.

    bucket n   written once every reader has emptied bucket n - 2, read once every writer has filled it
    total      how many buckets there are, known when the leading writer has ended
    failed     somebody gave up, and why: all others stop waiting
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from verl_server.errors import BadInputError, UnsupportedError, VerlServerError
from verl_server.types import TensorSpec
from verl_server.weights.layout import ALIGNMENT, MAX_TP_RANKS, PAGE, REPORT_BYTES, WORD_BYTES, aligned, nbytes
from verl_server.weights.reports import Reports

if TYPE_CHECKING:
    import torch

COUNT = 2
"""Buckets of a lane."""
BUCKET_BYTES = 256 << 20
MAX_WRITERS = 256
#: The reader that takes checksums on the trainer; the others are TP ranks of servers.
SUMMING = MAX_TP_RANKS

_TOTAL, _FAILED, _FILLED, _EMPTIED = 0, 1, 2, 2 + MAX_WRITERS
_ENDED = 0xFFFFFFFF


@dataclass(frozen=True)
class DoubleBufferLayout:
    """Where everything stands in the memory of a lane, in bytes. Pure; equal on all sides."""

    rows: int
    """Tensors of the model."""
    table_bytes: int
    bucket_bytes: int
    on_host: bool
    """Whether the buckets follow in the same memory."""

    turns_at = REPORT_BYTES * MAX_TP_RANKS
    words_at = turns_at + PAGE
    sums_at = words_at + PAGE

    @property
    def tables_at(self) -> int:
        return aligned(self.sums_at + MAX_TP_RANKS * self.rows * WORD_BYTES, PAGE)

    @property
    def buckets_at(self) -> int:
        return aligned(self.tables_at + COUNT * self.table_bytes, PAGE)

    @property
    def size(self) -> int:
        return self.buckets_at + (COUNT * self.bucket_bytes if self.on_host else 0)


def plan_double_buffer(tensors: Mapping[str, TensorSpec], limit: int | None, on_host: bool) -> DoubleBufferLayout:
    """The layout for a model. `limit`: bytes that the two buckets may take, None for `BUCKET_BYTES` each.

    Raises BadInputError when the largest tensor does not fit into one bucket of that size.
    """
    largest = aligned(max(1, *(nbytes(spec) for spec in tensors.values())), PAGE)
    bucket_bytes = max(BUCKET_BYTES, largest) if limit is None else limit // COUNT // PAGE * PAGE
    if bucket_bytes < largest:
        raise BadInputError(
            f"max_staging_bytes={limit} is too little: the model's largest tensor has {largest} bytes, and two of "
            f"that size must fit ({COUNT * largest} bytes)"
        )
    rows = [[name, 2**53, spec.shape, spec.dtype] for name, spec in tensors.items()]
    total = sum(aligned(nbytes(spec), ALIGNMENT) for spec in tensors.values())
    table_bytes = aligned(len(json.dumps(rows)), PAGE)
    enough = max(largest, aligned(total // COUNT, PAGE))
    return DoubleBufferLayout(len(tensors), table_bytes, min(bucket_bytes, enough), on_host)


class ProgressCounters:
    """The counters of one update. Each has one writer; a word is written at once and carries the update's number."""

    def __init__(self, memory: mmap.mmap, layout: DoubleBufferLayout, number: int) -> None:
        start = layout.turns_at
        self._words = memoryview(memory)[start : start + PAGE].cast("Q")
        self._text = memoryview(memory)[layout.words_at : layout.words_at + PAGE]
        self._number = number

    def _get(self, index: int) -> int:
        word = self._words[index]
        return word & _ENDED if word >> 32 == self._number else 0

    def _set(self, index: int, value: int) -> None:
        self._words[index] = self._number << 32 | value

    def filled(self, writer: int) -> int:
        return self._get(_FILLED + writer)

    def fill(self, writer: int, count: int) -> None:
        self._set(_FILLED + writer, count)

    def emptied(self, reader: int) -> int:
        return self._get(_EMPTIED + reader)

    def empty(self, reader: int, count: int) -> None:
        """0 says that the reader is there."""
        self._set(_EMPTIED + reader, count)

    def is_here(self, reader: int) -> bool:
        return self._words[_EMPTIED + reader] >> 32 == self._number

    @property
    def total(self) -> int | None:
        """Buckets of the whole update, None while it is not known."""
        return self._get(_TOTAL) - 1 if self._get(_TOTAL) else None

    def end(self, writer: int, total: int | None) -> None:
        """That writer has written all that it has; the leading one says how many buckets there are."""
        if total is not None:
            self._set(_TOTAL, total + 1)
        self._set(_FILLED + writer, _ENDED)

    def fail(self, words: str) -> None:
        """Tell everybody to stop waiting. The first failure counts."""
        if self.failure is None:
            raw = words.encode()[: PAGE - 4]
            self._text[: len(raw) + 1] = raw + b"\0"
            self._set(_FAILED, 1)

    @property
    def failure(self) -> str | None:
        if not self._get(_FAILED):
            return None
        return bytes(self._text).partition(b"\0")[0].decode(errors="replace")


class Buckets(Protocol):
    """The memory of two buckets."""

    def view(self, which: int) -> Any:
        """One of the two, as an object that lives as long as any tensor in it."""

    def flat(self, view: Any) -> torch.Tensor:
        """It as bytes, in place."""

    def settle(self) -> None:
        """Return when all copies that were begun are done."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lives in it."""

    def close(self) -> None: ...


class HostBuckets:
    """Two buckets from `start` on in memory that is somebody else's."""

    def __init__(self, memory: mmap.mmap, start: int, bucket_bytes: int) -> None:
        self._memory, self._start, self._bucket_bytes = memory, start, bucket_bytes

    def view(self, which: int) -> memoryview:
        start = self._start + which * self._bucket_bytes
        return memoryview(self._memory)[start : start + self._bucket_bytes]

    def flat(self, view: memoryview) -> torch.Tensor:
        import torch

        return torch.frombuffer(view, dtype=torch.uint8)

    def settle(self) -> None:
        """A copy to host memory is done when it returns."""

    def holds(self, tensor: torch.Tensor) -> bool:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        return bool(start <= tensor.data_ptr() < start + len(self._memory))

    def close(self) -> None:
        """The memory goes with the last tensor in it."""


class DoubleBuffer:
    """One mapping of a lane. `create` owns the memory, `open` maps another process's."""

    def __init__(self, fd: int, layout: DoubleBufferLayout, path: str) -> None:
        self._fd, self.layout, self.path = fd, layout, path
        try:
            self._memory = mmap.mmap(fd, layout.size)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise VerlServerError(f"cannot map {layout.size} bytes of staging memory: {error}") from error
        self.reports = Reports(self._memory, layout.sums_at, layout.rows)
        self.buckets: Buckets = HostBuckets(self._memory, layout.buckets_at, layout.bucket_bytes)

    @classmethod
    def create(cls, layout: DoubleBufferLayout) -> DoubleBuffer:
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError("weights travel through memfd_create, which needs Linux")
        fd = os.memfd_create("verl_server_lane", os.MFD_CLOEXEC)
        os.ftruncate(fd, layout.size)
        return cls(fd, layout, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str, layout: DoubleBufferLayout) -> DoubleBuffer:
        """Raises OSError when it cannot be reached from here."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), layout, path)

    @property
    def inode(self) -> int:
        return os.fstat(self._fd).st_ino

    def turns(self, number: int) -> ProgressCounters:
        return ProgressCounters(self._memory, self.layout, number)

    def write_table(self, which: int, rows: Sequence[Any]) -> None:
        raw = json.dumps(rows).encode().ljust(self.layout.table_bytes)
        start = self.layout.tables_at + which * self.layout.table_bytes
        self._memory[start : start + self.layout.table_bytes] = raw

    def table(self, which: int) -> list[Any]:
        start = self.layout.tables_at + which * self.layout.table_bytes
        return list(json.loads(self._memory[start : start + self.layout.table_bytes]))

    def owner_lives(self) -> bool:
        return os.path.exists(self.path)  # a zombie has no open files

    def close(self) -> None:
        self.buckets.close()
        with contextlib.suppress(BufferError):
            self._memory.close()
        os.close(self._fd)
