"""Checksums of tensors that depend on the value and the position of every byte, and cost little more than reading them.

The trainer and every TP rank of the servers compute the checksum of each tensor as they see it. Different checksums
reveal lost, stale, moved and overwritten bytes. They do not protect against deliberate changes.

There are two algorithms, and one is chosen for all updates of an engine. XXH3 is fast on a CPU. The positional sum adds
8-byte words that are each multiplied by a number that depends on its position. It is fast on an accelerator, and has
the same value on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl_server.weights.layout import CHECKSUM_BYTES

if TYPE_CHECKING:
    import torch

WORDS_PER_STEP = 2**22
"""Number of words that a positional sum adds at once. Limits the temporary memory."""
MULTIPLIERS = (-7046029254386353131, -4658895280553007687)
"""Constants of the SplitMix64 generator, as signed integers."""
XXH3, POSITIONAL_SUM = "xxh3", "positional_sum"
"""Names of the algorithms."""


def choose_algorithm(*, servers_read_host_memory: bool = False) -> str:
    """The algorithm for the updates of a trainer: that of the accelerator if this process can use one.

    `servers_read_host_memory`: the servers compute the checksums on the host (vLLM), where XXH3 is 50 times as fast.
    """
    import torch

    return POSITIONAL_SUM if torch.cuda.is_available() and not servers_read_host_memory else XXH3


class Checksums:
    """Checksums of tensors that are read one after the other.

    Positional sums are computed on an accelerator without waiting for it; `values` fetches all of them together.
    `device`: where positional sums of tensors in host memory are computed. None: on the CPU.
    """

    def __init__(self, algorithm: str, device: torch.device | None = None) -> None:
        self._algorithm, self._device = algorithm, device
        self._values: list[Any] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Compute the checksum of a contiguous tensor."""
        import torch

        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if self._algorithm == XXH3:
            self._values.append(_hash(data))
        elif self._algorithm == POSITIONAL_SUM:
            try:
                self._values.append(_positional_total(data, self._device or data.device))
            except torch.OutOfMemoryError:
                self._values.append(_positional_total(data.cpu(), torch.device("cpu")))
        else:
            raise ValueError(f"there is no checksum {self._algorithm!r}")

    def values(self) -> list[int]:
        """The checksums of all tensors so far, in their order, as signed 64-bit integers."""
        return [(int(value) + 2**63) % 2**64 - 2**63 for value in _on_host(self._values)]


def compute_checksum(tensor: torch.Tensor, algorithm: str = XXH3) -> int:
    """The checksum of one contiguous tensor as a signed 64-bit integer."""
    checksums = Checksums(algorithm)
    checksums.add(tensor)
    return checksums.values()[0]


def verified_share(tp_rank: int, num_sharing: int) -> tuple[int, int]:
    """The tensors that a TP rank verifies: those at the positions `first`, `first + step`, ... Returns both numbers.

    `num_sharing`: number of consecutive TP ranks that read the same staging memory. Together they verify all tensors.
    """
    return tp_rank % num_sharing, num_sharing


def shares_are_complete(shares: Sequence[tuple[int, int]]) -> bool:
    """Whether every tensor is in one of the shares."""
    positions = range(math.lcm(*(step for _, step in shares)))
    return all(any(position % step == first for first, step in shares) for position in positions)


def _on_host(values: Sequence[Any]) -> list[Any]:
    """Numbers, and tensors with one number, on the host: with one transfer from each device."""
    import torch

    numbers = list(values)
    positions_by_device: dict[torch.device, list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            positions_by_device.setdefault(value.device, []).append(position)
    for positions in positions_by_device.values():
        fetched = torch.stack([values[position] for position in positions]).tolist()
        for position, number in zip(positions, fetched, strict=True):
            numbers[position] = number
    return numbers


def _hash(data: torch.Tensor) -> int:
    """XXH3 of bytes. One thread reads memory as fast as several threads: see `docs/performance.md`."""
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest(data.cpu().numpy().data)


def positional_sum(data: torch.Tensor) -> int:
    """The positional sum of bytes. The last word is padded with zeros."""
    return int(_positional_total(data, data.device))


def _positional_total(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The positional sum as a tensor on `device`, where it is computed.

    Computed with integers of 64 bits that overflow, so that the value is the same on every device. Each word is
    multiplied by an odd number.
    """
    import torch

    padding = -data.numel() % CHECKSUM_BYTES
    if padding or data.storage_offset() % CHECKSUM_BYTES:  # torch has no unaligned views
        data = torch.cat([data, data.new_zeros(padding)])
    total = torch.zeros((), dtype=torch.int64, device=device)
    all_words = data.view(torch.int64)
    for start in range(0, len(all_words), WORDS_PER_STEP):
        words = all_words[start : start + WORDS_PER_STEP].to(device)
        factors = torch.arange(start, start + len(words), dtype=torch.int64, device=device)
        for multiplier in MULTIPLIERS:
            factors *= multiplier
            factors ^= factors >> 32
        total += (words * (factors | 1)).sum()
    return total
