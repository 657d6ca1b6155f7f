"""The first half of a weight update: every rank copies what it holds into staging memory, checked tensor by tensor."""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError, DeadlineError, PeerError, WeightManifestError
from verl_server.weights.gather import copy_part, copy_unless_there, is_first_replica, own_part
from verl_server.weights.manifest import Manifest
from verl_server.weights.names import is_fused, unfused

if TYPE_CHECKING:
    import torch

    from verl_server.ranks.coordinator import RankCoordinator

Json = dict[str, Any]


class ShardWriter:
    """Writes one rank's part of an update into staging memory.

    `target`: where the tensor of a name goes, in place; None on a rank that only takes part in gathering.
    `writers`: global ranks that write the same memory as this one. `leads`: this rank writes what is whole
    (plain tensors and gathered ones). `finite`: refuse NaN and infinity.
    """

    def __init__(
        self,
        target: Callable[[str], torch.Tensor | None],
        manifest: Manifest,
        writers: frozenset[int],
        group: RankCoordinator,
        deadline_s: float,
        *,
        finite: bool,
        leads: bool = False,
    ) -> None:
        self._target, self._manifest, self._writers = target, manifest, writers
        self._leads, self._group, self._deadline_s, self._finite = leads, group, deadline_s, finite
        self.sharded = False
        """Whether any tensor came in shards, so that every rank is needed."""

    def write(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Copy all tensors; returns the names written, in order. Raises BadInputError on the first bad one."""
        names: list[str] = []
        seen: set[str] = set()
        for item in pairs_of(named_tensors):
            for name in self._write_one(*item):
                if name in seen:
                    raise BadInputError(f"the tensor {name!r} comes twice in one update", name=name)
                seen.add(name)
                names.append(name)
        return names

    def _write_one(self, name: str, tensor: torch.Tensor) -> list[str]:
        from torch.distributed.tensor import DTensor

        if is_fused(name) and name not in self._manifest.tensors:
            parts = unfused(name, self._whole(tensor) if isinstance(tensor, DTensor) else tensor)
            return [written for part in parts for written in self._write_one(*part)]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if self._manifest.check(name, tuple(tensor.shape), dtype) is None:
            return []
        target = self._target(name)
        if self._finite:
            require_finite(name, tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        self.sharded = self.sharded or isinstance(tensor, DTensor)
        if not isinstance(tensor, DTensor):
            if self._leads and target is not None:
                copy_unless_there(target, tensor.detach())
        elif (part := own_part(tensor, self._writers)) is not None:
            if is_first_replica(tensor) and target is not None:
                copy_part(target, part, tensor.to_local())
        else:
            whole = self._whole(tensor)
            if self._leads and target is not None:
                target.copy_(whole)
        return [name]

    def collect(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """All tensors whole and on the CPU, for what is small and does not go through the arena."""
        from torch.distributed.tensor import DTensor

        return {
            name: (self._whole(tensor) if isinstance(tensor, DTensor) else tensor).detach().cpu()
            for name, tensor in pairs_of(named_tensors)
        }

    def _whole(self, tensor: Any) -> torch.Tensor:
        """`full_tensor`, a collective of the trainer's mesh, with a deadline and an eye on the other ranks.

        A collective cannot be taken back: when it fails this way the trainer's group is unusable, and we say so.
        """
        done: dict[str, Any] = {}

        def gather() -> None:
            try:
                with _on_device_of(tensor):
                    done["tensor"] = tensor.detach().full_tensor()
            except Exception as error:  # noqa: BLE001 - carried to the waiting thread, which raises it
                done["error"] = error

        thread = threading.Thread(target=gather, name="verl-server-gather", daemon=True)
        thread.start()
        deadline = time.monotonic() + self._deadline_s
        while thread.is_alive():
            thread.join(0.02)
            if self._group.failure is not None:
                raise self._group.failure
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"gathering a tensor from the trainer's ranks took longer than {self._deadline_s:g} s; "
                    "a rank left the collective and the trainer's process group cannot be used any more",
                    operation="full_tensor",
                    seconds=self._deadline_s,
                )
        if "error" in done:
            raise PeerError(f"gathering a tensor from the trainer's ranks failed: {done['error']}")
        whole: torch.Tensor = done["tensor"]
        return whole


@contextlib.contextmanager
def _on_device_of(tensor: torch.Tensor) -> Iterator[None]:
    """For a thread of our own, which starts on device 0; what the body computes is done when it ends."""
    import torch

    if tensor.device.type == "cpu":
        yield
        return
    module = torch.get_device_module(tensor.device)
    with module.device(tensor.device):
        yield
        module.current_stream().synchronize()


def pairs_of(named_tensors: Iterable[Any]) -> Iterable[tuple[str, torch.Tensor]]:
    import torch

    if isinstance(named_tensors, dict):
        named_tensors = named_tensors.items()
    try:
        iterator = iter(named_tensors)
    except TypeError:
        raise BadInputError(
            f"named_tensors must be pairs of name and tensor, got {type(named_tensors).__name__}"
        ) from None
    for item in iterator:
        if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str)):
            raise BadInputError(f"named_tensors must be pairs of name and tensor, got {str(item)[:100]}")
        if not isinstance(item[1], torch.Tensor):
            raise BadInputError(f"{item[0]!r} is no tensor but {type(item[1]).__name__}", name=item[0])
        yield item[0], item[1]


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """Raises WeightManifestError for a tensor (or this rank's part of one) with NaN or infinity in it."""
    import torch

    if tensor.is_floating_point() and tensor.numel():
        values = tensor.detach()
        if values.element_size() == 1:  # float8 has no arithmetic of its own
            values = values.to(torch.bfloat16)
        least, most = torch.aminmax(values)  # one pass; NaN is passed on
        if not bool(torch.isfinite(least) & torch.isfinite(most)):
            raise WeightManifestError(f"{name!r} has values that are not finite", name=name)


def digest(names: list[str]) -> int:
    """A number that is equal on ranks that brought the same names in the same order."""
    return zlib.crc32("\0".join(names).encode())


def check_same_names(brought: list[Json], all_bring: bool = False) -> None:
    """All ranks must bring what rank 0 brings, or nothing (full state dicts gathered on rank 0 only).

    `all_bring`: none may bring nothing.
    """
    first = brought[0]
    if not first["tensors"]:
        raise BadInputError("named_tensors is empty on rank 0: there is nothing to push")
    for rank, other in enumerate(brought):
        if (other["tensors"] or first["sharded"] or all_bring) and other["digest"] != first["digest"]:
            raise BadInputError(
                f"rank {rank} brought {other['tensors']} tensors that differ from the {first['tensors']} of rank 0; "
                "all ranks must push the same names in the same order",
                rank=rank,
            )
