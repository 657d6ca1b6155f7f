"""Writing one trainer rank's part of every tensor into staging memory, with a check of each tensor."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError, DeadlineError, PeerError, WeightManifestError
from verl_server.ranks.shared_meshes import SharedMeshes
from verl_server.types import Json, TensorSpec
from verl_server.weights.device.staging_copies import StagingCopies
from verl_server.weights.device.streams import CallerOrder
from verl_server.weights.gather import is_first_replica, local_slices, ranks_of, writes_own_shards
from verl_server.weights.manifest import Manifest
from verl_server.weights.update.staged_checksums import StagedChecksums
from verl_server.weights.update.tensor_source import (
    NamedTensors,
    TiedTensors,
    check_tensor,
    items_of,
    validated_pair,
)

if TYPE_CHECKING:
    import torch

POLL_INTERVAL_S = 0.02
SLOW_GATHER_S = 1.0
"""Seconds after which a rank asks whether the others still take part in a collective."""
LOSS_NOTICE_S = 1.0
"""Seconds after the error of a collective in which the rank is found that has ended."""


class ShardWriter:
    """Writes one rank's part of an update into staging memory.

    `staging_tensor(name)` returns the tensor in staging memory, or None on a rank that only takes part in gathering.
    `writer_ranks`: global ranks that write the same staging memory as this rank. `check_finite`: refuse NaN and
    infinity. `raise_failure` raises an error when another rank takes no part in gathering any more, and is called
    before and while a tensor is gathered. `on_bad_tensor` is called with the error before the tensors after a bad one
    are gathered. `writes_whole_tensors`: this rank writes plain tensors and gathered tensors; the other writers skip
    them. `copies`: makes the copies, which may run until `write` returns. `checksums` gets the checksums of the tensors
    that this rank writes whole. `tell_gathers`: see `RankCoordinator.tell_gathers`.
    """

    def __init__(
        self,
        staging_tensor: Callable[[str], torch.Tensor | None],
        manifest: Manifest,
        writer_ranks: frozenset[int],
        raise_failure: Callable[[], None],
        *,
        gather_timeout_s: float,
        check_finite: bool,
        writes_whole_tensors: bool,
        on_bad_tensor: Callable[[BadInputError], None] = lambda _: None,
        copies: StagingCopies | None = None,
        checksums: StagedChecksums | None = None,
        shared: SharedMeshes | None = None,
        tell_gathers: Callable[[Json], None] = lambda _: None,
    ) -> None:
        self._staging_tensor, self._manifest, self._writer_ranks = staging_tensor, manifest, writer_ranks
        self._raise_failure, self._gather_timeout_s = raise_failure, gather_timeout_s
        self._check_finite, self._writes_whole_tensors = check_finite, writes_whole_tensors
        self._on_bad_tensor = on_bad_tensor
        self._copies = copies or StagingCopies()
        self._checksums = checksums
        self._shared = shared or SharedMeshes()
        self._enters_each = True
        """Whether the ranks that share a mesh agree before each tensor: no rank knows the tensors of a generator."""
        self._tell_gathers, self._num_gathered = tell_gathers, Counter[str]()
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
        self._tell_gathers(self._gathers())
        self._shared.end(self._enters_each)
        self.has_gathered_all = True

    def _gathers(self, waits_in: tuple[str, str] | None = None) -> Json:
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return {"rank": rank, "counts": self._num_gathered, "waits_in": waits_in}

    def _require_writable(self, name: str, tensor: torch.Tensor) -> None:
        """Raise WeightManifestError for a DTensor that this rank has to write whole but cannot gather.

        On a rank outside of the mesh, `full_tensor` is an empty tensor.
        """
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None:
            return
        is_gathered = self._manifest.is_converted(name, TensorSpec.of(tensor)) or not writes_own_shards(
            tensor, self._writer_ranks
        )
        if self._writes_whole_tensors and is_gathered:
            raise WeightManifestError(
                f"{name!r} is a DTensor of a device mesh without this rank, which has to write the tensor: pass a "
                "DTensor of a mesh with all ranks, or a plain tensor on rank 0",
                name=name,
            )

    def _needs_gather(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the ranks gather the tensor."""
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return False
        with contextlib.suppress(BadInputError):
            names = self._manifest.checkpoint_specs(name, TensorSpec.of(tensor)).keys()
            if names <= self._manifest.ignored:  # `write` leaves the tensor out
                return False
            if self._manifest.is_converted(name, TensorSpec.of(tensor)):
                return True
        return local_slices(tensor, self._writer_ranks) is None

    def _write_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor that has been checked, as one or more tensors of the checkpoint."""
        from torch.distributed.tensor import DTensor

        is_converted = self._manifest.is_converted(name, TensorSpec.of(tensor))
        if isinstance(tensor, DTensor):
            self.has_shards = True
            if self._needs_gather(name, tensor):
                tensor = self._gather(name, tensor)
        if is_converted:
            assert self._manifest.checkpoint_names is not None
            parts = self._manifest.checkpoint_names.tensors(name, tensor)
        else:
            (checkpoint_name,) = self._manifest.checkpoint_specs(name, TensorSpec.of(tensor))
            parts = [(checkpoint_name, tensor)]
        for part_name, part in parts:
            if part_name not in self._manifest.ignored:
                self._write_checkpoint_tensor(part_name, part)

    def _write_checkpoint_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Write a whole tensor, or this rank's shard of a DTensor, by its checkpoint name."""
        from torch.distributed.tensor import DTensor

        target = self._staging_tensor(name)
        if target is None:
            return
        if not isinstance(tensor, DTensor):
            if self._writes_whole_tensors:
                copied = self._copies.copy(target, tensor.detach())
                if self._checksums is not None:
                    self._checksums.add(name, copied)
        elif is_first_replica(tensor):
            slices = local_slices(tensor, self._writer_ranks)
            assert slices is not None
            self._copies.copy(target[slices], tensor.to_local().detach())

    def gather_on_cpu(self, named_tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All tensors, complete and on the CPU. For small tensors that do not go through staging memory.

        All ranks must have DTensors of the same names in the same order, see `require_same_shards`.
        """
        from torch.distributed.tensor import DTensor

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
        outcome: dict[str, Any] = {}
        order = CallerOrder(tensor)
        mesh = ranks_of(tensor.device_mesh)
        is_shared = bool(self._shared.shared([mesh]))
        if is_shared and self._enters_each:
            self._shared.enter([mesh], repr(name))
        if not is_shared:  # the ranks of other engines are not left alone when only this engine has ended
            self._raise_failure()

        def gather() -> None:
            try:
                with order.continue_here():
                    outcome["tensor"] = tensor.detach().full_tensor()
            except Exception as error:  # noqa: BLE001 - raised by the waiting thread
                outcome["error"] = error

        thread = threading.Thread(target=gather, name="verl-server-gather", daemon=True)
        thread.start()
        waits_in = ",".join(map(str, sorted(mesh))), name
        self._num_gathered[waits_in[0]] += 1
        started, has_told = time.monotonic(), is_shared
        while thread.is_alive():
            thread.join(POLL_INTERVAL_S)
            if is_shared:
                self._shared.raise_loss(mesh)
            else:
                self._raise_failure()
            waited_s = time.monotonic() - started
            if waited_s > SLOW_GATHER_S and not has_told:
                has_told = True
                self._tell_gathers(self._gathers(waits_in))
            if waited_s > self._gather_timeout_s:
                raise DeadlineError(
                    f"gathering a tensor from the trainer's ranks took longer than {self._gather_timeout_s:g} s; "
                    "a rank left the collective, and the trainer's process group cannot be used any more",
                    operation="full_tensor",
                    seconds=self._gather_timeout_s,
                )
        if "error" in outcome:
            if is_shared:
                self._shared.raise_loss(mesh, wait_s=LOSS_NOTICE_S)
            raise PeerError(f"gathering a tensor from the trainer's ranks failed: {outcome['error']}")
        whole: torch.Tensor = outcome["tensor"]
        return whole


def meshes_of(named_tensors: NamedTensors) -> dict[frozenset[int], list[str]]:
    """The names of the DTensors of a collection by the ranks of their device meshes. Leaves bad items out."""
    from torch.distributed.tensor import DTensor

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
