"""A checksum as fast as reading: the sum of a tensor's 8-byte words, modulo 2**64.

Both sides compute it from what they see, the trainer and every TP rank of the server. It tells lost, stale,
shifted and overwritten bytes; it is no protection from somebody who means harm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.weights.layout import WORD_BYTES

if TYPE_CHECKING:
    import torch


def checksum_of(tensor: torch.Tensor) -> int:
    """Of a contiguous tensor on any device; the last word is filled up with zeros."""
    import torch

    data = tensor.reshape(-1).view(torch.uint8)
    if data.storage_offset() % WORD_BYTES:
        data = data.clone()  # torch has no unaligned views
    rest = data.numel() % WORD_BYTES
    if not rest:
        return int(data.view(torch.int64).sum())
    whole = data.numel() - rest
    total = int(data[:whole].view(torch.int64).sum())
    total += int.from_bytes(bytes(data[whole:].tolist()), "little", signed=False)
    return (total + 2**63) % 2**64 - 2**63
