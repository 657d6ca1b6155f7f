"""What each TP rank of each server says of an update, written into memory that it shares with the trainer.

The HTTP reply speaks for rank 0 only. One slot for each TP rank: a report (JSON, zero-padded) and, elsewhere
in the same memory, a checksum for each tensor that the rank read.
"""

from __future__ import annotations

import array
import dataclasses
import json
import mmap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from verl_server.weights.layout import REPORT_BYTES, WORD_BYTES


@dataclass(frozen=True)
class Report:
    """What one TP rank of one server says of an update."""

    update_id: str
    ok: bool
    error: str | None = None
    trace: str | None = None
    tensors: int = 0
    """How many were taken."""
    unwritten: list[str] = field(default_factory=list)
    """Some of the server's parameters that were not written, by the server's names."""
    unwritten_count: int = 0


@dataclass(frozen=True)
class Received:
    """A report, and the checksum of each tensor as that rank read it (empty without verification)."""

    report: Report
    sums: list[int]


class Reports:
    """The reports at the start of `memory`, the checksums from `sums_at` on, `rows` for each slot."""

    def __init__(self, memory: mmap.mmap, sums_at: int, rows: int) -> None:
        self._memory, self._sums_at, self._rows = memory, sums_at, rows

    def write(self, slot: int, report: Report, sums: Iterable[int]) -> None:
        raw_sums = array.array("q", sums).tobytes()
        start = self._sums_at + slot * self._rows * WORD_BYTES
        self._memory[start : start + len(raw_sums)] = raw_sums
        raw = json.dumps(asdict(report)).encode()
        if len(raw) > REPORT_BYTES:  # words that JSON escapes
            short = dataclasses.replace(report, error="see the server's log", trace=None, unwritten=[])
            raw = json.dumps(asdict(short)).encode()
        self._memory[slot * REPORT_BYTES : (slot + 1) * REPORT_BYTES] = raw.ljust(REPORT_BYTES, b"\0")

    def read(self, slot: int, update_id: str, count: int) -> Received | None:
        """What that slot says of this update, with the first `count` of its checksums, or None."""
        raw = bytes(self._memory[slot * REPORT_BYTES : (slot + 1) * REPORT_BYTES]).rstrip(b"\0")
        if not raw:
            return None
        report = Report(**json.loads(raw))
        if report.update_id != update_id:
            return None
        start = self._sums_at + slot * self._rows * WORD_BYTES
        return Received(report, list(array.array("q", self._memory[start : start + count * WORD_BYTES])))
