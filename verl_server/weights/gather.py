"""Copies of a rank's shard of a tensor into the full tensor in staging memory.

Where all ranks of a device mesh can map the staging memory, each rank copies its own shard, in parallel, without a
collective and without a full copy anywhere. Otherwise the caller gathers one tensor at a time with `full_tensor`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl_server.errors import WeightManifestError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

MAX_CACHED_MESHES = 64


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

    `writer_ranks`: global ranks that write the same staging memory. Returns None for a mesh that contains other ranks
    than `writer_ranks`, and for placements other than Shard, Replicate and the `_StridedShard` of FSDP2 over TP.
    """
    return _own_slices(tensor) if writes_own_shards(tensor, writer_ranks) else None


def writes_own_shards(tensor: DTensor, writer_ranks: frozenset[int]) -> bool:
    """Whether each rank of the tensor's mesh writes its own shard. Equal on all ranks, also outside of the mesh.

    `writer_ranks`: see `local_slices`.
    """
    return ranks_of(tensor.device_mesh) <= writer_ranks and _split_of(tensor) is not None


@functools.lru_cache(MAX_CACHED_MESHES)
def ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    """The global ranks of a mesh. Cached: torch 2.14 needs 0.1 ms for `mesh.mesh`, and a model has many tensors."""
    return frozenset(mesh.mesh.flatten().tolist())


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

    Returns None for placements that `local_slices` does not know, and on a rank outside of the tensor's mesh.
    """
    split, coordinate = _split_of(tensor), tensor.device_mesh.get_coordinate()
    if coordinate is None or split is None:
        return None
    shard_dims, order = split
    mesh_shape = tensor.device_mesh.shape
    return shard_slices(
        tuple(tensor.shape),
        [mesh_shape[position] for position in order],
        [coordinate[position] for position in order],
        [shard_dims[position] for position in order],
    )


def _split_of(tensor: DTensor) -> tuple[list[int | None], list[int]] | None:
    """For each dimension of the mesh: the tensor dimension that it splits, or None where it replicates. And the order.

    Returns None for placements that `local_slices` does not know. For the order see `split_order`.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    shard_dims: list[int | None] = []
    split_factors: list[int] = []
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate, _StridedShard):
            return None
        shard_dims.append(getattr(placement, "dim", None))
        split_factors.append(int(getattr(placement, "split_factor", 1)))
    order = split_order(tuple(tensor.shape), tensor.device_mesh.shape, shard_dims, split_factors)
    return None if order is None else (shard_dims, order)


def split_order(
    shape: Sequence[int], mesh_shape: Sequence[int], shard_dims: Sequence[int | None], split_factors: Sequence[int]
) -> list[int] | None:
    """The dimensions of the mesh in the order in which they split the tensor. By default, that is from left to right.

    FSDP2 shards tensors that TP has sharded before, although TP is the last dimension of the mesh. DTensor describes
    this by `_StridedShard`, whose `split_factor` is the number of parts that the dimensions on its right have made.
    Returns None for split factors of other numbers, and where the parts are not equal.
    """
    order = list(range(len(mesh_shape)))
    strided_dims = {dim for dim, factor in zip(shard_dims, split_factors, strict=True) if factor > 1}
    for dim in sorted(dim for dim in strided_dims if dim is not None):
        positions = [position for position, split_dim in enumerate(shard_dims) if split_dim == dim]
        num_parts = 1
        for position in reversed(positions):
            if split_factors[position] != num_parts:
                return None
            num_parts *= mesh_shape[position]
        if shape[dim] % num_parts:
            return None
        for position, earlier in zip(positions, reversed(positions), strict=True):
            order[position] = earlier
    return order


def is_first_replica(tensor: DTensor) -> bool:
    """Whether this rank is the first along each replicated mesh dimension. Only the first replica writes."""
    from torch.distributed.tensor import Replicate

    coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or ())
    return all(
        index == 0
        for index, placement in zip(coordinate, tensor.placements, strict=True)
        if type(placement) is Replicate
    )
