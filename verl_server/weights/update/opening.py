"""Opening of double buffers by the servers' TP ranks, before the first update with these servers.

A TP rank that cannot open a double buffer, for example because it does not see the GPU, is found here. The servers then
keep their weights. In the middle of an update, the weights would be torn.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass

from verl_server.errors import UnsupportedError
from verl_server.types import Json
from verl_server.weights.checksum import choose_algorithm
from verl_server.weights.double_buffer.buffer import DoubleBuffer
from verl_server.weights.double_buffer.layout import DoubleBufferLayout
from verl_server.weights.transports.base import receiving_ranks
from verl_server.weights.update.report_checks import require_opened
from verl_server.weights.update.server_session import OpenedUpdate


@dataclass(frozen=True)
class DoubleBuffers:
    """The double buffers of all trainer ranks, as the loaders of the servers need to know them."""

    transport: str
    layout: DoubleBufferLayout
    descriptions: Sequence[Json]
    """What a server needs to open each double buffer."""
    num_writers: int
    """Number of trainer ranks that write each double buffer."""
    timeout_s: float
    """Deadline of one update in seconds."""

    def loader_message(self, opened: OpenedUpdate) -> Json:
        """The message for the loaders of all servers."""
        return {
            "transport": self.transport,
            "update_id": opened.update_id,
            "verify": opened.validated.verify,
            "update_number": opened.update_number,
            "double_buffers": list(self.descriptions),
            "layout": asdict(self.layout),
            "num_writers": self.num_writers,
            "timeout_s": self.timeout_s,
            "checksum": choose_algorithm(),
        }

    def opening_message(self, opened: OpenedUpdate) -> Json:
        """A message after which the loaders only open the double buffers and report. They load nothing."""
        return {**self.loader_message(opened), "opens_only": True}

    def require_opened(self, opened: OpenedUpdate) -> None:
        """Raise UnsupportedError unless every TP rank has opened its double buffer after `opening_message`.

        Rank 0 opens the double buffers of all trainer ranks, because they contain the reports.
        """
        with ExitStack() as stack:
            buffers = [stack.enter_context(closing(self._open(rank))) for rank in range(len(self.descriptions))]
            require_opened(
                self.transport,
                (
                    (rank, buffers[rank.receiver % len(buffers)].reports.read(rank.receiver, opened.update_id, 0))
                    for rank in receiving_ranks(opened.members)
                ),
            )

    def _open(self, rank: int) -> DoubleBuffer:
        """The double buffer of a trainer rank, opened on rank 0. Raises UnsupportedError."""
        try:
            return DoubleBuffer.open(self.descriptions[rank]["location"], self.layout)
        except OSError as error:
            raise UnsupportedError(
                f"rank 0 cannot open the staging memory of trainer rank {rank}: {error}. "
                f"The transport {self.transport!r} needs all trainer ranks on one machine"
            ) from error
