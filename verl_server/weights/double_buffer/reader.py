"""The reading end of a double buffer, in the TP ranks of servers and in the thread that computes checksums."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from verl_server.types import TensorSpec
from verl_server.weights.double_buffer.bucket_memory import BucketMemory
from verl_server.weights.double_buffer.buffer import DoubleBuffer
from verl_server.weights.double_buffer.layout import NUM_BUCKETS
from verl_server.weights.double_buffer.waiting import POLL_INTERVAL_S, wait_for_progress
from verl_server.weights.views import tensor_view

if TYPE_CHECKING:
    import torch

RECLAIM_TIMEOUT_S = 10.0
"""Seconds that a model may keep tensors of a bucket after it has taken all tensors of the next one.

Some models load in threads, so they keep tensors for a while.
"""


class BucketReader:
    """One reader's part of one update through a double buffer.

    `index` is this reader's number, `num_writers` the number of writers. `require_peers` raises when it makes no sense
    to wait longer. `deadline` is a time of `time.monotonic`.
    """

    def __init__(
        self,
        double_buffer: DoubleBuffer,
        update_number: int,
        index: int,
        num_writers: int,
        require_peers: Callable[[], None],
        deadline: float,
    ) -> None:
        self._double_buffer, self._index, self._num_writers = double_buffer, index, num_writers
        self._require_peers, self._deadline = require_peers, deadline
        self._progress = double_buffer.progress(update_number)
        self._progress.set_emptied(index, 0)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors in the order in which they are written.

        A tensor's memory is reused only when no reference to it is left. The caller may keep tensors of one bucket
        while it takes those of the next. Raises DeadlineError, VerlServerError, and RuntimeError if tensors are kept
        longer.
        """
        bucket = 0
        previous: BucketLease | None = None
        while self._wait_for_bucket(bucket):
            rows = self._double_buffer.read_table(bucket % NUM_BUCKETS)
            lease = BucketLease(self._double_buffer.buckets, bucket % NUM_BUCKETS, rows)
            for name, tensor in lease.tensors():
                yield name, tensor
                del tensor
                if previous is not None and previous.try_reclaim():
                    self._progress.set_emptied(self._index, bucket)
                    previous = None
            if previous is not None:
                previous.reclaim()
                self._progress.set_emptied(self._index, bucket)
            previous, bucket = lease, bucket + 1
        self._double_buffer.buckets.synchronize()
        self._progress.set_emptied(self._index, bucket)

    def _wait_for_bucket(self, bucket: int) -> bool:
        """Wait until a bucket is filled, or the update is known to end before it. Returns whether the bucket exists."""
        exists = False

        def is_known() -> bool:
            nonlocal exists
            is_filled = all(self._progress.num_filled(writer) > bucket for writer in range(self._num_writers))
            total = self._progress.num_buckets  # after the counts: a writer sets the total before its last count
            exists = total is None or bucket < total
            return not exists or is_filled

        timeout_message = f"bucket {bucket} was not filled by the trainer in time: raise Timeouts(weights_s=...)"
        wait_for_progress(is_known, self._progress, self._require_peers, self._deadline, timeout_message)
        return exists


class BucketLease:
    """The tensors of one bucket while a model loads them.

    Models keep tensors for a while: to fuse them with a later tensor, or for threads that load. A bucket is filled
    again only when nothing refers to its memory any more. A weak reference to the bucket's `view` shows that. `rows`:
    name, byte offset in the bucket, shape and dtype of each tensor.
    """

    def __init__(self, memory: BucketMemory, bucket: int, rows: Sequence[Any]) -> None:
        self._memory, self._bucket, self._rows = memory, bucket, rows
        self._view: weakref.ref[Any] | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors of the bucket, as views of its memory."""
        view = self._memory.view(self._bucket)
        self._view = weakref.ref(view)
        flat = self._memory.as_tensor(view)
        del view
        for name, offset, shape, dtype in self._rows:
            yield name, tensor_view(flat, offset, TensorSpec(tuple(shape), dtype))

    def try_reclaim(self) -> bool:
        """End the lease if no tensor of the bucket is in use any more. Returns whether that is so."""
        if self._view is not None and self._view() is not None:
            return False
        self._memory.synchronize()
        return True

    def reclaim(self) -> None:
        """Wait until no tensor of the bucket is in use. Raises RuntimeError after `RECLAIM_TIMEOUT_S` seconds."""
        deadline = time.monotonic() + RECLAIM_TIMEOUT_S
        while not self.try_reclaim():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "the model keeps tensors while it loads many others, which transports with buckets do not support: "
                    "use the transport shared_memory or distributed"
                )
            time.sleep(POLL_INTERVAL_S)
