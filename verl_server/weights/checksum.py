"""Checksums of tensors that cost no more than reading them: the sum of 8-byte words, modulo 2**64.

The trainer and every TP rank of the servers compute the checksum of each tensor as they see it. Different checksums
reveal lost, stale, shifted and overwritten bytes. They do not protect against deliberate changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.weights.layout import CHECKSUM_BYTES

if TYPE_CHECKING:
    import torch


def compute_checksum(tensor: torch.Tensor) -> int:
    """The checksum of a contiguous tensor on any device, as a signed 64-bit integer.

    The last word is padded with zeros.
    """
    import torch

    data = tensor.reshape(-1).view(torch.uint8)
    if data.storage_offset() % CHECKSUM_BYTES:
        data = data.clone()  # torch has no unaligned views
    remainder = data.numel() % CHECKSUM_BYTES
    if not remainder:
        return int(data.view(torch.int64).sum())
    full_words_bytes = data.numel() - remainder
    total = int(data[:full_words_bytes].view(torch.int64).sum())
    total += int.from_bytes(bytes(data[full_words_bytes:].tolist()), "little", signed=False)
    return (total + 2**63) % 2**64 - 2**63
