"""Trainer and server on one machine: every TP rank reads the trainer's arena in place. Nothing is copied."""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verl_server.errors import UnsupportedError
from verl_server.weights.checksum import put
from verl_server.weights.layout import MAX_TP_RANKS, REPORT_BYTES, TABLE_OFFSET, WORD_BYTES
from verl_server.weights.transports import base
from verl_server.weights.transports.base import Json, Received, Report, Settings, Update

if TYPE_CHECKING:
    import torch


class Sender(base.Sender):
    name = "shared_memory"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if sum(settings.tp_sizes) > MAX_TP_RANKS:
            raise UnsupportedError(f"{sum(settings.tp_sizes)} TP ranks are more than {MAX_TP_RANKS} for one arena")

    def wire(self, update: Update, server: int) -> Json:
        return {
            "paths": list(self.settings.paths) or [self.arena.path],
            "ranks_per_node": self.settings.ranks_per_node or max(self.settings.tp_sizes),
            "size": self.layout.size,
            "table_bytes": len(self.layout.table(update.names)),
            "sums_at": self.layout.sums_at,
            "slots": len(self.layout.slots),
            "first": self.first_receiver(server),
        }

    def received(self, update: Update, receiver: int) -> Received | None:
        raw = self.arena.report(receiver)
        if raw is None or raw["update_id"] != update.id:
            return None
        sums = self.arena.checksums_of(receiver, len(update.names)) if update.verify else []
        return Received(Report(**raw), sums)

    def receivers(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Those whose reports come into this arena: with several nodes, this node's."""
        here = self.settings.ranks_per_node
        for receiver, (server, rank) in super().receivers():
            if not here or rank // here == self.settings.node_rank:
                yield receiver, (server, rank)


class _Mapping:
    """The arena mapped once and kept between updates: mapping a gigabyte anew costs its page faults."""

    def __init__(self) -> None:
        self._key: tuple[str, int] | None = None
        self._memory: mmap.mmap | None = None

    def get(self, path: str, size: int) -> mmap.mmap:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            key = (path, os.fstat(fd).st_ino)
            if self._memory is None or key != self._key:
                if self._memory is not None:
                    self._memory.close()
                self._memory, self._key = mmap.mmap(fd, size), key
            return self._memory
        finally:
            os.close(fd)


_mapping = _Mapping()


class Receiver(base.Receiver):
    def __init__(self, wire: Json, rank: int) -> None:
        super().__init__(wire, rank)
        self._memory = _mapping.get(wire["paths"][rank // wire["ranks_per_node"]], wire["size"])
        self._view = memoryview(self._memory)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        table = json.loads(self._memory[TABLE_OFFSET : TABLE_OFFSET + self.wire["table_bytes"]])
        return tensors_in(self._view, table)

    def report(self, report: Report, sums: list[int]) -> None:
        slot = self.wire["first"] + self.rank
        if sums:
            put(self._memory, self.wire["sums_at"] + slot * self.wire["slots"] * WORD_BYTES, sums)
        raw = json.dumps(asdict(report)).encode()
        if len(raw) > REPORT_BYTES:  # words that JSON escapes
            short = Report(report.update_id, report.ok, "see the server's log", None, [], report.unwritten_count)
            raw = json.dumps(asdict(short)).encode()
        self._memory[slot * REPORT_BYTES : (slot + 1) * REPORT_BYTES] = raw.ljust(REPORT_BYTES, b"\0")

    def close(self) -> None:
        self._view.release()


def tensors_in(view: memoryview, table: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a table in place."""
    import torch

    for name, offset, shape, dtype in table:
        kind, count = getattr(torch, dtype), math.prod(shape)
        yield name, torch.frombuffer(view, dtype=kind, count=count, offset=offset).view(shape)
