"""Reports of the servers' TP ranks on an update, in memory that they share with the trainer.

The server's HTTP reply speaks for TP rank 0 only. Therefore each TP rank writes a report of its own into its report
slot (JSON, padded with zeros), and the checksum of each tensor that it read into another part of the same memory.
"""

from __future__ import annotations

import array
import dataclasses
import json
import mmap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from verl_server.types import Json
from verl_server.weights.layout import CHECKSUM_BYTES, REPORT_BYTES


@dataclass(frozen=True)
class Report:
    """The outcome of an update on one TP rank of one server."""

    update_id: str
    ok: bool
    """Whether the model's loading code ran without an exception."""
    error: str | None = None
    """Type and message of the exception, shortened."""
    trace: str | None = None
    """End of the exception's traceback."""
    num_tensors: int = 0
    """Number of tensors that the model took."""
    unwritten: list[str] = field(default_factory=list)
    """Some of the server's parameters that were not written, by the server's names."""
    num_unwritten: int = 0
    """Number of all of the server's parameters that were not written."""
    unread: list[str] = field(default_factory=list)
    """Some of the tensors of the update that the model's loading code did not read."""
    share: tuple[int, int] = (0, 1)
    """The tensors that the TP rank has verified: first position and step, see `checksum.verified_share`."""

    @classmethod
    def from_json(cls, fields: Json) -> Report:
        """The report that `dataclasses.asdict` made JSON of."""
        return cls(**{**fields, "share": tuple(fields["share"])})


@dataclass(frozen=True)
class ReceivedReport:
    """A report as the trainer reads it, with checksums."""

    report: Report
    checksums: list[int]
    """Checksum of each tensor of the TP rank's share as it read the tensor. Empty without verification."""


class SharedReports:
    """Reads and writes reports in shared memory. Each TP rank has a report slot.

    The reports are at the start of `memory`. The checksums begin at byte `checksums_offset`, with room for
    `num_tensors` checksums in each slot.
    """

    def __init__(self, memory: mmap.mmap, checksums_offset: int, num_tensors: int) -> None:
        self._memory, self._checksums_offset, self._num_tensors = memory, checksums_offset, num_tensors

    def write(self, report_slot: int, report: Report, checksums: Iterable[int]) -> None:
        """Write a TP rank's report and checksums into its slot."""
        raw_checksums = array.array("q", checksums).tobytes()
        start = self._checksums_start(report_slot)
        self._memory[start : start + len(raw_checksums)] = raw_checksums
        raw_report = json.dumps(asdict(report)).encode()
        if len(raw_report) > REPORT_BYTES:  # long names, or JSON escapes in the error text
            short = dataclasses.replace(
                report, error="see the server's log", trace=None, unwritten=[], unread=report.unread[:10]
            )
            raw_report = json.dumps(asdict(short)).encode()
        report_start = report_slot * REPORT_BYTES
        self._memory[report_start : report_start + REPORT_BYTES] = raw_report.ljust(REPORT_BYTES, b"\0")

    def read(self, report_slot: int, update_id: str, num_checksums: int) -> ReceivedReport | None:
        """The report of a slot with its checksums. None if it is not about `update_id`.

        `num_checksums`: number of tensors of the update, or 0 without verification.
        """
        raw_report = bytes(self._memory[report_slot * REPORT_BYTES : (report_slot + 1) * REPORT_BYTES]).rstrip(b"\0")
        if not raw_report:
            return None
        report = Report.from_json(json.loads(raw_report))
        if report.update_id != update_id:
            return None
        start = self._checksums_start(report_slot)
        first, step = report.share
        raw_checksums = self._memory[start : start + len(range(first, num_checksums, step)) * CHECKSUM_BYTES]
        return ReceivedReport(report, list(array.array("q", raw_checksums)))

    def _checksums_start(self, report_slot: int) -> int:
        return self._checksums_offset + report_slot * self._num_tensors * CHECKSUM_BYTES
