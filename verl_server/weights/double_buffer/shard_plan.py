"""Geometry of buckets of own shards: which bytes of which rank's bucket form which tensor. Pure functions.

Every trainer rank writes its own shard of each tensor into its own bucket, without any communication. A TP rank of a
server opens the buckets of all trainer ranks and puts each tensor together from its parts. Where several ranks hold the
same part, the TP rank reads it from the rank that it prefers, for example the rank on its own GPU.

All ranks see the same names, shapes and placements in the same order, so all of them compute the same plan. Bucket n of
every rank contains the shards of the same tensors: a bucket ends before the first tensor whose shard does not fit into
the bucket of some rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_server.types import Json, TensorSpec
from verl_server.weights.gather import shard_slices
from verl_server.weights.layout import ALIGNMENT, ELEMENT_BYTES, round_up

if TYPE_CHECKING:
    import torch

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of a checkpoint, and the shards of it that trainer ranks hold."""

    name: str
    spec: TensorSpec
    """Full shape, and the dtype of the staged tensor."""
    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]
    """Number of the rank at each coordinate of the mesh, the last coordinate fastest."""
    shard_dims: tuple[int | None, ...]
    """For each dimension of the mesh: the dimension of the tensor that it splits, or None where it replicates."""

    @classmethod
    def replicated(cls, name: str, spec: TensorSpec, num_ranks: int) -> ShardedTensor:
        """A tensor that every rank holds whole."""
        return cls(name, spec, (num_ranks,), tuple(range(num_ranks)), (None,))

    def slices_of(self, rank: int) -> Slices | None:
        """The part of the tensor that a rank holds. None for a rank outside of the mesh."""
        if rank not in self.mesh_ranks:
            return None
        coordinates = itertools.product(*map(range, self.mesh_shape))
        coordinate = next(itertools.islice(coordinates, self.mesh_ranks.index(rank), None))
        return shard_slices(self.spec.shape, self.mesh_shape, coordinate, self.shard_dims)

    def num_bytes_of(self, rank: int) -> int:
        """Size of the shard that a rank holds, in bytes."""
        slices = self.slices_of(rank)
        return 0 if slices is None else math.prod(shape_of(slices)) * ELEMENT_BYTES[self.spec.dtype]

    def parts(self, preferred_rank: int) -> list[tuple[int, Slices]]:
        """Ranks and their parts that together are the tensor, each element once.

        Of the ranks that hold the same part, the preferred rank is chosen if it is one of them, otherwise the first.
        """
        found: dict[tuple[tuple[int, int], ...], tuple[int, Slices]] = {}
        for rank in sorted(self.mesh_ranks, key=lambda rank: rank != preferred_rank):
            slices = self.slices_of(rank)
            assert slices is not None
            if math.prod(shape_of(slices)):
                found.setdefault(tuple((part.start, part.stop) for part in slices), (rank, slices))
        return list(found.values())

    def to_message(self) -> Json:
        """The tensor as JSON, as it is in the table of a bucket."""
        return {
            "name": self.name, "shape": self.spec.shape, "dtype": self.spec.dtype, "mesh_shape": self.mesh_shape,
            "mesh_ranks": self.mesh_ranks, "shard_dims": self.shard_dims,
        }  # fmt: skip

    @classmethod
    def from_message(cls, message: Json) -> ShardedTensor:
        """The tensor that `to_message` described."""
        spec = TensorSpec(tuple(message["shape"]), message["dtype"])
        mesh = [tuple(message[field]) for field in ("mesh_shape", "mesh_ranks", "shard_dims")]
        return cls(message["name"], spec, *mesh)


def shape_of(slices: Slices) -> tuple[int, ...]:
    """The shape of a part."""
    return tuple(part.stop - part.start for part in slices)


@dataclass(frozen=True)
class BucketPlan:
    """The content of one bucket of every rank."""

    tensors: Sequence[ShardedTensor]
    offsets: Sequence[Sequence[int]]
    """For each tensor: the byte offset of its shard in the bucket of each rank."""

    def byte_range(self, index: int, rank: int) -> tuple[int, int]:
        """First byte and end of the shard of tensor `index` in the bucket of a rank."""
        start = self.offsets[index][rank]
        return start, start + self.tensors[index].num_bytes_of(rank)


def plan_buckets(tensors: Sequence[ShardedTensor], num_ranks: int, bucket_bytes: int) -> Iterator[BucketPlan]:
    """The buckets for the tensors, in their order.

    `bucket_bytes` is at least the size of the largest shard. Raises ValueError for a larger shard.
    """
    first, offsets, used = 0, list[list[int]](), [0] * num_ranks
    for index, tensor in enumerate(tensors):
        sizes = [tensor.num_bytes_of(rank) for rank in range(num_ranks)]
        if max(sizes) > bucket_bytes:
            raise ValueError(f"a shard of {tensor.name!r} has {max(sizes)} bytes, a bucket has {bucket_bytes}")
        starts = [round_up(end, ALIGNMENT) for end in used]
        if any(start + size > bucket_bytes for start, size in zip(starts, sizes, strict=True)):
            yield BucketPlan(tensors[first:index], offsets)
            first, offsets, starts = index, [], [0] * num_ranks
        offsets.append(starts)
        used = [start + size for start, size in zip(starts, sizes, strict=True)]
    if offsets:
        yield BucketPlan(tensors[first:], offsets)


def assemble(
    plan: BucketPlan,
    index: int,
    preferred_rank: int,
    target: torch.Tensor,
    read: Callable[[int, int, TensorSpec], torch.Tensor],
) -> None:
    """Put tensor `index` of a bucket together in `target`, which has the full shape.

    `read(rank, offset, spec)` is a view of a rank's bucket as a tensor.
    """
    tensor = plan.tensors[index]
    for rank, slices in tensor.parts(preferred_rank):
        shard = read(rank, plan.offsets[index][rank], TensorSpec(shape_of(slices), tensor.spec.dtype))
        target[slices].copy_(shard, non_blocking=True)


def sharded_tensor_of(name: str, tensor: torch.Tensor, dtype: str, ranks: Sequence[int]) -> ShardedTensor | None:
    """The geometry of a trainer's tensor. None for a DTensor whose parts are not plain shards of the engine's ranks.

    `ranks`: the engine's trainer ranks as global ranks, in the order of their numbers. A plain tensor is whole on all
    of them.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    spec = TensorSpec(tuple(tensor.shape), dtype)
    if not isinstance(tensor, DTensor):
        return ShardedTensor.replicated(name, spec, len(ranks))
    numbers = {rank: number for number, rank in enumerate(ranks)}
    mesh = tensor.device_mesh.mesh
    mesh_ranks = [numbers.get(int(rank)) for rank in mesh.flatten()]
    shard_dims = [placement.dim if type(placement) is Shard else None for placement in tensor.placements]
    if None in mesh_ranks or not all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        return None
    known_ranks = tuple(rank for rank in mesh_ranks if rank is not None)
    return ShardedTensor(name, spec, tuple(mesh.shape), known_ranks, tuple(shard_dims))
