"""What changed between two versions of the same tensors, as bytes, and back. Pure.

A patch is, for each tensor: how many elements changed and how wide its gaps are (two int32), then the gaps
between the changed elements (uint16, or uint32 where one is too wide), then their new values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

HEADER = np.dtype([("count", "<u4"), ("gap_bytes", "<u4")])
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Bytes = npt.NDArray[np.uint8]


def words(memory: memoryview, item_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    """A tensor's memory as unsigned integers of its element's size: equal bits are equal, NaN or not."""
    return np.frombuffer(memory, dtype=_WORDS[item_bytes])


def encode(pairs: Iterable[tuple[memoryview, memoryview, int]], limit: int) -> bytes | None:
    """The patch for `(old, new, element bytes)` of each tensor, or None when it would be longer than `limit`."""
    headers, parts, length = [], [], 0
    for old, new, item_bytes in pairs:
        after = words(new, item_bytes)
        changed = np.flatnonzero(words(old, item_bytes) != after)
        gaps = np.diff(changed, prepend=0)
        narrow = not len(gaps) or int(gaps.max()) <= np.iinfo(np.uint16).max
        gap_bytes = 2 if narrow else 4
        headers.append((len(changed), gap_bytes))
        length += HEADER.itemsize + len(changed) * (gap_bytes + item_bytes)
        if length > limit:
            return None
        parts += [gaps.astype(np.uint16 if narrow else np.uint32).tobytes(), after[changed].tobytes()]
    return b"".join([np.array(headers, dtype=HEADER).tobytes(), *parts])


def apply(patch: memoryview, targets: Sequence[tuple[memoryview, int]]) -> None:
    """Write a patch into `(memory, element bytes)` of each tensor. Raises ValueError for one that does not fit."""
    headers = np.frombuffer(patch[: len(targets) * HEADER.itemsize], dtype=HEADER)
    at = len(targets) * HEADER.itemsize
    for (memory, item_bytes), header in zip(targets, headers, strict=True):
        count, gap_bytes = int(header["count"]), int(header["gap_bytes"])
        gaps = np.frombuffer(patch[at : at + count * gap_bytes], dtype=_WORDS[gap_bytes])
        at += count * gap_bytes
        values = np.frombuffer(patch[at : at + count * item_bytes], dtype=_WORDS[item_bytes])
        at += count * item_bytes
        target = words(memory, item_bytes)
        places = np.cumsum(gaps, dtype=np.int64)
        if count and int(places[-1]) >= len(target):
            raise ValueError("a patch reaches beyond its tensor")
        target[places] = values
    if at != len(patch):
        raise ValueError(f"a patch of {len(patch)} bytes has {at}")
