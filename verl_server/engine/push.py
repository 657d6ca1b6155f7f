"""One weight update, from the ranks' tensors to the server's parameters.

Stage: every rank copies what it holds into the arena of its node; a wrong name, shape or dtype is found
here, before the server hears of the update. Commit: pause, begin, load, look at every TP rank's report, end,
continue. The first part can fail without harm; when the second fails after the load began, the served
weights are torn and nothing is generated until a whole update has landed.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
import uuid
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from verl_server.engine.backend import Backend
from verl_server.errors import (
    BadInputError,
    DeadlineError,
    PeerError,
    ServerDiedError,
    ShutDownError,
    TornWeightsError,
    VerlServerError,
)
from verl_server.types import WeightUpdateResult
from verl_server.weights.arena import Arena
from verl_server.weights.gather import copy_part, copy_unless_there, is_first_replica, own_part
from verl_server.weights.layout import Layout, nbytes
from verl_server.weights.loader import Descriptor
from verl_server.weights.manifest import Manifest
from verl_server.weights.names import is_fused, unfused

if TYPE_CHECKING:
    import torch

    from verl_server.engine.group import TpGroup

logger = logging.getLogger(__name__)

Json = dict[str, Any]


class Stage:
    """Writes one rank's part of an update into the arena.

    `writers`: global ranks that map the same arena as this one. `leads`: this rank writes what is whole
    (plain tensors and gathered ones) into the arena of its node.
    """

    def __init__(
        self, arena: Arena, manifest: Manifest, writers: frozenset[int], leads: bool, group: TpGroup, deadline_s: float
    ) -> None:
        self._arena, self._manifest, self._writers = arena, manifest, writers
        self._leads, self._group, self._deadline_s = leads, group, deadline_s
        self.sharded = False
        """Whether any tensor came in shards, so that every rank is needed."""

    def write(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Copy all tensors; returns the names written, in order. Raises BadInputError on the first bad one."""
        names: list[str] = []
        seen: set[str] = set()
        for item in _pairs(named_tensors):
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
        target = self._arena.tensor(name)
        self.sharded = self.sharded or isinstance(tensor, DTensor)
        if not isinstance(tensor, DTensor):
            if self._leads:
                copy_unless_there(target, tensor.detach())
        elif (part := own_part(tensor, self._writers)) is not None:
            if is_first_replica(tensor):
                copy_part(target, part, tensor.to_local())
        else:
            whole = self._whole(tensor)
            if self._leads:
                target.copy_(whole)
        return [name]

    def _whole(self, tensor: Any) -> torch.Tensor:
        """`full_tensor`, a collective of the trainer's mesh, with a deadline and an eye on the other ranks.

        A collective cannot be taken back: when it fails this way the trainer's group is unusable, and we say so.
        """
        done: dict[str, Any] = {}

        def gather() -> None:
            try:
                done["tensor"] = tensor.detach().full_tensor()
            except Exception as error:  # noqa: BLE001 - carried to the waiting thread, which raises it
                done["error"] = error

        thread = threading.Thread(target=gather, name="verl-server-gather", daemon=True)
        thread.start()
        deadline = time.monotonic() + self._deadline_s
        while thread.is_alive():
            thread.join(0.02)
            if self._group.broken is not None:
                raise self._group.broken
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


def _pairs(named_tensors: Iterable[Any]) -> Iterable[tuple[str, torch.Tensor]]:
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


def digest(names: list[str]) -> int:
    """A number that is equal on ranks that brought the same names in the same order."""
    return zlib.crc32("\0".join(names).encode())


def check_same_names(brought: list[Json]) -> None:
    """All ranks must bring what rank 0 brings, or nothing (full state dicts gathered on rank 0 only)."""
    first = brought[0]
    if not first["tensors"]:
        raise BadInputError("named_tensors is empty on rank 0: there is nothing to push")
    for rank, other in enumerate(brought):
        if (other["tensors"] or first["sharded"]) and other["digest"] != first["digest"]:
            raise BadInputError(
                f"rank {rank} brought {other['tensors']} tensors that differ from the {first['tensors']} of rank 0; "
                "all ranks must push the same names in the same order",
                rank=rank,
            )


def commit(
    backend: Backend,
    arena: Arena,
    layout: Layout,
    names: list[str],
    descriptor: Descriptor,
    weight_version: str,
    torn: bool,
) -> tuple[WeightUpdateResult, Descriptor]:
    """On rank 0, after staging: make the server take the arenas; `arena` is that of the first node.

    A failure half-way is repaired once, as the arena still holds everything. Raises TornWeightsError when the
    server may hold parts of the update all the same. It goes on only with whole weights: after a success, or
    when nothing was loaded and the weights were not `torn` before.
    """
    started = time.monotonic()
    backend.hold()
    try:
        try:
            _take(backend, arena, names, descriptor, weight_version)
        except TornWeightsError as error:
            torn = True
            logger.warning("%s Trying once more.", error.message)
            descriptor = dataclasses.replace(descriptor, update_id=uuid.uuid4().hex)
            _take(backend, arena, names, descriptor, weight_version)
    except (TornWeightsError, ServerDiedError, ShutDownError):
        raise
    except VerlServerError as error:  # the session did not open
        if torn:
            raise _torn_by(error, weight_version) from error
        with suppress(VerlServerError):
            backend.go_on()
        raise
    backend.go_on()
    result = WeightUpdateResult(
        weight_version=weight_version,
        tensors=len(names),
        bytes=sum(nbytes(layout.slots[name].spec) for name in names),
        missing=len(layout.slots) - len(names),
        gather_s=math.nan,
        load_s=time.monotonic() - started,
    )
    return result, descriptor


def _take(backend: Backend, arena: Arena, names: list[str], descriptor: Descriptor, weight_version: str) -> None:
    """One session: begin, load, end, look at what every TP rank reports. TornWeightsError once it has begun."""
    backend.begin_weight_update()
    try:
        with ThreadPoolExecutor(1) as pool:  # the trainer sums what is staged while the server loads it
            expected = pool.submit(lambda: [arena.checksum(name) for name in names] if descriptor.verify else [])
            try:
                backend.load_arena(descriptor, weight_version)
            finally:
                backend.end_weight_update()
            check_reports(arena, descriptor, names, expected.result(), node_rank=0)
    except (ServerDiedError, ShutDownError):
        raise  # there is no server left whose weights could be torn
    except VerlServerError as error:
        raise _torn_by(error, weight_version) from error


def _torn_by(error: VerlServerError, weight_version: str) -> TornWeightsError:
    return TornWeightsError(
        f"the weight update {weight_version} failed half-way: {error.message}. "
        "Nothing is generated until a whole update has landed.",
        cause=type(error).__name__,
        **error.details,
    )


def check_reports(arena: Arena, descriptor: Descriptor, names: list[str], sums: list[int], node_rank: int) -> None:
    """Every TP rank of a node must have reported into its arena that it loaded this update, and what it read."""
    for rank in range(node_rank * descriptor.ranks_per_node, (node_rank + 1) * descriptor.ranks_per_node):
        who = f"TP rank {rank} of the server"
        report = arena.report(rank)
        if report is None or report["update_id"] != descriptor.update_id:
            raise VerlServerError(
                f"{who} did not report on the update: it could not reach the staged weights; the server's log says why"
            )
        if not report["ok"]:
            raise VerlServerError(f"{who} could not load the weights: {report['error']}", log_tail=report.get("trace"))
        if not descriptor.verify:
            continue
        received = arena.checksums_of(rank, len(names))
        wrong = [name for name, ours, theirs in zip(names, sums, received, strict=True) if ours != theirs]
        if wrong:
            raise VerlServerError(
                f"{who} read {len(wrong)} tensors that differ from what was staged, {wrong[0]!r} first: "
                "were the weights written while they were pushed?"
            )
        if report["unwritten_count"] and len(names) == descriptor.slots:
            raise VerlServerError(
                f"{who} did not write {report['unwritten_count']} of its parameters in a whole update, "
                f"{report['unwritten'][0]!r} among them; its model class passes over some names (verify=False lets it)"
            )
