"""Trainer and server on one machine, with staging memory smaller than the model: two buckets, in turn.

Loading begins before the last tensor is known, so a mistake in a generator is found half-way and leaves the
weights torn; a dict or a list is checked in whole before the server hears of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from verl_server.weights.buckets import Reader
from verl_server.weights.double_buffer import DoubleBuffer, DoubleBufferLayout
from verl_server.weights.reports import Report
from verl_server.weights.transports import base
from verl_server.weights.transports.base import Json

if TYPE_CHECKING:
    import torch


class Stream:
    """What trainer ranks make of their lanes."""

    on_host = True
    """All ranks write into one lane, or each has one of its own on its GPU."""

    @staticmethod
    def create(layout: DoubleBufferLayout) -> DoubleBuffer:
        return DoubleBuffer.create(layout)

    @staticmethod
    def describe(lane: DoubleBuffer) -> Json:
        """How a server opens it; JSON."""
        return {"path": lane.path, "inode": lane.inode}

    @staticmethod
    def open(described: Json, layout: DoubleBufferLayout) -> DoubleBuffer:
        """In the server."""
        return DoubleBuffer.open(described["path"], layout)


#: The lane opened last: mapping it anew costs its page faults, and a GPU's handle is to be opened once.
_opened: dict[tuple[str, int], DoubleBuffer] = {}


class Receiver(base.Receiver):
    stream: type[Stream] = Stream

    def __init__(self, wire: Json, rank: int) -> None:
        super().__init__(wire, rank)
        self._slot = wire["first"] + rank
        self._lane = self._lane_for(
            wire["lanes"][self._slot % len(wire["lanes"])], DoubleBufferLayout(**wire["layout"])
        )
        deadline = time.monotonic() + wire["timeout_s"]
        self._reader = Reader(self._lane, wire["number"], self._slot, wire["writers"], self._check, deadline)

    def _lane_for(self, described: Json, layout: DoubleBufferLayout) -> DoubleBuffer:
        key = (described["path"], described["inode"])
        if key not in _opened:
            while _opened:
                _opened.popitem()[1].close()
            _opened[key] = self.stream.open(described, layout)
        return _opened[key]

    def _check(self) -> None:
        if not self._lane.owner_lives():
            raise ConnectionError("the trainer has died")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._reader.tensors()

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._lane.buckets.holds(tensor)

    def report(self, report: Report, sums: list[int]) -> None:
        self._lane.reports.write(self._slot, report, sums)
        if not report.ok:
            self._lane.turns(self.wire["number"]).fail(f"a TP rank of a server gave up: {report.error}")
