"""From a rank's shard to its place in the arena.

Where all ranks of a mesh can map the arena, each copies its own shard to its place, in parallel: no
collective, no full copy anywhere. Elsewhere `full_tensor` gathers one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


def shard_slices(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    shard_dims: Sequence[int | None],
) -> tuple[slice, ...]:
    """Which part of the full tensor the rank at `coordinate` of the mesh holds.

    `shard_dims[i]` is the tensor dimension that mesh dimension i splits, None where it replicates. Parts are
    those of `torch.chunk`: the ceiling of the even share, the last ones smaller or empty.
    """
    bounds = [(0, extent) for extent in shape]
    for parts, index, dim in zip(mesh_shape, coordinate, shard_dims, strict=True):
        if dim is None:
            continue
        start, stop = bounds[dim]
        share = -(-(stop - start) // parts)
        low = min(start + share * index, stop)
        bounds[dim] = (low, min(low + share, stop))
    return tuple(slice(start, stop) for start, stop in bounds)


def own_part(tensor: DTensor, ranks: frozenset[int]) -> tuple[slice, ...] | None:
    """Where this rank's shard of `tensor` belongs if copying shards is enough, else None.

    None for placements other than plain Shard and Replicate, and for meshes that reach beyond `ranks` (the
    ranks, by global number, that write the same arena): these need `full_tensor`.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh = tensor.device_mesh
    if not set(mesh.mesh.flatten().tolist()) <= ranks:
        return None
    dims: list[int | None] = []
    for placement in tensor.placements:
        if type(placement) is Shard:
            dims.append(placement.dim)
        elif type(placement) is Replicate:
            dims.append(None)
        else:
            return None
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    return shard_slices(tuple(tensor.shape), tuple(mesh.mesh.shape), coordinate, dims)


def is_first_replica(tensor: DTensor) -> bool:
    """Whether this rank is the one of its replicas that writes (the first along each replicated dimension)."""
    from torch.distributed.tensor import Replicate

    coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or ())
    return all(
        index == 0
        for index, placement in zip(coordinate, tensor.placements, strict=True)
        if type(placement) is Replicate
    )


def copy_part(target: torch.Tensor, part: tuple[slice, ...], local: torch.Tensor) -> None:
    """Copy a shard to its place, casting if the dtypes differ."""
    if local.numel():
        copy_unless_there(target[part], local.detach())


def copy_unless_there(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, unless `source` is `target`: a trainer may keep its parameters in the arena."""
    same = (
        target.data_ptr() == source.data_ptr() and target.stride() == source.stride() and target.dtype == source.dtype
    )
    if not same:
        target.copy_(source)
