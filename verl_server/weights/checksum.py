"""Checksums of tensors that depend on the value and the position of every byte, and cost little more than reading them.

The trainer and every TP rank of the servers compute the checksum of each tensor as they see it. Different checksums
reveal lost, stale, moved and overwritten bytes. They do not protect against deliberate changes.

Tensors in host memory have XXH3 checksums. Tensors on an accelerator have a sum of 8-byte words, each multiplied by a
number that depends on its position. Both ends of a transport must compute the same of the two.
"""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from verl_server.weights.layout import CHECKSUM_BYTES

if TYPE_CHECKING:
    import torch

PART_BYTES = 4 * 2**20
"""Size of the parts of a tensor in host memory that threads hash in parallel."""
WORDS_PER_STEP = 2**20
"""Number of words of a tensor on an accelerator that are summed at once. Limits the temporary memory."""
MULTIPLIERS = (-7046029254386353131, -4658895280553007687)
"""Constants of the SplitMix64 generator, as signed integers."""


def compute_checksum(tensor: torch.Tensor, device_type: str | None = None) -> int:
    """The checksum of a contiguous tensor as a signed 64-bit integer.

    `device_type`: type of the device on which the other end has the tensor. None: that of `tensor`.
    """
    import torch

    data = tensor.detach().reshape(-1).view(torch.uint8)
    if device_type is not None and data.device.type != device_type:
        data = data.to(device_type)
    value = _hash(data.numpy().data) if data.device.type == "cpu" else positional_sum(data)
    return (value + 2**63) % 2**64 - 2**63


def _hash(data: memoryview) -> int:
    """XXH3 of the bytes; of more than `PART_BYTES` bytes, XXH3 of the hashes of the parts."""
    import torch
    from xxhash import xxh3_64_intdigest

    if len(data) <= PART_BYTES:
        return xxh3_64_intdigest(data)
    parts = [data[start : start + PART_BYTES] for start in range(0, len(data), PART_BYTES)]
    with ThreadPoolExecutor(min(len(parts), torch.get_num_threads())) as pool:  # XXH3 releases the GIL
        hashes = list(pool.map(xxh3_64_intdigest, parts))
    return xxh3_64_intdigest(struct.pack(f"<{len(hashes)}Q", *hashes))


def positional_sum(data: torch.Tensor) -> int:
    """The sum of the bytes' 8-byte words, each multiplied by an odd number that depends on its position.

    Computed with integers of 64 bits that overflow, so that the value is the same on every device. The last word is
    padded with zeros.
    """
    import torch

    padding = -data.numel() % CHECKSUM_BYTES
    if padding or data.storage_offset() % CHECKSUM_BYTES:  # torch has no unaligned views
        data = torch.cat([data, data.new_zeros(padding)])
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    all_words = data.view(torch.int64)
    for start in range(0, len(all_words), WORDS_PER_STEP):
        words = all_words[start : start + WORDS_PER_STEP]
        factors = torch.arange(start, start + len(words), dtype=torch.int64, device=data.device)
        for multiplier in MULTIPLIERS:
            factors *= multiplier
            factors ^= factors >> 32
        total += (words * (factors | 1)).sum()
    return int(total)
