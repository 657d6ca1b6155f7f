"""Transport for servers on other machines without a mirror: a broadcast to every TP rank, through two buckets each.

Between GPUs the broadcast uses NCCL, with the buckets on each receiver's GPU. Between hosts it uses gloo. Every TP rank
receives all bytes, which costs little on a fast network, and holds two buckets of them. One bucket is filled while the
model loads the other. NCCL needs a GPU of its own for each member, so trainer rank 0 and the servers must not share a
GPU. This transport has not been run on GPUs yet.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from verl_server.ranks.placement import own_address
from verl_server.types import Json
from verl_server.weights.arena import PAGE_BYTES, Report, byte_ranges_of, round_up, tensor_bytes
from verl_server.weights.buckets import (
    DEFAULT_BUCKET_BYTES,
    NUM_BUCKETS,
    BucketLease,
    BucketMemory,
    DeviceBucketMemory,
    HostBucketMemory,
    leased_tensors,
)
from verl_server.weights.transports import base, distributed
from verl_server.weights.transports.base import UpdateAttempt
from verl_server.weights.transports.distributed import (
    Membership,
    ReceiverPlacement,
    form_group,
    group_whole_tensors,
    report_before_joining,
    start_broadcast,
    wait_for_work,
)


def local_device_type() -> str:
    """The type of device that this process uses: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def nccl_version() -> str | None:
    """The version of NCCL, or None on a machine without an NVIDIA GPU. NCCL connects equal versions only."""
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


class Sender(distributed.Sender):
    """Broadcasts parts of the arena, each as large as a bucket at most, to all receivers."""

    name = "distributed_buckets"
    stages = False

    def loader_message(self, attempt: UpdateAttempt, member_index: int) -> Json:
        largest = max(tensor_bytes(slot.spec) for slot in self.layout.slots.values())
        return {
            **super().loader_message(attempt, member_index),
            "bucket_bytes": max(DEFAULT_BUCKET_BYTES, round_up(largest, PAGE_BYTES)),
            "device_type": local_device_type(),
            "nccl_version": nccl_version(),
        }

    def connect_group(self, placement: ReceiverPlacement) -> Any:
        size = 1 + placement.num_receivers
        return form_group(local_device_type(), self.store, self.group_name, 0, size, self.settings.host)

    def leave_group(self) -> None:
        if self.group is not None:
            self.group.abort()
        self.group = None

    def send(self, attempt: UpdateAttempt, is_wanted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.settings.timeout_s
        bucket_bytes = self.loader_message(attempt, 0)["bucket_bytes"]
        tensor_ranges = byte_ranges_of(self.layout.table(attempt.names))
        for start, stop, _ in group_whole_tensors(tensor_ranges, bucket_bytes):
            work = start_broadcast(self.group, self._copy_to_device(start, stop), self.settings.timeout_s)
            wait_for_work(work, deadline, self.settings.timeout_s, is_wanted)
            self.sent_bytes += stop - start

    def _copy_to_device(self, start: int, stop: int) -> torch.Tensor:
        if start == stop:  # empty tensors alone: `frombuffer` refuses empty memory
            return torch.empty(0, dtype=torch.uint8, device=local_device_type())
        self.arena.pin()
        return torch.frombuffer(self.arena.memory[start:stop], dtype=torch.uint8).to(local_device_type())


class BucketMember(Membership):
    """A receiver that is a member of the group itself and has two buckets, which are kept between updates."""

    def __init__(self, message: Json, tp_rank: int) -> None:
        super().__init__(message, tp_rank)
        bucket_bytes = message["bucket_bytes"]
        self.buckets: BucketMemory
        if message["device_type"] == "cuda":
            self.buckets = DeviceBucketMemory.create(bucket_bytes)
        else:
            self.buckets = HostBucketMemory(mmap.mmap(-1, NUM_BUCKETS * bucket_bytes), 0, bucket_bytes)
        try:
            self.announce_and_wait(message["num_receivers"])
            self.group = self.form(
                lambda store: form_group(
                    message["device_type"],
                    store,
                    self.group_name,
                    1 + self.receiver,
                    1 + message["num_receivers"],
                    own_address(self.trainer_host),
                )
            )
        except BaseException:
            self.buckets.close()
            raise

    def leave(self) -> None:
        self.group.abort()
        self.buckets.close()


class Receiver(base.Receiver):
    """Receives the parts into two buckets in turn, and reads the tensors from them."""

    def __init__(self, message: Json, tp_rank: int) -> None:
        super().__init__(message, tp_rank)
        self._member = BucketMember.current_or_new(message, tp_rank)
        self._deadline = time.monotonic() + message["timeout_s"]
        self._rows = self._member.rows(message["table_key"])
        tensor_ranges = byte_ranges_of(self._member.table(message["table_key"]))
        self._parts = group_whole_tensors(tensor_ranges, message["bucket_bytes"])
        """Byte range and number of tensors of each bucket's content."""
        self._work: Any = None
        """Torch's work handle of the part that is received now."""

    @classmethod
    def open_only(cls, message: Json, tp_rank: int) -> None:
        refusal = None
        if message["device_type"] != local_device_type():
            refusal = f"the trainer sends from {message['device_type']}, but this server loads to {local_device_type()}"
        elif message["nccl_version"] != nccl_version():
            refusal = (
                f"the trainer has NCCL {message['nccl_version']}, but this server has {nccl_version()}: install one "
                "version in both environments (it comes with torch), or use WeightsConfig(transport='distributed')"
            )
        report_before_joining(message, tp_rank, refusal)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        def leases() -> Iterator[BucketLease]:
            first_row = 0
            for part, (start, _, num_tensors) in enumerate(self._parts):
                wait_for_work(
                    self._work, self._deadline, self.message["timeout_s"], lambda: not self._member.is_cancelled()
                )
                if part == 0:
                    self._start_receiving(1)
                arena_rows = self._rows[first_row : first_row + num_tensors]
                rows = [[name, offset - start, shape, dtype] for name, offset, shape, dtype in arena_rows]
                yield BucketLease(self._member.buckets, part % NUM_BUCKETS, rows)
                first_row += num_tensors

        self._start_receiving(0)
        yield from leased_tensors(leases(), lambda num_free: self._start_receiving(num_free + 1))
        self._member.buckets.synchronize()

    def _start_receiving(self, part: int) -> None:
        """Start to receive a part into its bucket, unless there is no such part."""
        if part < len(self._parts):
            start, stop, _ = self._parts[part]
            buckets = self._member.buckets
            bucket = buckets.as_tensor(buckets.view(part % NUM_BUCKETS))
            self._work = start_broadcast(self._member.group, bucket[: stop - start], self.message["timeout_s"])

    def contains(self, tensor: torch.Tensor) -> bool:
        return self._member.buckets.contains(tensor)

    def send_report(self, report: Report, checksums: list[int]) -> None:
        if not report.ok:  # no broadcast that was started may continue after this load
            BucketMember.leave_current()
        self._member.send_report(report, checksums)
