"""Division of the arena's tensors into the byte ranges that one broadcast sends. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

CHUNK_BYTES = 32 << 20
"""Maximum size of one chunk."""
MAX_GAP_BYTES = 64
"""Neighbouring tensors that are closer than this share a range; the bytes in between are sent too."""


def split_into_chunks(
    tensor_ranges: Sequence[tuple[int, int]], max_bytes: int = CHUNK_BYTES, max_gap_bytes: int = MAX_GAP_BYTES
) -> list[tuple[int, int]]:
    """Ranges `(start, stop)` of at most `max_bytes` that cover all `tensor_ranges`, which are sorted.

    A chunk may end in the middle of a tensor.
    """
    merged: list[list[int]] = []
    for start, stop in tensor_ranges:
        if merged and start - merged[-1][1] < max_gap_bytes:
            merged[-1][1] = max(merged[-1][1], stop)  # an empty tensor may begin where the last one does
        else:
            merged.append([start, stop])
    return [
        (offset, min(offset + max_bytes, stop)) for start, stop in merged for offset in range(start, stop, max_bytes)
    ]


def group_whole_tensors(
    tensor_ranges: Sequence[tuple[int, int]], max_bytes: int, max_gap_bytes: int = MAX_GAP_BYTES
) -> list[tuple[int, int, int]]:
    """Ranges `(start, stop, number of tensors)` of at most `max_bytes` that contain whole tensors only.

    `tensor_ranges` are sorted. A tensor larger than `max_bytes` has a range of its own.
    """
    groups: list[tuple[int, int, int]] = []
    for start, stop in tensor_ranges:
        if groups and start - groups[-1][1] < max_gap_bytes and stop - groups[-1][0] <= max_bytes:
            groups[-1] = (groups[-1][0], max(groups[-1][1], stop), groups[-1][2] + 1)
        else:
            groups.append((start, stop, 1))
    return groups
