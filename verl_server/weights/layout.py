"""Layout of the arena: the byte offset of each tensor. Pure: equal manifests give equal layouts on every rank.

offset               content
0                    one report of REPORT_BYTES for each TP rank of the servers (JSON, padded with zeros)
TABLE_OFFSET         the table of the current update (JSON: name, offset, shape and dtype of each tensor)
checksums_offset     for each TP rank: the checksum of each tensor in the table, as that rank read it
offset of a slot     the tensor; a multiple of ALIGNMENT
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_server.types import TensorSpec

REPORT_BYTES = 16384
MAX_TP_RANKS = 64
"""Maximum number of TP ranks, of all servers together, that one arena or double buffer serves."""
TABLE_OFFSET = REPORT_BYTES * MAX_TP_RANKS
ALIGNMENT = 64
PAGE_BYTES = 4096
CHECKSUM_BYTES = 8
LARGEST_OFFSET = 2**53
"""Stands for an offset that is not known yet: its JSON text is at least as long as that of any real offset."""
SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
ELEMENT_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


def tensor_bytes(spec: TensorSpec) -> int:
    """Size of one tensor in bytes."""
    return math.prod(spec.shape) * ELEMENT_BYTES[spec.dtype]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not less than `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """The memory of one tensor: its byte offset from the start of the arena, and its spec."""

    offset: int
    spec: TensorSpec


@dataclass(frozen=True)
class Layout:
    """The memory of all tensors of one model in an arena."""

    slots: Mapping[str, Slot]
    """Slot of each tensor, by Hugging Face parameter name."""
    checksums_offset: int
    """Byte offset of the checksums that the servers' TP ranks write."""
    size_bytes: int
    """Size of the whole arena in bytes."""
    _cached_table: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def table(self, names: Iterable[str]) -> bytes:
        """The JSON table from which a server finds the tensors `names`: a row of name, offset, shape and dtype each.

        The last table is cached, because most updates contain all tensors.
        """
        wanted = tuple(names)
        if self._cached_table.get("names") != wanted:
            slots = [(name, self.slots[name]) for name in wanted]
            rows = [[name, slot.offset, slot.spec.shape, slot.spec.dtype] for name, slot in slots]
            self._cached_table.update(names=wanted, table=json.dumps(rows).encode())
        table: bytes = self._cached_table["table"]
        return table

    def in_order(self, names: Sequence[str]) -> list[str]:
        """`names` sorted by the offsets of their tensors. An empty tensor has the offset of the tensor after it."""
        return sorted(names, key=lambda name: (self.slots[name].offset, tensor_bytes(self.slots[name].spec)))


def plan_arena(tensors: Mapping[str, TensorSpec]) -> Layout:
    """The layout for the tensors of a manifest, in their order."""
    largest_table = Layout({name: Slot(LARGEST_OFFSET, spec) for name, spec in tensors.items()}, 0, 0).table(tensors)
    checksums_offset = round_up(TABLE_OFFSET + len(largest_table), PAGE_BYTES)
    offset = round_up(checksums_offset + MAX_TP_RANKS * len(tensors) * CHECKSUM_BYTES, PAGE_BYTES)
    slots = {}
    for name, spec in tensors.items():
        slots[name] = Slot(offset, spec)
        offset = round_up(offset + tensor_bytes(spec), ALIGNMENT)
    return Layout(slots, checksums_offset, round_up(offset, PAGE_BYTES))


def byte_ranges_of(table: bytes) -> list[tuple[int, int]]:
    """The byte range `(start, stop)` of each tensor in a table."""
    rows = json.loads(table)
    return [(offset, offset + tensor_bytes(TensorSpec(tuple(shape), dtype))) for _, offset, shape, dtype in rows]
