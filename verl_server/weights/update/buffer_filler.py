"""One trainer rank's part of a streamed update: fill its double buffer, compute checksums, and check the reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_server.errors import VerlServerError
from verl_server.types import ServerInfo, TensorSpec
from verl_server.weights.checksum import Checksums, choose_algorithm
from verl_server.weights.device.staging_copies import StagingCopies
from verl_server.weights.device.streams import accelerator, as_current
from verl_server.weights.double_buffer.buffer import DoubleBuffer
from verl_server.weights.double_buffer.progress import CHECKSUM_READER
from verl_server.weights.double_buffer.reader import RECLAIM_TIMEOUT_S, BucketReader
from verl_server.weights.double_buffer.writer import BucketWriter
from verl_server.weights.manifest import Manifest
from verl_server.weights.transports.base import ReceivingRank, UpdateAttempt, receiving_ranks
from verl_server.weights.update.report_checks import verify_reports
from verl_server.weights.update.server_session import OpenedUpdate

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class BufferRole:
    """The role of one trainer rank at one double buffer."""

    double_buffer: DoubleBuffer
    writer_index: int
    """Number of this rank among the writers of the double buffer."""
    num_writers: int
    """Number of trainer ranks that write the double buffer."""
    is_lead_writer: bool
    """Whether this rank writes tensors that are not sharded, computes checksums, and reads the reports."""
    buffer_index: int
    """Number of the double buffer. It serves the TP ranks whose number is equal to it modulo `num_buffers`."""
    num_buffers: int
    """Number of double buffers of all trainer ranks."""

    def receiving_ranks(self, members: Sequence[ServerInfo]) -> Iterator[ReceivingRank]:
        """The TP ranks of the servers that this double buffer serves."""
        for rank in receiving_ranks(members):
            if rank.receiver % self.num_buffers == self.buffer_index:
                yield rank

    def fail(self, update_number: int, message: str) -> None:
        """Make the readers and the other writers of the double buffer stop waiting in one update."""
        self.double_buffer.progress(update_number).fail(message)


class BufferFiller:
    """Fills one rank's double buffer with its part of the update `opened`.

    `require_ranks` raises when the trainer ranks cannot work together any more. `require_peers` raises in addition when
    the servers are not loading any more. `deadline` is a time of `time.monotonic`.
    """

    def __init__(
        self,
        role: BufferRole,
        opened: OpenedUpdate,
        require_ranks: Callable[[], None],
        require_peers: Callable[[], None],
        deadline: float,
    ) -> None:
        self._role, self._opened, self._deadline = role, opened, deadline
        self.copies = StagingCopies(role.double_buffer.buckets.pin)
        """Makes the copies into the memory that `reserve` returns."""
        readers = [rank.receiver for rank in role.receiving_ranks(opened.members)]
        if opened.validated.verify:
            readers.append(CHECKSUM_READER)
        self._writer = BucketWriter(
            role.double_buffer,
            opened.update_number,
            role.writer_index,
            role.is_lead_writer,
            readers,
            require_peers,
            self.copies.wait,
        )
        self._error: VerlServerError | None = None
        """Why the double buffer could not be filled, or None."""
        self._checksums: Future[list[int]] | None = None
        if role.is_lead_writer and opened.validated.verify:
            self._checksums = self._start_checksums(require_ranks)

    def reserve(self, name: str, spec: TensorSpec) -> torch.Tensor | None:
        """Memory for the next tensor in a bucket. None if the double buffer has failed; `finish` raises the error.

        The caller continues to read its tensors then, because other ranks may be gathering them together with this
        rank.
        """
        if self._error is not None:
            return None
        try:
            return self._writer.reserve(name, spec, self._deadline)
        except VerlServerError as error:
            self._error = error
            return None

    def finish(self) -> None:
        """Hand the last bucket to the readers. Raises the error of an earlier `reserve`."""
        if self._error is not None:
            raise self._error
        self._writer.finish()

    def report_error(self, names: Sequence[str], manifest: Manifest, timeout_s: float) -> VerlServerError | None:
        """On the leader: what is wrong with the reports of the TP ranks that this double buffer serves, or None.

        `names`: the tensors in the order in which they were written. `timeout_s`: seconds to wait for the
        checksums.
        """
        if not self._role.is_lead_writer:
            return None
        verify = self._opened.validated.verify
        attempt = UpdateAttempt(self._opened.update_id, names, verify, self._opened.members)
        num_checksums = len(names) if verify else 0
        reports = {
            rank.label: self._role.double_buffer.reports.read(rank.receiver, attempt.id, num_checksums)
            for rank in self._role.receiving_ranks(attempt.members)
        }
        try:
            checksums = [] if self._checksums is None else _checksums_of(self._checksums, timeout_s)
            is_whole = manifest.is_whole(names)
            verify_reports(reports, attempt, checksums, is_whole=is_whole, optional=manifest.not_required)
        except VerlServerError as error:
            return error
        return None

    def close(self) -> None:
        """Wait for the thread that computes checksums, which uses the double buffer."""
        if self._checksums is not None:
            wait([self._checksums], RECLAIM_TIMEOUT_S)

    def _start_checksums(self, require_ranks: Callable[[], None]) -> Future[list[int]]:
        """Start a thread that reads the double buffer as one more reader and computes the checksum of each tensor."""
        role = self._role
        reader = BucketReader(
            role.double_buffer,
            self._opened.update_number,
            CHECKSUM_READER,
            role.num_writers,
            require_ranks,
            self._deadline,
        )
        device = accelerator()
        checksums = Checksums(choose_algorithm(), device)

        def compute_checksums() -> list[int]:
            try:
                with as_current(device):
                    for _, tensor in reader.tensors():
                        checksums.add(tensor)
                        del tensor
                    return checksums.values()
            except Exception as error:
                role.fail(self._opened.update_number, f"the checksums could not be computed: {error}")
                raise

        pool = ThreadPoolExecutor(1, thread_name_prefix="verl-server-checksums")
        try:
            return pool.submit(compute_checksums)
        finally:
            pool.shutdown(wait=False)


def _checksums_of(future: Future[list[int]], timeout_s: float) -> list[int]:
    try:
        return future.result(timeout_s)
    except VerlServerError:
        raise
    except Exception as error:
        raise VerlServerError(f"the checksums could not be computed: {type(error).__name__}: {error}") from error
