"""The writing end of a double buffer: a trainer rank fills the buckets with its part of the tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError, DeadlineError
from verl_server.types import TensorSpec
from verl_server.weights.double_buffer.buffer import DoubleBuffer
from verl_server.weights.double_buffer.layout import NUM_BUCKETS
from verl_server.weights.double_buffer.waiting import wait_for_progress
from verl_server.weights.layout import ALIGNMENT, round_up, tensor_bytes
from verl_server.weights.views import tensor_view

if TYPE_CHECKING:
    import torch

READER_OPEN_TIMEOUT_S = 60.0
"""Seconds that the readers have to open the double buffer after the start of an update."""


class BucketWriter:
    """One trainer rank's writing of one update into a double buffer.

    `update_number` counts the updates of the double buffer. `index` is this writer's number. `is_lead_writer`: this
    writer writes the tables and the number of buckets. `readers`: numbers of the readers to wait for. `require_peers`
    raises when it makes no sense to wait longer. `wait_for_copies` waits for the copies into the memory that `reserve`
    returned.
    """

    def __init__(
        self,
        double_buffer: DoubleBuffer,
        update_number: int,
        index: int,
        is_lead_writer: bool,
        readers: Sequence[int],
        require_peers: Callable[[], None],
        wait_for_copies: Callable[[], None] = lambda: None,
    ) -> None:
        self._double_buffer, self._index, self._is_lead_writer = double_buffer, index, is_lead_writer
        self._readers, self._require_peers, self._wait_for_copies = readers, require_peers, wait_for_copies
        self._progress = double_buffer.progress(update_number)
        self._bucket: torch.Tensor | None = None
        """The bucket that is being filled, as bytes."""
        self._num_filled = 0
        self._used_bytes = 0
        self._rows: list[Any] = []
        """Name, byte offset, shape and dtype of each tensor in the bucket."""
        self._open_deadline = time.monotonic() + READER_OPEN_TIMEOUT_S

    def reserve(self, name: str, spec: TensorSpec, deadline: float) -> torch.Tensor:
        """Reserve memory for the next tensor and return it as a tensor.

        Waits for a free bucket until `deadline` (a time of `time.monotonic`). Raises DeadlineError, VerlServerError.
        """
        offset = round_up(self._used_bytes, ALIGNMENT)
        if self._bucket is None or offset + tensor_bytes(spec) > self._double_buffer.layout.bucket_bytes:
            self._publish_bucket()
            self._wait_for_free_bucket(deadline)
            memory = self._double_buffer.buckets
            self._bucket, offset = memory.as_tensor(memory.view(self._num_filled % NUM_BUCKETS)), 0
        self._rows.append([name, offset, spec.shape, spec.dtype])
        self._used_bytes = offset + tensor_bytes(spec)
        return tensor_view(self._bucket, offset, spec)

    def finish(self) -> None:
        """Hand the last bucket to the readers. All tensors have been written."""
        self._publish_bucket()
        self._progress.finish(self._index, self._num_filled if self._is_lead_writer else None)

    def _publish_bucket(self) -> None:
        if self._bucket is None:
            return
        self._wait_for_copies()
        self._double_buffer.buckets.synchronize()
        if self._is_lead_writer:
            self._double_buffer.write_table(self._num_filled % NUM_BUCKETS, self._rows)
        self._num_filled += 1
        self._progress.set_filled(self._index, self._num_filled)
        self._bucket, self._used_bytes, self._rows = None, 0, []

    def _wait_for_free_bucket(self, deadline: float) -> None:
        progress = self._progress

        def is_free() -> bool:
            if progress.num_buckets is not None and self._num_filled >= progress.num_buckets:
                raise BadInputError(
                    f"rank {self._index} pushes more tensors than rank 0; all ranks must push the same tensors"
                )
            if time.monotonic() > self._open_deadline:
                absent = [reader for reader in self._readers if not progress.is_present(reader)]
                if absent:
                    raise DeadlineError(
                        f"TP ranks {absent} did not open the staging memory within {READER_OPEN_TIMEOUT_S:g} s",
                        operation="buckets",
                    )
            num_needed = self._num_filled + 1 - NUM_BUCKETS
            return all(progress.num_emptied(reader) >= num_needed for reader in self._readers)

        timeout_message = (
            f"bucket {self._num_filled} was not emptied by the servers in time: raise Timeouts(weights_s=...)"
        )
        wait_for_progress(is_free, progress, self._require_peers, deadline, timeout_message)
