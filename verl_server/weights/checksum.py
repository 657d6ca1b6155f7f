"""A checksum as fast as reading: the sum of a tensor's 8-byte words in the arena, modulo 2**64.

Both sides compute it from what they see, the trainer and every TP rank of the server. It tells lost, stale,
shifted and overwritten bytes; it is no protection from somebody who means harm.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from verl_server.weights.layout import WORD_BYTES, aligned

if TYPE_CHECKING:
    import torch


def checksum(memory: mmap.mmap | memoryview, offset: int, size: int) -> int:
    """Of the `size` bytes at `offset`, which is a multiple of the alignment; the gap up to the next word is zero."""
    import torch

    if not size:
        return 0
    words = torch.frombuffer(memory, dtype=torch.int64, count=aligned(size, WORD_BYTES) // WORD_BYTES, offset=offset)
    return int(words.sum())


def put(memory: mmap.mmap, offset: int, sums: Iterable[int]) -> None:
    """Write checksums one after the other."""
    values = _int64(list(sums))
    memory[offset : offset + values.numel() * WORD_BYTES] = values.numpy().tobytes()


def get(memory: mmap.mmap, offset: int, count: int) -> list[int]:
    """Read `count` checksums."""
    import torch

    return torch.frombuffer(bytearray(memory[offset : offset + count * WORD_BYTES]), dtype=torch.int64).tolist()


def _int64(values: list[int]) -> torch.Tensor:
    import torch

    return torch.tensor(values, dtype=torch.int64)
