"""Writing one trainer rank's part of every tensor into staging memory, with a check of each tensor."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError, DeadlineError, PeerError
from verl_server.types import TensorSpec
from verl_server.validation import as_pairs
from verl_server.weights.gather import (
    copy_if_elsewhere,
    copy_shard,
    is_first_replica,
    local_slices,
    require_own_shard,
)
from verl_server.weights.manifest import Manifest
from verl_server.weights.update.tensor_source import require_dense, require_finite, require_new_name, validated_pairs

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor


POLL_INTERVAL_S = 0.02


class ShardWriter:
    """Writes one rank's part of an update into staging memory.

    `staging_tensor(name)` returns the tensor in staging memory, or None on a rank that only takes part in gathering.
    `writer_ranks`: global ranks that write the same staging memory as this rank. `check_finite`: refuse NaN and
    infinity. `raise_failure` raises an error when another rank has failed, and is called while a tensor is gathered.
    `writes_whole_tensors`: this rank writes plain tensors and gathered tensors; the other writers skip them.
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
    ) -> None:
        self._staging_tensor, self._manifest, self._writer_ranks = staging_tensor, manifest, writer_ranks
        self._raise_failure, self._gather_timeout_s = raise_failure, gather_timeout_s
        self._check_finite, self._writes_whole_tensors = check_finite, writes_whole_tensors
        self._has_gathered = False
        """Whether the tensor that is being written was gathered."""
        self.has_shards = False
        """Whether any tensor was a DTensor, so that every rank is needed."""

    def write(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Write all tensors. Returns their checkpoint names in order.

        Raises BadInputError for the first bad tensor, after this rank has taken part in gathering the other tensors:
        the other ranks would wait in the collective operations until the deadline, and the trainer's process group
        could not be used any more.
        """
        names: list[str] = []
        seen: set[str] = set()
        pairs = iter(validated_pairs(named_tensors))
        for given_name, tensor in pairs:
            self._has_gathered = False
            try:
                for name in self._write_tensor(given_name, tensor):
                    require_new_name(name, seen)
                    names.append(name)
            except BadInputError:
                self.gather_only(pairs if self._has_gathered else itertools.chain([(given_name, tensor)], pairs))
                raise
            del tensor
        return names

    def gather_only(self, named_tensors: Iterable[Any]) -> None:
        """Take part in gathering the tensors that the other ranks gather, and write nothing.

        Items that are no pairs of name and tensor are skipped.
        """
        for item in as_pairs(named_tensors):
            if self._needs_gather(item):
                self._gather(item[1])
            del item

    def _needs_gather(self, item: Any) -> bool:
        """Whether `item` is a pair of name and DTensor that the ranks gather."""
        from torch.distributed.tensor import DTensor

        if not (isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[1], DTensor)):
            return False
        name, tensor = item
        if name in self._manifest.ignored or tensor.is_meta:
            return False
        with contextlib.suppress(BadInputError):
            if self._is_converted(name, tensor):
                return True
        return local_slices(tensor, self._writer_ranks) is None

    def _is_converted(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor is not written as it is, but as one or more tensors of other shapes."""
        spec = TensorSpec.of(tensor)
        return [part.shape for part in self._manifest.checkpoint_specs(name, spec).values()] != [spec.shape]

    def _write_tensor(self, name: str, tensor: torch.Tensor) -> list[str]:
        """Write one tensor. Returns its checkpoint names: none if it is ignored, several for fused experts."""
        from torch.distributed.tensor import DTensor

        if name not in self._manifest.ignored:
            require_dense(name, tensor)
        if not self._is_converted(name, tensor):
            (name,) = self._manifest.checkpoint_specs(name, TensorSpec.of(tensor))
            return [name] if self._write_checkpoint_tensor(name, tensor) else []
        if isinstance(tensor, DTensor):
            require_own_shard(name, tensor)
            tensor = self._gather(tensor)
        assert self._manifest.checkpoint_names is not None
        converted = self._manifest.checkpoint_names.tensors(name, tensor)
        return [new_name for new_name, part in converted if self._write_checkpoint_tensor(new_name, part)]

    def _write_checkpoint_tensor(self, name: str, tensor: torch.Tensor) -> bool:
        """Write one tensor by its checkpoint name. Returns False if it is ignored."""
        from torch.distributed.tensor import DTensor

        given = TensorSpec.of(tensor)
        spec = self._manifest.check(name, given.shape, given.dtype)
        if spec is None:
            return False
        target = self._staging_tensor(name)
        if self._check_finite:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            require_finite(name, local, self._manifest.smallest_range_dtype(spec))
        if isinstance(tensor, DTensor):
            require_own_shard(name, tensor)
            self.has_shards = True
            self._write_shard(tensor, target)
        elif self._writes_whole_tensors and target is not None:
            copy_if_elsewhere(target, tensor.detach())
        return True

    def _write_shard(self, tensor: DTensor, target: torch.Tensor | None) -> None:
        """Copy this rank's shard, or gather the tensor where copying shards is not enough."""
        if (slices := local_slices(tensor, self._writer_ranks)) is not None:
            if is_first_replica(tensor) and target is not None:
                copy_shard(target, slices, tensor.to_local())
            return
        whole = self._gather(tensor)
        if self._writes_whole_tensors and target is not None:
            target.copy_(whole)

    def gather_on_cpu(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """All tensors, complete and on the CPU. For small tensors that do not go through staging memory."""
        from torch.distributed.tensor import DTensor

        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in validated_pairs(named_tensors):
            require_dense(name, tensor)
            tensors[name] = (self._gather(tensor) if isinstance(tensor, DTensor) else tensor).detach().cpu()
        return tensors

    def _gather(self, tensor: Any) -> torch.Tensor:
        """`full_tensor`, a collective of the trainer's mesh, with a deadline and a check of the other ranks.

        A collective cannot be cancelled. When this raises, the trainer's process group cannot be used any more. Raises
        DeadlineError, PeerError, or the failure of the coordinator.
        """
        outcome: dict[str, Any] = {}
        self._has_gathered = True

        def gather() -> None:
            try:
                with _on_device_of(tensor):
                    outcome["tensor"] = tensor.detach().full_tensor()
            except Exception as error:  # noqa: BLE001 - raised by the waiting thread
                outcome["error"] = error

        thread = threading.Thread(target=gather, name="verl-server-gather", daemon=True)
        thread.start()
        deadline = time.monotonic() + self._gather_timeout_s
        while thread.is_alive():
            thread.join(POLL_INTERVAL_S)
            self._raise_failure()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"gathering a tensor from the trainer's ranks took longer than {self._gather_timeout_s:g} s; "
                    "a rank left the collective, and the trainer's process group cannot be used any more",
                    operation="full_tensor",
                    seconds=self._gather_timeout_s,
                )
        if "error" in outcome:
            raise PeerError(f"gathering a tensor from the trainer's ranks failed: {outcome['error']}")
        whole: torch.Tensor = outcome["tensor"]
        return whole


@contextlib.contextmanager
def _on_device_of(tensor: torch.Tensor) -> Iterator[None]:
    """Run the body of a new thread on the tensor's device, and wait for the device at the end.

    A new thread starts with device 0 as its current device.
    """
    import torch

    if tensor.device.type == "cpu":
        yield
        return
    module = torch.get_device_module(tensor.device)
    with module.device(tensor.device):
        yield
        module.current_stream().synchronize()
