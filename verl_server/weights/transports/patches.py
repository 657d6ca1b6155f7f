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
_UNSIGNED_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def as_unsigned(memory: memoryview, element_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    """A tensor's memory as unsigned integers of its element size. Equal bits compare as equal, also for NaN."""
    return np.frombuffer(memory, dtype=_UNSIGNED_TYPES[element_bytes])


def encode(tensors: Iterable[tuple[memoryview, memoryview, int]], max_bytes: int) -> bytes | None:
    """The patch for the old memory, new memory and element size in bytes of each tensor.

    Returns None if the patch would be longer than `max_bytes`.
    """
    headers, parts, length = [], [], 0
    for old_memory, new_memory, element_bytes in tensors:
        new = as_unsigned(new_memory, element_bytes)
        changed = np.flatnonzero(as_unsigned(old_memory, element_bytes) != new)
        gaps = np.diff(changed, prepend=0)
        is_narrow = not len(gaps) or int(gaps.max()) <= np.iinfo(np.uint16).max
        gap_bytes = 2 if is_narrow else 4
        headers.append((len(changed), gap_bytes))
        length += HEADER.itemsize + len(changed) * (gap_bytes + element_bytes)
        if length > max_bytes:
            return None
        parts += [gaps.astype(np.uint16 if is_narrow else np.uint32).tobytes(), new[changed].tobytes()]
    return b"".join([np.array(headers, dtype=HEADER).tobytes(), *parts])


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
        positions = np.cumsum(gaps, dtype=np.int64)
        if count and int(positions[-1]) >= len(target):
            raise ValueError("the patch changes elements after the end of a tensor")
        target[positions] = values
    if offset != len(patch):
        raise ValueError(f"the patch has {len(patch)} bytes, but its headers describe {offset} bytes")
