"""Progress counters of an update through a double buffer, in memory that all its processes share.

Each counter is written by one process only. A counter is one word, which carries the number of the update, so counters
of earlier updates read as zero.

    bucket n         filled when every reader has emptied bucket n - 2; read when every writer has filled it
    bucket total     the number of buckets, known when the leading writer has finished
    failure          the message of a process that failed; all other processes then stop waiting
"""

from __future__ import annotations

import mmap

from verl_server.weights.double_buffer.layout import DoubleBufferLayout
from verl_server.weights.layout import MAX_TP_RANKS, PAGE_BYTES
from verl_server.weights.memory_file import WORD_BYTES, SharedWords

MAX_WRITERS = 256
"""Maximum number of trainer ranks that write one double buffer."""
CHECKSUM_READER = MAX_TP_RANKS
"""Index of the reader that computes checksums on the trainer. The other readers are TP ranks of servers."""

_TOTAL, _FAILED, _FILLED, _EMPTIED = 0, 1, 2, 2 + MAX_WRITERS
"""Index of the first word of each kind of counter."""
_FINISHED = 0xFFFFFFFF
"""Count of a writer that has filled all of its buckets."""


class ProgressCounters:
    """The counters of the update with number `update_number`."""

    def __init__(self, memory: mmap.mmap, layout: DoubleBufferLayout, update_number: int) -> None:
        self._words = SharedWords(memory, layout.progress_offset, PAGE_BYTES // WORD_BYTES)
        self._failure_text = memoryview(memory)[layout.failure_offset : layout.failure_offset + PAGE_BYTES]
        self._update_number = update_number

    def _get(self, index: int) -> int:
        word = self._words[index]
        return word & _FINISHED if word >> 32 == self._update_number else 0

    def _set(self, index: int, value: int) -> None:
        self._words[index] = self._update_number << 32 | value

    # -- writers ------------------------------------------------------------------------------------

    def num_filled(self, writer: int) -> int:
        """Number of buckets that a writer has filled."""
        return self._get(_FILLED + writer)

    def set_filled(self, writer: int, count: int) -> None:
        """Record that a writer has filled `count` buckets."""
        self._set(_FILLED + writer, count)

    def finish(self, writer: int, num_buckets: int | None) -> None:
        """Record that a writer has written all of its tensors. The leading writer passes the number of buckets."""
        if num_buckets is not None:
            self._set(_TOTAL, num_buckets + 1)
        self._set(_FILLED + writer, _FINISHED)

    @property
    def num_buckets(self) -> int | None:
        """Number of buckets of the whole update. None while it is not known."""
        return self._get(_TOTAL) - 1 if self._get(_TOTAL) else None

    # -- readers ------------------------------------------------------------------------------------

    def num_emptied(self, reader: int) -> int:
        """Number of buckets that a reader has emptied."""
        return self._get(_EMPTIED + reader)

    def set_emptied(self, reader: int, count: int) -> None:
        """Record that a reader has emptied `count` buckets. A count of 0 records that the reader is present."""
        self._set(_EMPTIED + reader, count)

    def is_present(self, reader: int) -> bool:
        """Whether a reader has opened the double buffer for this update."""
        return self._words[_EMPTIED + reader] >> 32 == self._update_number

    # -- failure ------------------------------------------------------------------------------------

    def fail(self, message: str) -> None:
        """Make all processes stop waiting. Only the first failure of an update is recorded."""
        if self.failure is None:
            raw = message.encode()[: PAGE_BYTES - 4]
            self._failure_text[: len(raw) + 1] = raw + b"\0"
            self._set(_FAILED, 1)

    @property
    def failure(self) -> str | None:
        """Message of the process that failed, or None."""
        if not self._get(_FAILED):
            return None
        return bytes(self._failure_text).partition(b"\0")[0].decode(errors="replace")
