"""Checksums of the staged tensors of one update. Most of them are computed while the tensors are copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from verl_server.weights.checksum import XXH3, Checksums
from verl_server.weights.device.streams import accelerator

if TYPE_CHECKING:
    import torch


class StagedChecksums:
    """Checksums of the tensors of one update by name, as the servers compute them.

    A tensor that was just copied is in the processor's cache, or still on the accelerator: its checksum costs less than
    that of a tensor that has to be read from the staging memory again. `add` is called for tensors that one rank writes
    whole. `values` reads the other tensors, to which several ranks have written, from the staging memory.
    `staging_tensor(name)` returns the tensor in staging memory. `algorithm`: name of the algorithm.
    """

    def __init__(self, staging_tensor: Callable[[str], torch.Tensor], algorithm: str) -> None:
        self._staging_tensor, self._algorithm = staging_tensor, algorithm
        self._checksums = Checksums(algorithm, accelerator())
        self._positions: dict[str, int] = {}
        """Position of each tensor among those whose checksums are computed."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Compute the checksum of the tensor `name`, from a tensor with the same dtype and the same elements."""
        if self._algorithm == XXH3 and tensor.device.type != "cpu":
            return  # it would be copied to the host a second time: `values` reads it from the staging memory
        self._positions[name] = len(self._positions)
        self._checksums.add(tensor)

    def values(self, names: Sequence[str]) -> list[int]:
        """The checksums of the tensors `names`, when all ranks have written their parts."""
        for name in names:
            if name not in self._positions:
                self.add(name, self._staging_tensor(name))
        checksums = self._checksums.values()
        return [checksums[self._positions[name]] for name in names]
