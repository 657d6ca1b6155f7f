"""Views of existing memory as tensors, without copies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from verl_server.types import TensorSpec

if TYPE_CHECKING:
    import torch


def tensor_view(memory: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
    """A view of `memory` (uint8, one dimension) as a tensor that begins at byte `offset`.

    `offset` is a multiple of the element size of `spec.dtype`.
    """
    import torch

    dtype = getattr(torch, spec.dtype)
    storage_offset = memory.storage_offset() + offset
    shape = torch.Size(spec.shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    view = torch.empty(0, dtype=dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), storage_offset // view.element_size(), shape, strides)


def tensor_views(memory: memoryview, rows: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors of a table as views of `memory`. `rows`: name, byte offset, shape and dtype of each."""
    import torch

    flat = torch.frombuffer(memory, dtype=torch.uint8)
    for name, offset, shape, dtype in rows:
        yield name, tensor_view(flat, offset, TensorSpec(tuple(shape), dtype))
