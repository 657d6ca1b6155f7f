"""Where each tensor stands in the arena. Pure: the same manifest gives the same layout on every rank.

0                    one report of REPORT_BYTES for each TP rank of the server (JSON, zero-padded)
TABLE_OFFSET         the table of the current update (JSON: name, offset, shape, dtype)
sums_offset(rank)    what TP rank `rank` of the server read: a checksum for each row of the table
data_offset          the tensors, each at a multiple of ALIGNMENT
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_server.types import TensorSpec

REPORT_BYTES = 4096
MAX_TP_RANKS = 64
TABLE_OFFSET = REPORT_BYTES * MAX_TP_RANKS
ALIGNMENT = 64
PAGE = 4096
WORD_BYTES = 8
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def nbytes(spec: TensorSpec) -> int:
    """Bytes of one tensor."""
    return math.prod(spec.shape) * ITEM_BYTES[spec.dtype]


def aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


@dataclass(frozen=True)
class Slot:
    """Place of one tensor: byte offset from the start of the arena."""

    offset: int
    spec: TensorSpec


@dataclass(frozen=True)
class Layout:
    """Places of all tensors of one model."""

    slots: Mapping[str, Slot]
    sums_at: int
    """Where the checksums of the server's TP ranks begin."""
    size: int
    """Bytes of the whole arena."""
    _last: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def sums_offset(self, rank: int) -> int:
        """Where TP rank `rank` of the server writes its checksums."""
        return self.sums_at + rank * len(self.slots) * WORD_BYTES

    def table(self, names: Iterable[str]) -> bytes:
        """What the server reads to find the tensors `names`. The last one is kept: most updates are whole."""
        wanted = tuple(names)
        if self._last.get("names") != wanted:
            slots = [(name, self.slots[name]) for name in wanted]
            rows = [[name, slot.offset, slot.spec.shape, slot.spec.dtype] for name, slot in slots]
            self._last.update(names=wanted, table=json.dumps(rows).encode())
        found: bytes = self._last["table"]
        return found


def plan(tensors: Mapping[str, TensorSpec]) -> Layout:
    """The layout for a manifest's tensors, in their order."""
    empty = Layout({name: Slot(2**53, spec) for name, spec in tensors.items()}, 0, 0)
    sums_at = aligned(TABLE_OFFSET + len(empty.table(tensors)), PAGE)
    offset = aligned(sums_at + MAX_TP_RANKS * len(tensors) * WORD_BYTES, PAGE)
    slots = {}
    for name, spec in tensors.items():
        slots[name] = Slot(offset, spec)
        offset = aligned(offset + nbytes(spec), ALIGNMENT)
    return Layout(slots, sums_at, aligned(offset, PAGE))
