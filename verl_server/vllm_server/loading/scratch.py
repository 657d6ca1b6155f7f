"""Memory for the raw weights of one module at a time, before they are packed.

The memory is kept between updates, because the pages of new memory cost more time than the copy of the weights. It is
backed by huge pages where the system has them.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

MAX_KEPT_BYTES = 2**26
"""Size of the largest block that is kept between updates. Experts of large models need more."""
HUGE_PAGE_BYTES = 2**21
ALIGNMENT = 64


class Scratch:
    """Blocks of memory. There is one for each module that is being loaded, which is usually one."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    def take(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Uninitialised tensors with the shapes, strides and dtypes of `tensors`, and the block that they lie in."""
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        block = self._take_block(size)
        return block, [
            block[offset : offset + tensor.untyped_storage().nbytes()]
            .view(tensor.dtype)
            .as_strided(tensor.shape, tensor.stride())
            for offset, tensor in zip(offsets, tensors, strict=True)
        ]

    def _take_block(self, size: int) -> torch.Tensor:
        fitting = [position for position, block in enumerate(self._free) if len(block) >= size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda position: len(self._free[position])))
        if self._free:
            self._free.pop()  # the new block takes its place
        length = max(-(-size // HUGE_PAGE_BYTES), 1) * HUGE_PAGE_BYTES
        memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def give_back(self, block: torch.Tensor) -> None:
        """Let the next module use a block."""
        self._free.append(block)

    def shrink(self) -> None:
        """Release the blocks that are too large to be kept, and all but one."""
        small = [block for block in self._free if len(block) <= MAX_KEPT_BYTES]
        self._free = sorted(small, key=len)[-1:]
