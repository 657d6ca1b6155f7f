"""The named tensors that the caller of an update passes on one trainer rank, and checks of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError, WeightManifestError
from verl_server.types import Json, TensorSpec
from verl_server.weights.gather import require_own_shard
from verl_server.weights.manifest import Manifest
from verl_server.weights.update.contributions import contribution_of

if TYPE_CHECKING:
    import torch


class TensorSource:
    """The caller's tensors of one update.

    A collection with a length (a dict or a list) is checked completely when the source is created. Tensors of a
    generator are checked as they come. Raises BadInputError for the first bad tensor.
    """

    def __init__(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], manifest: Manifest, check_finite: bool
    ) -> None:
        self.is_checked = isinstance(named_tensors, Sized)
        """Whether all tensors have been checked."""
        self.pairs: Iterable[tuple[str, torch.Tensor]]
        """Pairs of name and tensor."""
        self.contribution: Json
        """What this rank tells rank 0 before the update begins."""
        if self.is_checked:
            pairs = list(validated_pairs(named_tensors))
            names, has_shards = _check_all(pairs, manifest, check_finite)
            self.pairs = pairs
            self.contribution = contribution_of(names, has_shards) | {"names": names}
        else:
            remaining = iter(validated_pairs(named_tensors))
            first = next(remaining, None)
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
    has_shards = False
    for given_name, tensor in pairs:
        spec = TensorSpec.of(tensor)
        served_dtype = None
        for name, part in manifest.checkpoint_specs(given_name, spec).items():
            served = manifest.check(name, part.shape, part.dtype)
            if served is None:
                continue
            require_new_name(name, seen)
            names.append(name)
            served_dtype = manifest.smallest_range_dtype(served)
        if served_dtype is None:  # the tensor is left out
            continue
        require_dense(given_name, tensor)
        if isinstance(tensor, DTensor):
            require_own_shard(given_name, tensor)
            has_shards = True
        if check_finite:
            require_finite(given_name, tensor.to_local() if isinstance(tensor, DTensor) else tensor, served_dtype)
    return names, has_shards


def validated_pairs(named_tensors: Iterable[Any]) -> Iterable[tuple[str, torch.Tensor]]:
    """The pairs of name and tensor in the caller's dict or iterable. Raises BadInputError for anything else."""
    import torch

    if isinstance(named_tensors, dict):
        named_tensors = named_tensors.items()
    expected = (
        "named_tensors must be a dict of tensors by name or pairs of name and tensor, for example "
        "model.state_dict().items(); got"
    )
    if isinstance(named_tensors, (str, bytes)):
        raise BadInputError(f"{expected} {named_tensors!r}")
    try:
        iterator = iter(named_tensors)
    except TypeError:
        raise BadInputError(f"{expected} {type(named_tensors).__name__}") from None
    for item in iterator:
        if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str)):
            shown = type(item).__name__ if isinstance(item, torch.Tensor) else repr(item)[:100]
            raise BadInputError(f"{expected} the item {shown}")
        if not isinstance(item[1], torch.Tensor):
            cure = ": convert it with torch.from_numpy" if type(item[1]).__module__ == "numpy" else ""
            raise BadInputError(f"{item[0]!r} is no tensor but {type(item[1]).__name__}{cure}", name=item[0])
        yield item[0], item[1]


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


def require_finite(name: str, tensor: torch.Tensor, served_dtype: str) -> None:
    """Raise WeightManifestError if the tensor, or this rank's shard of it, contains NaN or infinity.

    Values that become infinite in the server's dtype `served_dtype` are refused as well.
    """
    import torch

    if tensor.is_floating_point() and tensor.numel():
        values = tensor.detach()
        if values.element_size() == 1:  # float8 has no arithmetic of its own
            values = values.to(torch.bfloat16)
        minimum, maximum = torch.aminmax(values)  # one pass over the memory; NaN propagates to both
        if not bool(torch.isfinite(minimum) & torch.isfinite(maximum)):
            raise WeightManifestError(
                f"{name!r} has values that are not finite (NaN or infinity) in the trainer. Look for the training step "
                "that made them: loss, gradients, learning rate. check_finite=False pushes them as they are",
                name=name,
            )
        cast_dtype = getattr(torch, served_dtype)
        if tensor.dtype == cast_dtype:
            return
        if not bool(torch.isfinite(torch.stack([minimum, maximum]).to(cast_dtype)).all()):
            cure = "Start the server with another dtype, for example dtype='bfloat16'. " * (served_dtype == "float16")
            raise WeightManifestError(
                f"{name!r} has values from {float(minimum):g} to {float(maximum):g}, some of which become infinite in "
                f"{served_dtype}, the dtype of the server. {cure}check_finite=False pushes the infinite values",
                name=name,
                expected=served_dtype,
            )
