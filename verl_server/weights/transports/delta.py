"""Slow links: after a first whole broadcast only the elements that changed are sent (see `patches`).

It costs a copy of the last weights on the trainer, and finding the changes takes the time of reading both.
The checksums cover the whole result, not the patch alone. When more than half of the bytes would have to be
sent, or the mirrors may differ after a failure, the whole is sent.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator

from verl_server.weights.layout import ITEM_BYTES, nbytes
from verl_server.weights.transports import distributed, group, patches
from verl_server.weights.transports.base import Json, Settings, Update

#: A patch longer than this part of the tensors is not worth its work.
WORTH_IT = 0.5


class Sender(distributed.Sender):
    name = "delta"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._old: memoryview | None = None
        self._base = ""
        self._patch: bytes | None = None

    def prepare(self, update: Update) -> None:
        super().prepare(update)  # leaves the group when its members have changed
        self._patch = None
        if self._base and self._old is not None and self._group is not None:
            size = sum(nbytes(self.layout.slots[name].spec) for name in update.names)
            self._patch = patches.encode(self._pairs(self._old, update), int(WORTH_IT * size))

    def _pairs(self, old: memoryview, update: Update) -> Iterator[tuple[memoryview, memoryview, int]]:
        for name in update.names:
            slot = self.layout.slots[name]
            where = slice(slot.offset, slot.offset + nbytes(slot.spec))
            yield old[where], self.arena.memory[where], ITEM_BYTES[slot.spec.dtype]

    def wire(self, update: Update, server: int) -> Json:
        patch = {} if self._patch is None else {"base": self._base, "patch_bytes": len(self._patch)}
        return {**super().wire(update, server), **patch}

    def _send(self, update: Update, loading: Callable[[], bool]) -> None:
        if self._patch is None:
            super()._send(update, loading)
            return
        memory = memoryview(bytearray(self._patch))
        for start, stop in group.chunks([(0, len(memory))]):
            self._broadcast(memory[start:stop])

    def settle(self, update: Update, whole: bool) -> None:
        super().settle(update, whole)
        self._base = update.id if whole else ""
        if not whole:
            return
        if self._old is None:
            self._old = memoryview(mmap.mmap(-1, self.layout.size))
        if self._patch is not None:
            targets = [(old, item_bytes) for old, _, item_bytes in self._pairs(self._old, update)]
            patches.apply(memoryview(self._patch), targets)
        else:
            for old, new, _ in self._pairs(self._old, update):
                old[:] = new
        self._patch = None

    def close(self) -> None:
        super().close()
        self._old = None


class Receiver(distributed.Receiver):
    def _receive(self) -> None:
        seat, update_id = self._seat, self.wire["update_id"]
        if "base" not in self.wire:
            super()._receive()
        else:
            patch = memoryview(bytearray(self.wire["patch_bytes"]))
            for start, stop in group.chunks([(0, len(patch))]):
                group.broadcast(seat.group, patch[start:stop], self.wire["timeout_s"])
            if seat.base != self.wire["base"]:
                raise ValueError("this machine's copy of the weights is not the one that the changes start from")
            rows = json.loads(self._table)
            ends = distributed.spans(self._table)
            targets = [
                (seat.mirror.view[start:stop], ITEM_BYTES[dtype])
                for (start, stop), (_, _, _, dtype) in zip(ends, rows, strict=True)
            ]
            seat.base = ""
            patches.apply(patch, targets)
            seat.mirror.advance(update_id, len(self._chunks))
        seat.base = update_id
