"""Copies of a rank's shard of a tensor into the full tensor in staging memory.

Where all ranks of a device mesh can map the staging memory, each rank copies its own shard, in parallel, without a
collective and without a full copy anywhere. Otherwise the caller gathers one tensor at a time with `full_tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_server.errors import WeightManifestError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def shard_slices(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    shard_dims: Sequence[int | None],
) -> tuple[slice, ...]:
    """The part of the full tensor of `shape` that the rank at `coordinate` of the mesh holds.

    `shard_dims[i]` is the tensor dimension that mesh dimension i splits, or None where it replicates. The parts are
    those of `torch.chunk`: each has the even share rounded up, and the last parts are smaller or empty.
    """
    bounds = [(0, extent) for extent in shape]
    for num_parts, index, dim in zip(mesh_shape, coordinate, shard_dims, strict=True):
        if dim is None:
            continue
        start, stop = bounds[dim]
        part_size = -(-(stop - start) // num_parts)
        part_start = min(start + part_size * index, stop)
        bounds[dim] = (part_start, min(part_start + part_size, stop))
    return tuple(slice(start, stop) for start, stop in bounds)


def local_slices(tensor: DTensor, writer_ranks: frozenset[int]) -> tuple[slice, ...] | None:
    """The part of the full tensor that this rank's shard is, or None if the tensor needs `full_tensor`.

    `writer_ranks`: global ranks that write the same staging memory. Returns None for placements other than plain Shard
    and Replicate, and for a mesh that contains other ranks than `writer_ranks`.
    """
    if not set(tensor.device_mesh.mesh.flatten().tolist()) <= writer_ranks:
        return None
    return _own_slices(tensor)


def require_own_shard(name: str, tensor: DTensor) -> None:
    """Raise WeightManifestError if this rank's shard does not have the shape that the tensor's placements give it.

    `DTensor.from_local` does not check that. A copy of a shard that is too short would be broadcast.
    """
    slices = _own_slices(tensor)
    if slices is None:
        return
    expected, got = [part.stop - part.start for part in slices], list(tensor.to_local().shape)
    if got != expected and (math.prod(expected) or math.prod(got)):
        raise WeightManifestError(
            f"the shard of {name!r} on this rank has shape {got}, but shape {list(tensor.shape)} and placements "
            f"{tuple(tensor.placements)} give this rank a shard of shape {expected}. Make the tensor with "
            "distribute_tensor, or pass to DTensor.from_local a shard as torch.chunk makes it, with shape= and stride=",
            name=name,
            expected=expected,
            got=got,
        )


def _own_slices(tensor: DTensor) -> tuple[slice, ...] | None:
    """The part of the full tensor that this rank's shard is.

    Returns None for placements other than plain Shard and Replicate, and on a rank outside of the tensor's mesh.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh = tensor.device_mesh
    shard_dims: list[int | None] = []
    for placement in tensor.placements:
        if type(placement) is Shard:
            shard_dims.append(placement.dim)
        elif type(placement) is Replicate:
            shard_dims.append(None)
        else:
            return None
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    return shard_slices(tuple(tensor.shape), tuple(mesh.mesh.shape), coordinate, shard_dims)


def is_first_replica(tensor: DTensor) -> bool:
    """Whether this rank is the first along each replicated mesh dimension. Only the first replica writes."""
    from torch.distributed.tensor import Replicate

    coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or ())
    return all(
        index == 0
        for index, placement in zip(coordinate, tensor.placements, strict=True)
        if type(placement) is Replicate
    )
