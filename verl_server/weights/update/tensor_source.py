"""What the caller of a streamed update brings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError
from verl_server.types import TensorSpec
from verl_server.weights.manifest import Manifest
from verl_server.weights.names import unfused_spec
from verl_server.weights.update.shard_writer import digest, pairs_of, require_finite

if TYPE_CHECKING:
    import torch


class Source:
    """The caller's tensors. What has a length is checked in whole now; what is made on the way, as it comes."""

    def __init__(self, named_tensors: Iterable[tuple[str, torch.Tensor]], manifest: Manifest, finite: bool) -> None:
        self.checked = isinstance(named_tensors, Sized)
        self.pairs: Iterable[tuple[str, torch.Tensor]]
        if self.checked:
            pairs = list(pairs_of(named_tensors))
            names, sharded = _check_all(pairs, manifest, finite)
            self.pairs = pairs
            self.bring = {"tensors": len(names), "names": names, "digest": digest(names), "sharded": sharded}
        else:
            rest = iter(pairs_of(named_tensors))
            first = next(rest, None)
            self.pairs = _again(first, rest)
            self.bring = {"tensors": int(first is not None), "names": None, "digest": 0, "sharded": False}
        self.bring["checked"] = self.checked


def _again(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    if first is not None:
        yield first
        del first
        yield from rest


def _check_all(pairs: Sequence[tuple[str, torch.Tensor]], manifest: Manifest, finite: bool) -> tuple[list[str], bool]:
    """Names in order, and whether any tensor is sharded. Raises BadInputError for the first bad one."""
    from torch.distributed.tensor import DTensor

    names: list[str] = []
    seen: set[str] = set()
    sharded = False
    for given, tensor in pairs:
        spec = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        parts = {given: spec} if given in manifest.tensors else unfused_spec(given, spec)
        for name, part in parts.items():
            if manifest.check(name, part.shape, part.dtype) is None:
                continue
            if name in seen:
                raise BadInputError(f"the tensor {name!r} comes twice in one update", name=name)
            seen.add(name)
            names.append(name)
        if finite:
            require_finite(given, tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        sharded = sharded or isinstance(tensor, DTensor)
    return names, sharded
