"""Trainer and server on one machine: every TP rank reads the trainer's arena in place. Nothing is copied."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from verl_server.errors import UnsupportedError
from verl_server.types import TensorSpec
from verl_server.weights.layout import MAX_TP_RANKS, TABLE_OFFSET
from verl_server.weights.reports import Received, Report, Reports
from verl_server.weights.transports import base
from verl_server.weights.transports.base import Json, Update
from verl_server.weights.views import tensor_in

if TYPE_CHECKING:
    import torch


class Sender(base.Sender):
    name = "shared_memory"

    def prepare(self, update: Update) -> None:
        ranks = sum(member.tp_size for member in update.members)
        if ranks > MAX_TP_RANKS:
            raise UnsupportedError(f"{ranks} TP ranks are more than {MAX_TP_RANKS} for one arena")

    def wire(self, update: Update, server: int) -> Json:
        return {
            "paths": list(self.settings.paths) or [self.arena.path],
            "ranks_per_node": self.settings.ranks_per_node or MAX_TP_RANKS,
            "size": self.layout.size,
            "table_bytes": len(self.layout.table(update.names)),
            "sums_at": self.layout.sums_at,
            "slots": len(self.layout.slots),
            "first": self.first_receiver(update, server),
        }

    def received(self, update: Update, receiver: int) -> Received | None:
        return self.arena.reports.read(receiver, update.id, len(update.names) if update.verify else 0)

    def receivers(self, update: Update) -> Iterator[tuple[int, int, str]]:
        """Those whose reports come into this arena: with several nodes, this node's."""
        here = self.settings.ranks_per_node
        for receiver, rank, who in super().receivers(update):
            if not here or rank // here == self.settings.node_rank:
                yield receiver, rank, who


class Mapping:
    """The arena as a server's TP rank maps it, and the tensors of the last table, in place."""

    def __init__(self, fd: int, size: int) -> None:
        self.memory = mmap.mmap(fd, size)
        self._table = b""
        self._tensors: list[tuple[str, torch.Tensor]] = []

    def tensors(self, length: int) -> list[tuple[str, torch.Tensor]]:
        table = self.memory[TABLE_OFFSET : TABLE_OFFSET + length]
        if table != self._table:
            self._tensors = list(tensors_in(memoryview(self.memory), json.loads(table)))
            self._table = table
        return self._tensors

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lives in this memory."""
        start = self._tensors[0][1].data_ptr() if self._tensors else 0
        return bool(self._tensors) and start <= tensor.data_ptr() < start + len(self.memory)

    def close(self) -> None:
        self._tensors = []
        with contextlib.suppress(BufferError):
            self.memory.close()


#: The arena mapped last, by path and inode: mapping a gigabyte anew costs its page faults.
_mapped: dict[tuple[str, int], Mapping] = {}


def mapping(path: str, size: int) -> Mapping:
    """Raises OSError when the trainer has gone."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        key = (path, os.fstat(fd).st_ino)
        if key not in _mapped:
            while _mapped:
                _mapped.popitem()[1].close()
            _mapped[key] = Mapping(fd, size)
        return _mapped[key]
    finally:
        os.close(fd)


class Receiver(base.Receiver):
    def __init__(self, wire: Json, rank: int) -> None:
        super().__init__(wire, rank)
        self._mapping = mapping(wire["paths"][rank // wire["ranks_per_node"]], wire["size"])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._mapping.tensors(self.wire["table_bytes"]))

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._mapping.holds(tensor)

    def report(self, report: Report, sums: list[int]) -> None:
        reports = Reports(self._mapping.memory, self.wire["sums_at"], self.wire["slots"])
        reports.write(self.wire["first"] + self.rank, report, sums)


def tensors_in(view: memoryview, table: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a table in place."""
    import torch

    flat = torch.frombuffer(view, dtype=torch.uint8)
    for name, offset, shape, dtype in table:
        yield name, tensor_in(flat, offset, TensorSpec(tuple(shape), dtype))
