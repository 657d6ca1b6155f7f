"""The two ends of a lane: trainer ranks write tensors into its buckets, TP ranks of servers read them (see `lane`)."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from verl_server.errors import BadInputError, DeadlineError, VerlServerError
from verl_server.types import TensorSpec
from verl_server.weights.double_buffer import COUNT, Buckets, DoubleBuffer, ProgressCounters
from verl_server.weights.layout import ALIGNMENT, aligned, nbytes
from verl_server.weights.views import tensor_in

if TYPE_CHECKING:
    import torch

POLL_S = 0.0002
#: How long the readers may take to open a lane once they are told of it.
OPENING_S = 60.0
#: How long a model may keep a tensor of one bucket once it has taken all of the next (some load in threads).
LET_GO_S = 10.0


class Writer:
    """One trainer rank's part of one update. `check` raises when waiting on makes no sense any more."""

    def __init__(
        self,
        lane: DoubleBuffer,
        number: int,
        index: int,
        leads: bool,
        readers: Sequence[int],
        check: Callable[[], None],
    ) -> None:
        self._lane, self._index, self._leads, self._readers, self._check = lane, index, leads, readers, check
        self._turns = lane.turns(number)
        self._flat: torch.Tensor | None = None
        self._filled = self._at = 0
        self._rows: list[Any] = []
        self._opened_by = time.monotonic() + OPENING_S

    def place(self, name: str, spec: TensorSpec, deadline: float) -> torch.Tensor:
        """Where that tensor goes, in place; waits until there is room."""
        start = aligned(self._at, ALIGNMENT)
        if self._flat is None or start + nbytes(spec) > self._lane.layout.bucket_bytes:
            self._publish()
            self._wait_for_room(deadline)
            self._flat, start = self._lane.buckets.flat(self._lane.buckets.view(self._filled % COUNT)), 0
        self._rows.append([name, start, spec.shape, spec.dtype])
        self._at = start + nbytes(spec)
        return tensor_in(self._flat, start, spec)

    def end(self) -> None:
        """Everything is written."""
        self._publish()
        self._turns.end(self._index, self._filled if self._leads else None)

    def _publish(self) -> None:
        if self._flat is None:
            return
        self._lane.buckets.settle()
        if self._leads:
            self._lane.write_table(self._filled % COUNT, self._rows)
        self._filled += 1
        self._turns.fill(self._index, self._filled)
        self._flat, self._at, self._rows = None, 0, []

    def _wait_for_room(self, deadline: float) -> None:
        def free() -> bool:
            if self._turns.total is not None and self._filled >= self._turns.total:
                raise BadInputError(f"rank {self._index} brings more tensors than rank 0; all ranks must push the same")
            if time.monotonic() > self._opened_by:
                absent = [reader for reader in self._readers if not self._turns.is_here(reader)]
                if absent:
                    raise DeadlineError(f"TP ranks {absent} did not open the staging memory", operation="buckets")
            return all(self._turns.emptied(reader) >= self._filled + 1 - COUNT for reader in self._readers)

        _wait(free, self._turns, self._check, deadline, f"bucket {self._filled} was not emptied by the servers")


class Reader:
    """One reader's part of one update."""

    def __init__(
        self, lane: DoubleBuffer, number: int, index: int, writers: int, check: Callable[[], None], deadline: float
    ) -> None:
        self._lane, self._index, self._writers = lane, index, writers
        self._check, self._deadline = check, deadline
        self._turns = lane.turns(number)
        self._turns.empty(index, 0)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors as they come. Each is valid for as long as it is held, at least while the next one is taken."""
        bucket = 0
        before: BucketLease | None = None
        while self._wait_for(bucket):
            lent = BucketLease(self._lane.buckets, bucket % COUNT, self._lane.table(bucket % COUNT))
            for name, tensor in lent.tensors():
                yield name, tensor
                del tensor
                if before is not None and before.is_back():
                    self._turns.empty(self._index, bucket)
                    before = None
            if before is not None:
                before.take_back()
                self._turns.empty(self._index, bucket)
            before, bucket = lent, bucket + 1
        self._lane.buckets.settle()
        self._turns.empty(self._index, bucket)

    def _wait_for(self, bucket: int) -> bool:
        """Whether there is such a bucket, once that is known and it is filled."""
        found = False

        def known() -> bool:
            nonlocal found
            total = self._turns.total
            found = total is None or bucket < total
            return not found or all(self._turns.filled(writer) > bucket for writer in range(self._writers))

        _wait(known, self._turns, self._check, self._deadline, f"bucket {bucket} was not filled by the trainer")
        return found


class BucketLease:
    """The tensors of one bucket while a model loads them. `rows`: name, offset in the bucket, shape, dtype.

    Models keep tensors for a while: to fuse them with a later one, or for threads that load. A bucket is filled
    again only when nothing refers to its memory any more, which the life of its `view` tells.
    """

    def __init__(self, buckets: Buckets, which: int, rows: Sequence[Any]) -> None:
        self._buckets, self._which, self._rows = buckets, which, rows
        self._view: weakref.ref[Any] | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        view = self._buckets.view(self._which)
        self._view = weakref.ref(view)
        flat = self._buckets.flat(view)
        del view
        for name, offset, shape, dtype in self._rows:
            yield name, tensor_in(flat, offset, TensorSpec(tuple(shape), dtype))

    def is_back(self) -> bool:
        """Whether nobody reads this bucket any more."""
        if self._view is not None and self._view() is not None:
            return False
        self._buckets.settle()
        return True

    def take_back(self) -> None:
        """Wait until nobody reads it. Raises RuntimeError when somebody keeps parts of it for too long."""
        deadline = time.monotonic() + LET_GO_S
        while not self.is_back():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "the model keeps tensors while it loads many others, which buckets cannot serve: "
                    "use the transport shared_memory or distributed"
                )
            time.sleep(POLL_S)


def _wait(
    ready: Callable[[], bool], turns: ProgressCounters, check: Callable[[], None], deadline: float, otherwise: str
) -> None:
    while not ready():
        if (failure := turns.failure) is not None:
            raise VerlServerError(failure)
        check()
        if time.monotonic() > deadline:
            raise DeadlineError(f"{otherwise} in time", operation="buckets")
        time.sleep(POLL_S)
