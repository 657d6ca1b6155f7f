"""The named tensors that the caller of an update passes on one trainer rank, and checks of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, TypeAlias

from verl_server.errors import BadInputError, WeightManifestError
from verl_server.types import Json, TensorSpec
from verl_server.validation import as_pairs
from verl_server.weights.checksum import Checksums, choose_algorithm
from verl_server.weights.device.streams import accelerator
from verl_server.weights.gather import require_own_shard
from verl_server.weights.manifest import Manifest
from verl_server.weights.update.contributions import contribution_of

if TYPE_CHECKING:
    import torch

NamedTensors: TypeAlias = "Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]"
"""The caller's tensors: a mapping, a list of pairs, or a generator of pairs."""
EXPECTED = (
    "named_tensors must be a dict of tensors by name or pairs of name and tensor, for example "
    "model.state_dict().items()"
)


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
        self.contribution: Json
        """What this rank tells rank 0 before the update begins."""
        if self.is_checked:
            pairs = list(validated_pairs(named_tensors))
            names, has_shards = _check_all(pairs, manifest, check_finite)
            self.pairs = pairs
            self.contribution = contribution_of(names, has_shards) | {"names": names}
        else:
            remaining = items_of(named_tensors)
            first = next(remaining, None)
            if first is not None:
                validated_pair(first)
            self.pairs = _chain(first, remaining)
            self.contribution = {
                "num_tensors": int(first is not None), "digest": 0, "has_shards": False, "names": None,
            }  # fmt: skip
        self.contribution["is_checked"] = self.is_checked


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
    from torch.distributed.tensor import DTensor

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
    from torch.distributed.tensor import DTensor

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
        from torch.distributed.tensor import DTensor

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
        import torch

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
    import torch

    if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str)):
        shown = type(item).__name__ if isinstance(item, torch.Tensor) else repr(item)[:100]
        raise BadInputError(f"{EXPECTED}; got the item {shown}")
    name, tensor = item
    if not isinstance(tensor, torch.Tensor):
        cure = ": convert it with torch.from_numpy" if type(tensor).__module__ == "numpy" else ""
        if type(tensor).__name__ == "ShardedTensor":  # FSDP1's state dict
            cure = ": gather it first (StateDictType.FULL_STATE_DICT), or use FSDP2, whose DTensors are read in shards"
        raise BadInputError(f"{name!r} is no tensor but {type(tensor).__name__}{cure}", name=name)
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
    import torch

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
    import torch

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
