"""Tensors in memory that is there already."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from verl_server.types import TensorSpec

if TYPE_CHECKING:
    import torch


def tensor_in(flat: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
    """The tensor that stands `offset` bytes (a multiple of its item) into the bytes `flat`, in place."""
    import torch

    dtype = getattr(torch, spec.dtype)
    where = flat.storage_offset() + offset
    shape = torch.Size(spec.shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = torch.empty(0, dtype=dtype, device=flat.device)
    return found.set_(flat.untyped_storage(), where // found.element_size(), shape, strides)
