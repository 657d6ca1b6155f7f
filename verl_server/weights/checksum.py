"""A checksum as fast as reading: the sum of a tensor's 8-byte words in the arena, modulo 2**64.

Both sides compute it from what they see, the trainer and every TP rank of the server. It tells lost, stale,
shifted and overwritten bytes; it is no protection from somebody who means harm.
"""

from __future__ import annotations

import array
import mmap
from collections.abc import Iterable

from verl_server.weights.layout import WORD_BYTES, aligned


def checksum(memory: mmap.mmap | memoryview, offset: int, size: int) -> int:
    """Of the `size` bytes at `offset`, which is a multiple of the alignment; the gap up to the next word is zero."""
    import torch

    if not size:
        return 0
    words = torch.frombuffer(memory, dtype=torch.int64, count=aligned(size, WORD_BYTES) // WORD_BYTES, offset=offset)
    return int(words.sum())


def put(memory: mmap.mmap, offset: int, sums: Iterable[int]) -> None:
    """Write checksums one after the other."""
    raw = array.array("q", sums).tobytes()
    memory[offset : offset + len(raw)] = raw


def get(memory: mmap.mmap, offset: int, count: int) -> list[int]:
    """Read `count` checksums."""
    return list(array.array("q", memory[offset : offset + count * WORD_BYTES]))
