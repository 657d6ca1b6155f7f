"""The named tensors that the caller of an update passes on one trainer rank, and checks of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from verl_server.errors import BadInputError, DeadlineError, PeerError, WeightManifestError
from verl_server.ranks.shared_meshes import SharedMeshes
from verl_server.threads import start_call
from verl_server.types import Json, TensorSpec
from verl_server.validation import as_pairs
from verl_server.weights.arena import XXH3, Checksums, choose_algorithm
from verl_server.weights.device import CallerOrder, StagingCopies, accelerator
from verl_server.weights.manifest import Manifest

if TYPE_CHECKING:
    from verl_server.ranks.coordinator import RankCoordinator


# -- Contributions ----------------------------------------------------------------------------------


def contribution_of(names: Sequence[str], has_shards: bool) -> Json:
    """What a rank tells rank 0 about its tensors. The digest is equal for equal names in equal order.

    `has_shards`: some tensors are DTensors, so every rank must take part.
    """
    return {"num_tensors": len(names), "digest": zlib.crc32("\0".join(names).encode()), "has_shards": has_shards}


def require_same_shards(contributions: Sequence[Json]) -> None:
    """Check that all ranks have DTensors of the same names. The names are those of a rank's DTensors only.

    Ranks gather their DTensors one after the other. With other names or another order they would mix the tensors, or
    wait for each other. Raises BadInputError with the first rank that differs from rank 0.
    """
    _require_equal(contributions, range(len(contributions)), "DTensors")


def require_same_names(contributions: Sequence[Json], writers: Container[int] = ()) -> None:
    """Check that all ranks push the same tensors. Raises BadInputError with the first rank that differs from rank 0.

    A rank may push nothing when the state dict was gathered on rank 0: unless tensors come in shards, or the rank is
    among `writers`, the ranks that write staging memory of their own. A rank that reads a generator does not know its
    tensors yet: its digest is None. Then only rank 0's first tensor is checked to exist.
    """
    first = contributions[0]
    if not first["num_tensors"]:
        raise BadInputError("named_tensors is empty on rank 0: there is nothing to push")
    if all(other["digest"] is not None for other in contributions):
        ranks = enumerate(contributions)
        bound = [rank for rank, other in ranks if other["num_tensors"] or first["has_shards"] or rank in writers]
        _require_equal(contributions, bound, "tensors")


def _require_equal(contributions: Sequence[Json], ranks: Iterable[int], what: str) -> None:
    first = contributions[0]
    for rank in ranks:
        if contributions[rank]["digest"] != first["digest"]:
            raise BadInputError(
                f"rank {rank} pushed {contributions[rank]['num_tensors']} {what} that differ from the "
                f"{first['num_tensors']} of rank 0; all ranks must push the same names in the same order",
                rank=rank,
            )


# -- Staged checksums -------------------------------------------------------------------------------


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


# -- Gather -----------------------------------------------------------------------------------------
# Copies of a rank's shard of a tensor into the full tensor in staging memory.
#
# Where all ranks of a device mesh can map the staging memory, each rank copies its own shard, in parallel, without a
# collective and without a full copy anywhere. Otherwise the caller gathers one tensor at a time with `full_tensor`.

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
    """The part of the full tensor that this rank's shard is. None if the tensor needs `full_tensor`, or outside of its
    mesh.

    `writer_ranks`: global ranks that write the same staging memory. A tensor needs `full_tensor` if its mesh contains
    other ranks, and for placements other than Shard, Replicate and the `_StridedShard` of FSDP2 over TP.
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
    coordinate: list[int] = list(tensor.device_mesh.get_coordinate() or ())
    return all(
        index == 0
        for index, placement in zip(coordinate, tensor.placements, strict=True)
        if type(placement) is Replicate
    )


# -- Tensor source ----------------------------------------------------------------------------------

NamedTensors: TypeAlias = "Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]"
"""The caller's tensors: a mapping, a list of pairs, or a generator of pairs."""
EXPECTED = (
    "named_tensors must be a dict of tensors by name or pairs of name and tensor, for example "
    "model.state_dict().items()"
)
NO_TENSORS = {
    "ndarray": ": convert it with torch.from_numpy",
    "ShardedTensor": ": FSDP1 has made it. Gather it first (StateDictType.FULL_STATE_DICT), or use FSDP2",
}
"""Classes that callers pass instead of tensors, and the end of the error."""
ROWS_PER_CHECKSUM = 8192
"""Number of rows of an embedding that are cast at once. Limits the temporary memory."""


class TensorSource:
    """The caller's tensors of one update.

    A collection with a length (a dict or a list) is checked completely when the source is created. Tensors of a
    generator are checked as they come. Raises BadInputError for the first bad tensor.
    """

    def __init__(self, named_tensors: NamedTensors, manifest: Manifest, check_finite: bool) -> None:
        self.is_checked = isinstance(named_tensors, Sized)
        """Whether all tensors have been checked."""
        self.pairs: Iterable[tuple[str, torch.Tensor]]
        """Pairs of name and tensor. Of a generator only the first item has been checked to be such a pair."""
        self.names: list[str] | None = None
        """The checkpoint names of the tensors in order. None for a generator."""
        self.contribution: Json
        """What this rank tells rank 0 before the update begins, see `require_same_names`."""
        if self.is_checked:
            pairs = list(validated_pairs(named_tensors))
            self.names, has_shards = _check_all(pairs, manifest, check_finite)
            self.pairs = pairs
            self.contribution = contribution_of(self.names, has_shards)
        else:
            remaining = items_of(named_tensors)
            first = next(remaining, None)
            if first is not None:
                validated_pair(first)
            self.pairs = _chain(first, remaining)
            self.contribution = {"num_tensors": int(first is not None), "digest": None, "has_shards": False}


def _chain(first: Any, remaining: Iterator[Any]) -> Iterator[Any]:
    """`first` and then the remaining pairs. Keeps no reference to `first`, whose memory may be large."""
    if first is not None:
        yield first
        del first
        yield from remaining


def _check_all(
    pairs: Sequence[tuple[str, torch.Tensor]], manifest: Manifest, check_finite: bool
) -> tuple[list[str], bool]:
    """Check all tensors. Returns their checkpoint names in order, and whether any tensor is a DTensor."""
    names: list[str] = []
    seen: set[str] = set()
    tied = TiedTensors(manifest)
    has_shards = False
    required: dict[str, torch.Tensor] = {}
    for given_name, tensor in pairs:
        if own_names := check_tensor(given_name, tensor, manifest, seen, check_finite):
            if not manifest.optional.issuperset(own_names):  # heads and layers that most trainers tie
                required[given_name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            names += own_names
            has_shards |= isinstance(tensor, DTensor)
        tied.add(given_name, tensor)
    tied.require_equal()
    _require_own_memory(required, manifest)
    return names, has_shards


def check_tensor(
    given_name: str, tensor: torch.Tensor, manifest: Manifest, seen: set[str], check_finite: bool
) -> list[str]:
    """Check one tensor, or this rank's shard of it. Returns its checkpoint names: none if the tensor is left out.

    `seen`: the checkpoint names of earlier tensors, to which the names are added. Raises BadInputError.
    """
    names: list[str] = []
    smallest_dtype = ""
    for name, part in manifest.checkpoint_specs(given_name, TensorSpec.of(tensor)).items():
        served = manifest.check(name, part.shape, part.dtype)
        if served is None:
            continue
        require_new_name(name, seen)
        names.append(name)
        smallest_dtype = manifest.narrowest.get(name, served.dtype)
    if names:
        require_dense(given_name, tensor)
        if isinstance(tensor, DTensor):
            require_own_shard(given_name, tensor)
            tensor = tensor.to_local()
        require_finite(given_name, tensor, smallest_dtype, check_finite)
    return names


def _require_own_memory(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
    """Raise BadInputError if two tensors have an element in common, as those of a generator that reuses a buffer have.

    Parts of one tensor without a common element are legal, also interleaved ones such as its columns. So is an
    output head that the trainer has tied to its embedding, whatever the checkpoint does.
    """
    import numpy as np

    starts = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel() > 0}
    # A tensor of a subclass that consists of others, for example quantized ones, has no memory of its own: 0.
    spans = sorted((str(tensors[name].device), start, name) for name, start in starts.items() if start)
    reaching: list[tuple[int, str]] = []
    """Where the memory of earlier tensors ends that reach beyond the start of the present one."""
    for index, (device, start, name) in enumerate(spans):
        tensor = tensors[name]
        if index and spans[index - 1][0] != device:
            reaching = []
        reaching = [each for each in reaching if each[0] > start]
        for _, earlier in reaching:
            other = tensors[earlier]
            is_equal = TensorSpec.of(tensor) == TensorSpec.of(other) and tensor.stride() == other.stride()
            if is_equal and start == starts[earlier] and manifest.are_vocabulary({name, earlier}):
                continue
            if np.shares_memory(np.asarray(_Elements(tensor)), np.asarray(_Elements(other))):
                raise BadInputError(
                    f"{name!r} and {earlier!r} have the same memory, or a part of it in common, so that both have the "
                    "values that were written last. Pass a generator that uses one buffer for all tensors itself, not "
                    "list(generator). If both tensors have equal values on purpose, pass tensor.clone()",
                    name=name,
                )
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        reaching.append((start + (last + 1) * tensor.element_size(), name))


class _Elements:
    """Where the elements of a tensor are in memory, for numpy, which does not read them: they may be on a device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
        }


class TiedTensors:
    """The output head and the embedding of one update, where the servers have one parameter for both.

    A trainer in which the two have come apart would otherwise train other weights than it samples from.
    `keeps_tensors`: the tensors stay as they are until `require_equal`. Those of a generator may reuse memory, so they
    are read at once.
    """

    def __init__(self, manifest: Manifest, *, keeps_tensors: bool = True) -> None:
        self._manifest, self._keeps_tensors = manifest, keeps_tensors
        self._found: dict[str, tuple[Any, Any]] = {}
        """By name: how the tensor is sharded, and this rank's part of it or the checksums of that part."""

    def add(self, given_name: str, tensor: torch.Tensor) -> None:
        """Take note of a tensor that `check_tensor` has accepted. Raises WeightManifestError if it has no values."""
        names = () if self._manifest.tied is None else self._manifest.tied
        for name in self._manifest.checkpoint_specs(given_name, TensorSpec.of(tensor)) if names else ():
            if name in names:
                require_dense(given_name, tensor)
                sharding, part = None, tensor.detach()
                if isinstance(part, DTensor):
                    sharding, part = (part.device_mesh, part.placements), part.to_local()
                self._found[name] = sharding, part if self._keeps_tensors else self._checksums(part)

    def require_equal(self) -> None:
        """Raise WeightManifestError if the update has an output head that is not the embedding of the update."""
        if self._manifest.tied is None or (found := self._found.get(self._manifest.tied[0])) is None:
            return
        (sharding, values), (other_sharding, others) = found, self._found.get(self._manifest.tied[1], (None, None))
        if others is not None and sharding == other_sharding:
            if self._keeps_tensors and values.device == others.device and values.is_set_to(others):
                return
            if self._keeps_tensors:
                values, others = self._checksums(values), self._checksums(others)
            if values == others:
                return
        head, embedding = self._manifest.tied
        problem = "lacks the second" if others is None else "has other values or shards for the first"
        raise WeightManifestError(
            f"{head!r} and {embedding!r} are one parameter in the servers (tie_word_embeddings), and the update "
            f"{problem}. If they are one parameter in the trainer, push {embedding!r} alone. Otherwise tie them, or "
            f"serve a checkpoint with tie_word_embeddings=false in its config.json and with its own {head!r}",
            name=head,
        )

    def _checksums(self, part: torch.Tensor) -> list[int]:
        """Checksums of rows in the dtype in which they are pushed."""
        assert self._manifest.tied is not None
        dtype = getattr(torch, self._manifest.tensors[self._manifest.tied[1]].dtype)
        checksums = Checksums(choose_algorithm(), accelerator())
        for start in range(0, len(part), ROWS_PER_CHECKSUM):
            checksums.add(part[start : start + ROWS_PER_CHECKSUM].to(dtype))
        return checksums.values()


def items_of(named_tensors: Any) -> Iterator[Any]:
    """The items of the caller's mapping or iterable, which have not been checked. Raises BadInputError for others."""
    if isinstance(named_tensors, (str, bytes)):
        raise BadInputError(f"{EXPECTED}; got {named_tensors!r}")
    try:
        return iter(as_pairs(named_tensors))
    except TypeError:
        raise BadInputError(f"{EXPECTED}; got {type(named_tensors).__name__}") from None


def validated_pair(item: Any) -> tuple[str, torch.Tensor]:
    """The item as a pair of name and tensor. Raises BadInputError for anything else."""
    if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str)):
        shown = type(item).__name__ if isinstance(item, torch.Tensor) else repr(item)[:100]
        raise BadInputError(f"{EXPECTED}; got the item {shown}")
    name, tensor = item
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise BadInputError(f"{name!r} is no tensor but {kind}{NO_TENSORS.get(kind, '')}", name=name)
    return name, tensor


def validated_pairs(named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs of name and tensor in the caller's mapping or iterable. Raises BadInputError for anything else."""
    return map(validated_pair, items_of(named_tensors))


def read_dense_tensors(named_tensors: NamedTensors) -> dict[str, torch.Tensor]:
    """The caller's tensors by name. Raises BadInputError for a bad item, a tensor without values, a repeated name."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    for name, tensor in validated_pairs(named_tensors):
        require_dense(name, tensor)
        require_new_name(name, seen)
        tensors[name] = tensor
    return tensors


def require_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise WeightManifestError for a tensor that has no memory of its elements: a meta tensor or a sparse tensor."""
    if tensor.is_meta:
        raise WeightManifestError(
            f"{name!r} is on the meta device and has no values, for example because the model is offloaded: load the "
            "parameters to the CPU or an accelerator before the push",
            name=name,
        )
    if tensor.layout != torch.strided:
        raise WeightManifestError(f"{name!r} is a sparse tensor ({tensor.layout}): push tensor.to_dense()", name=name)


def require_new_name(name: str, seen: set[str]) -> None:
    """Add a name to `seen`. Raises BadInputError if it is there already."""
    if name in seen:
        raise BadInputError(f"the tensor {name!r} comes twice in one update: pass each tensor once", name=name)
    seen.add(name)


def require_finite(name: str, tensor: torch.Tensor, smallest_dtype: str, check_finite: bool) -> None:
    """Raise WeightManifestError if finite values of the tensor, or of this rank's shard of it, become infinite.

    `smallest_dtype`: the dtype with the smallest range to which the tensor is cast. With `check_finite`, NaN and
    infinity are refused as well.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return
    cast_dtype = getattr(torch, smallest_dtype)
    # Only weights that have diverged lie between the largest numbers of bfloat16 and of float32, which are close.
    may_overflow = torch.finfo(tensor.dtype).max > 2 * torch.finfo(cast_dtype).max
    if not check_finite and not may_overflow:
        return
    values = tensor.detach()
    if values.element_size() == 1:  # float8 has no arithmetic of its own
        values = values.to(torch.bfloat16)
    minimum, maximum = torch.aminmax(values)  # one pass over the memory; NaN propagates to both
    if not bool(torch.isfinite(minimum) & torch.isfinite(maximum)):
        if not check_finite:
            return
        raise WeightManifestError(
            f"{name!r} has values that are not finite (NaN or infinity) in the trainer. Look for the training step "
            "that made them: loss, gradients, learning rate. check_finite=False pushes them as they are",
            name=name,
        )
    if tensor.dtype != cast_dtype and not bool(torch.isfinite(torch.stack([minimum, maximum]).to(cast_dtype)).all()):
        cure = ". Start the server with another dtype, for example dtype='bfloat16'" * (smallest_dtype == "float16")
        raise WeightManifestError(
            f"{name!r} has values from {float(minimum):g} to {float(maximum):g}, some of which become infinite in "
            f"{smallest_dtype}, the dtype of the server{cure}",
            name=name,
            expected=smallest_dtype,
        )


# -- Shard writer -----------------------------------------------------------------------------------

POLL_INTERVAL_S = 0.02
SLOW_GATHER_S = 1.0
"""Seconds after which a rank asks whether the others still take part in a collective."""
LOSS_NOTICE_S = 1.0
"""Seconds after the error of a collective in which the rank is found that has ended."""


class ShardWriter:
    """Writes one rank's part of an update into staging memory.

    `staging_tensor(name)` returns the tensor in staging memory, or None on a rank that only takes part in gathering.
    `writer_ranks`: global ranks that write the same staging memory as this rank. `call_id`: the call of `coordinator`
    at which the ranks arrive afterwards. Before and while a tensor is gathered, this rank raises the error that another
    rank has announced for it, and tells the ranks that it waits. `check_finite`: refuse NaN and infinity.
    `on_bad_tensor` is called with the error before the tensors after a bad one are gathered. `writes_whole_tensors`:
    this rank writes plain tensors and gathered tensors; the other writers skip them. `copies`: makes the copies, which
    may run until `write` returns. `checksums` gets the checksums of the tensors that this rank writes whole.
    """

    def __init__(
        self,
        staging_tensor: Callable[[str], torch.Tensor | None],
        manifest: Manifest,
        writer_ranks: frozenset[int],
        coordinator: RankCoordinator,
        call_id: str,
        *,
        gather_timeout_s: float,
        check_finite: bool,
        writes_whole_tensors: bool,
        on_bad_tensor: Callable[[BadInputError], None] = lambda _: None,
        copies: StagingCopies | None = None,
        checksums: StagedChecksums | None = None,
        shared: SharedMeshes | None = None,
    ) -> None:
        self._staging_tensor, self._manifest, self._writer_ranks = staging_tensor, manifest, writer_ranks
        self._coordinator, self.call_id, self._gather_timeout_s = coordinator, call_id, gather_timeout_s
        self._check_finite, self._writes_whole_tensors = check_finite, writes_whole_tensors
        self._on_bad_tensor = on_bad_tensor
        self._copies = copies or StagingCopies()
        self._checksums = checksums
        self._shared = shared or SharedMeshes()
        self._enters_each = True
        """Whether the ranks that share a mesh agree before each tensor: no rank knows the tensors of a generator."""
        self._num_gathered = Counter[str]()
        self.has_gathered_all = False
        """Whether no other rank waits for this rank to gather a tensor with it."""
        self.has_shards = False
        """Whether any tensor was a DTensor, so that every rank is needed."""

    def write(self, named_tensors: NamedTensors) -> list[str]:
        """Write all tensors. Returns their checkpoint names in order.

        Raises BadInputError for the first bad tensor, after this rank has taken part in gathering the other tensors:
        the other ranks would wait in the collective operations until the deadline, and the trainer's process group
        could not be used any more.
        """
        names: list[str] = []
        seen: set[str] = set()
        tied = TiedTensors(self._manifest, keeps_tensors=False)
        is_checked = isinstance(named_tensors, Sized)  # by `TensorSource`
        if is_checked:
            self._enter_all(named_tensors)
        items = items_of(named_tensors)
        for item in items:
            try:
                given_name, tensor = validated_pair(item)
                own_names = check_tensor(given_name, tensor, self._manifest, seen, self._check_finite)
                if own_names:
                    self._require_writable(given_name, tensor)
                if not is_checked:
                    tied.add(given_name, tensor)
            except BadInputError as error:
                self._on_bad_tensor(error)
                if not self._shared.in_use:  # otherwise all ranks raise the error before the next tensor
                    self.gather_only(itertools.chain([item], items))
                raise
            if own_names:
                self._write_tensor(given_name, tensor)
                names += own_names
            del item, tensor
        self._copies.wait()
        self._end_gathering()
        tied.require_equal()
        return names

    def refuse(self, named_tensors: NamedTensors, error: BadInputError) -> None:
        """Make no other rank wait for this rank, which does not write its tensors because of `error`.

        With ranks of other engines, all ranks raise the error. Otherwise this rank takes part in gathering.
        """
        if self._shared.shared(meshes_of(named_tensors)):
            self._shared.leave(error)
        else:
            self.gather_only(named_tensors)

    def _enter_all(self, named_tensors: NamedTensors) -> None:
        enter_meshes(self._shared, named_tensors)
        self._enters_each = False

    def gather_only(self, named_tensors: NamedTensors) -> None:
        """Take part in gathering the tensors that the other ranks gather, and write nothing.

        Stops at an item that other ranks may gather, but this rank cannot: no tensor, or a tensor on the meta device.
        """
        for item in items_of(named_tensors):
            try:
                name, tensor = validated_pair(item)
            except BadInputError:
                return
            if self._needs_gather(name, tensor):
                if tensor.is_meta:
                    return
                self._gather(name, tensor)
            del item, tensor
        self._end_gathering()

    def _end_gathering(self) -> None:
        """This rank has taken part in all collectives: the others learn when they wait for it in a further one."""
        self._coordinator.tell_gathers(self.call_id, self._gathers())
        self._shared.end(self._enters_each)
        self.has_gathered_all = True

    def _gathers(self, waits_in: tuple[str, str] | None = None) -> Json:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return {"rank": rank, "counts": self._num_gathered, "waits_in": waits_in}

    def _require_writable(self, name: str, tensor: torch.Tensor) -> None:
        """Raise WeightManifestError for a DTensor that this rank has to write whole but cannot gather.

        On a rank outside of the mesh, `full_tensor` is an empty tensor.
        """
        is_outside = isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None
        if is_outside and self._writes_whole_tensors and self._needs_gather(name, tensor):
            raise WeightManifestError(
                f"{name!r} is a DTensor of a device mesh without this rank, which has to write the tensor: pass a "
                "DTensor of a mesh with all ranks, or a plain tensor on rank 0",
                name=name,
            )

    def _needs_gather(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the ranks gather the tensor."""
        if not isinstance(tensor, DTensor):
            return False
        with contextlib.suppress(BadInputError):
            names = self._manifest.checkpoint_specs(name, TensorSpec.of(tensor)).keys()
            if names <= self._manifest.ignored:  # `write` leaves the tensor out
                return False
            if self._manifest.is_converted(name, TensorSpec.of(tensor)):
                return True
        return not writes_own_shards(tensor, self._writer_ranks)

    def _write_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor that has been checked, as one or more tensors of the checkpoint."""
        if isinstance(tensor, DTensor):
            self.has_shards = True
            if self._needs_gather(name, tensor):
                tensor = self._gather(name, tensor)
        for part_name, part in self._manifest.checkpoint_parts(name, tensor):
            if part_name not in self._manifest.ignored:
                self._write_checkpoint_tensor(part_name, part)

    def _write_checkpoint_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor, or this rank's shard of a DTensor, by its checkpoint name."""
        target = self._staging_tensor(name)
        if target is None:
            return
        if not isinstance(tensor, DTensor):
            if self._writes_whole_tensors:
                copied = self._copies.copy(target, tensor.detach())
                if self._checksums is not None:
                    self._checksums.add(name, copied)
        elif (slices := local_slices(tensor, self._writer_ranks)) is not None and is_first_replica(tensor):
            self._copies.copy(target[slices], tensor.to_local().detach())

    def gather_on_cpu(self, named_tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All tensors, complete and on the CPU. For small tensors that do not go through staging memory.

        All ranks must have DTensors of the same names in the same order, see `require_same_shards`.
        """
        self._enter_all(named_tensors)
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in named_tensors.items():
            tensors[name] = (self._gather(name, tensor) if isinstance(tensor, DTensor) else tensor).detach().cpu()
        self._shared.end(agree=False)
        self.has_gathered_all = True
        return tensors

    def _gather(self, name: str, tensor: Any) -> torch.Tensor:
        """`full_tensor`, a collective of the trainer's mesh, with a deadline and a check of the other ranks.

        A collective cannot be cancelled. When this raises, the trainer's process group cannot be used any more. Raises
        DeadlineError, PeerError, or the failure of the coordinator.
        """
        order = CallerOrder(tensor)
        mesh = ranks_of(tensor.device_mesh)
        is_shared = bool(self._shared.shared([mesh]))
        if is_shared and self._enters_each:
            self._shared.enter([mesh], repr(name))
        if not is_shared:  # the ranks of other engines are not left alone when only this engine has ended
            self._coordinator.raise_failure(self.call_id)

        def gather() -> torch.Tensor:
            with order.continue_here():
                whole: torch.Tensor = tensor.detach().full_tensor()
                return whole

        gathering = start_call(gather, "verl-server-gather")
        waits_in = ",".join(map(str, sorted(mesh))), name
        self._num_gathered[waits_in[0]] += 1
        started, has_told = time.monotonic(), is_shared
        while not gathering.done():
            wait([gathering], POLL_INTERVAL_S)
            if is_shared:
                self._shared.raise_loss(mesh)
            else:
                self._coordinator.raise_failure(self.call_id)
            waited_s = time.monotonic() - started
            if waited_s > SLOW_GATHER_S and not has_told:
                has_told = True
                self._coordinator.tell_gathers(self.call_id, self._gathers(waits_in))
            if waited_s > self._gather_timeout_s:
                raise DeadlineError(
                    f"gathering a tensor from the trainer's ranks took longer than {self._gather_timeout_s:g} s; "
                    "a rank left the collective, and the trainer's process group cannot be used any more",
                    operation="full_tensor",
                    seconds=self._gather_timeout_s,
                )
        if (error := gathering.exception()) is not None:
            if is_shared:
                self._shared.raise_loss(mesh, wait_s=LOSS_NOTICE_S)
            raise PeerError(f"gathering a tensor from the trainer's ranks failed: {error}")
        return gathering.result()


def meshes_of(named_tensors: NamedTensors) -> dict[frozenset[int], list[str]]:
    """The names of the DTensors of a collection by the ranks of their device meshes. Leaves bad items out."""
    names: dict[frozenset[int], list[str]] = {}
    for item in items_of(named_tensors):
        with contextlib.suppress(BadInputError):
            name, tensor = validated_pair(item)
            if isinstance(tensor, DTensor):
                names.setdefault(ranks_of(tensor.device_mesh), []).append(name)
    return names


def enter_meshes(shared: SharedMeshes, named_tensors: NamedTensors) -> None:
    """Agree on all collectives of a collection of tensors with the ranks of other engines that share its meshes."""
    for mesh, names in sorted(meshes_of(named_tensors).items(), key=lambda item: sorted(item[0])):
        shared.enter([mesh], f"{len(names)} DTensors (digest {zlib.crc32(chr(0).join(names).encode()):08x})")
