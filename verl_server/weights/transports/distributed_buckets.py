"""Servers on other machines, without a mirror there: a broadcast to every TP rank, through two buckets of its own.

Between GPUs by NCCL, the buckets on each receiver's GPU; between hosts by gloo. Every TP rank gets all bytes, which
a fast network does not mind; it holds no more than two buckets of them. While one is loaded the other is filled.
NCCL wants a GPU of its own for each member, so the trainer's rank 0 and the servers must not share one. It has
not been run on GPUs yet.
"""

from __future__ import annotations

import datetime
import json
import mmap
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from verl_server.weights.buckets import BucketLease
from verl_server.weights.device import DeviceBuckets
from verl_server.weights.double_buffer import BUCKET_BYTES, COUNT, Buckets, HostBuckets
from verl_server.weights.layout import PAGE, aligned, nbytes
from verl_server.weights.reports import Report
from verl_server.weights.transports import base, distributed, group
from verl_server.weights.transports.base import Json, Update

if TYPE_CHECKING:
    import torch


def device_kind() -> str:
    """Of this process."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class Sender(distributed.Sender):
    name = "distributed_buckets"

    def wire(self, update: Update, server: int) -> Json:
        largest = max(nbytes(slot.spec) for slot in self.layout.slots.values())
        return {
            **super().wire(update, server),
            "bucket_bytes": max(BUCKET_BYTES, aligned(largest, PAGE)),
            "kind": device_kind(),
        }

    def _form(self, members: group.Members) -> Any:
        return group.form_on(device_kind(), self._store, self._group_name, 0, 1 + members.receivers, self.settings.host)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None

    def _send(self, update: Update, loading: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.settings.timeout_s
        limit = self.wire(update, 0)["bucket_bytes"]
        for start, stop, _ in group.parcels(distributed.spans(self.layout.table(update.names)), limit):
            work = broadcast(self._group, self._on_device(start, stop), self.settings.timeout_s)
            group.wait_for_work(work, deadline, loading)
            self._sent += stop - start

    def _on_device(self, start: int, stop: int) -> torch.Tensor:
        import torch

        return torch.frombuffer(self.arena.memory[start:stop], dtype=torch.uint8).to(device_kind())


def broadcast(joined: Any, tensor: torch.Tensor, timeout_s: float) -> Any:
    """Begin a broadcast from rank 0."""
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.timeout = datetime.timedelta(seconds=timeout_s)
    return joined.broadcast([tensor], options)


class Seat(distributed.Membership):
    """One receiver's place in the group, and its two buckets, kept between updates."""

    def __init__(self, wire: Json, rank: int) -> None:
        super().__init__(wire, rank)
        if wire["kind"] != device_kind():
            raise RuntimeError(f"the trainer sends from {wire['kind']}, this server loads to {device_kind()}")
        size = wire["bucket_bytes"]
        self.buckets: Buckets = (
            DeviceBuckets.create(size) if wire["kind"] == "cuda" else HostBuckets(mmap.mmap(-1, COUNT * size), 0, size)
        )
        try:
            self.meet(wire["receivers"])
            self.group = group.form_on(
                wire["kind"],
                self.store,
                self.name,
                1 + self.index,
                1 + wire["receivers"],
                group.own_address(self.host),
            )
        except BaseException:
            self.buckets.close()
            raise

    def leave(self) -> None:
        self.group.abort()
        self.buckets.close()


class Receiver(base.Receiver):
    def __init__(self, wire: Json, rank: int) -> None:
        super().__init__(wire, rank)
        self._seat = Seat.take(wire, rank)
        self._deadline = time.monotonic() + wire["timeout_s"]
        table = self._seat.table(wire["table"])
        self._rows = json.loads(table)
        self._parcels = group.parcels(distributed.spans(table), wire["bucket_bytes"])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        work = self._receive(0)
        before: BucketLease | None = None
        taken = 0
        for number, (start, _, count) in enumerate(self._parcels):
            group.wait_for_work(work, self._deadline, lambda: not self._seat.is_cancelled())
            rows = [[name, at - start, *kind] for name, at, *kind in self._rows[taken : taken + count]]
            lent = BucketLease(self._seat.buckets, number % COUNT, rows)
            next_work = self._receive(number + 1) if number == 0 else None
            for name, tensor in lent.tensors():
                yield name, tensor
                del tensor
                if before is not None and before.is_back():
                    before, next_work = None, self._receive(number + 1)
            if before is not None:
                before.take_back()
                next_work = self._receive(number + 1)
            before, taken, work = lent, taken + count, next_work
        self._seat.buckets.settle()

    def _receive(self, number: int) -> Any:
        """Begin to receive a parcel into the bucket that is its turn; None behind the last one."""
        if number >= len(self._parcels):
            return None
        start, stop, _ = self._parcels[number]
        buckets = self._seat.buckets
        flat = buckets.flat(buckets.view(number % COUNT))
        return broadcast(self._seat.group, flat[: stop - start], self.wire["timeout_s"])

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._seat.buckets.holds(tensor)

    def report(self, report: Report, sums: list[int]) -> None:
        if not report.ok:  # no broadcast that was begun may outlive this load
            Seat.give_up()
        self._seat.report(self.wire["update_id"], report, sums)
