"""Encoding of the changes between two versions of the same tensors. Pure functions.

A patch begins with a header for each tensor: the number of changed elements, and the size of its gaps in bytes (two
int32). Then follow, for each tensor, the gaps between the changed elements (uint16, or uint32 if a gap is too large)
and the new values of the changed elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

HEADER = np.dtype([("count", "<u4"), ("gap_bytes", "<u4")])
CHUNK_ELEMENTS = 1 << 22
"""Number of elements that are compared at the same time: positions need 8 bytes each."""
_UNSIGNED_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def as_unsigned(memory: memoryview, element_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    """A tensor's memory as unsigned integers of its element size. Equal bits compare as equal, also for NaN."""
    return np.frombuffer(memory, dtype=_UNSIGNED_TYPES[element_bytes])


def encode(tensors: Iterable[tuple[memoryview, memoryview, int]], max_bytes: int) -> bytes | None:
    """The patch for the old memory, new memory and element size in bytes of each tensor.

    Returns None if the patch would be longer than `max_bytes`. Needs memory for about twice the patch.
    """
    headers, parts, length = [], [], 0
    for old_memory, new_memory, element_bytes in tensors:
        length += HEADER.itemsize
        max_count = (max_bytes - length) // (2 + element_bytes)
        found = _find_changes(as_unsigned(old_memory, element_bytes), as_unsigned(new_memory, element_bytes), max_count)
        if found is None:
            return None
        gaps, values = found
        gap_bytes = 2 if not len(gaps) or int(gaps.max()) <= np.iinfo(np.uint16).max else 4
        headers.append((len(gaps), gap_bytes))
        length += len(gaps) * (gap_bytes + element_bytes)
        if length > max_bytes:
            return None
        parts += [gaps.astype(_UNSIGNED_TYPES[gap_bytes]).tobytes(), values.tobytes()]
    return b"".join([np.array(headers, dtype=HEADER).tobytes(), *parts])


def _find_changes(
    old: npt.NDArray[np.unsignedinteger], new: npt.NDArray[np.unsignedinteger], max_count: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.unsignedinteger]] | None:
    """The gaps between the changed elements, and their new values. None if more than `max_count` elements changed."""
    gaps: list[npt.NDArray[np.uint32]] = [np.empty(0, dtype=np.uint32)]
    values = [new[:0]]
    count = last = 0
    for start in range(0, len(new), CHUNK_ELEMENTS):
        chunk = new[start : start + CHUNK_ELEMENTS]
        changed = np.flatnonzero(old[start : start + CHUNK_ELEMENTS] != chunk)
        count += len(changed)
        if count > max_count:
            return None
        if len(changed):
            gaps.append(np.diff(changed, prepend=last - start).astype(np.uint32))
            values.append(chunk[changed])
            last = start + int(changed[-1])
    return np.concatenate(gaps), np.concatenate(values)


def apply(patch: memoryview, tensors: Sequence[tuple[memoryview, int]]) -> None:
    """Apply a patch to the memory of each tensor, given with its element size in bytes.

    Raises ValueError if the patch does not fit the tensors.
    """
    headers = np.frombuffer(patch[: len(tensors) * HEADER.itemsize], dtype=HEADER)
    offset = len(tensors) * HEADER.itemsize
    for (memory, element_bytes), header in zip(tensors, headers, strict=True):
        count, gap_bytes = int(header["count"]), int(header["gap_bytes"])
        gaps = np.frombuffer(patch[offset : offset + count * gap_bytes], dtype=_UNSIGNED_TYPES[gap_bytes])
        offset += count * gap_bytes
        values = np.frombuffer(patch[offset : offset + count * element_bytes], dtype=_UNSIGNED_TYPES[element_bytes])
        offset += count * element_bytes
        target = as_unsigned(memory, element_bytes)
        last = 0
        for start in range(0, count, CHUNK_ELEMENTS):
            positions = np.cumsum(gaps[start : start + CHUNK_ELEMENTS], dtype=np.int64)
            positions += last
            last = int(positions[-1])
            if last >= len(target):
                raise ValueError("the patch changes elements after the end of a tensor")
            target[positions] = values[start : start + CHUNK_ELEMENTS]
    if offset != len(patch):
        raise ValueError(f"the patch has {len(patch)} bytes, but its headers describe {offset} bytes")
