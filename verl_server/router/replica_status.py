"""The messages between a fleet and its routers: states of replicas in one direction, observations in the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server.adapter.client import AsyncHttpServerEngineAdapter


@dataclass(frozen=True)
class ReplicaStatus:
    """State of one replica, as the fleet reports it to a router."""

    name: str
    adapter: AsyncHttpServerEngineAdapter | None
    """Adapter of the replica's server. None while the replica has no server."""
    weight_version: int
    """Version of the weights that the replica serves."""
    admitted: bool
    """Whether the replica may receive requests."""
    suspect: bool
    """Whether the replica made no progress for a long time. Routers prefer other replicas."""
    will_serve: bool
    """Whether the replica serves requests, or will serve them again without an action of the user."""
    removed: bool
    """Whether the replica has left the fleet permanently."""
    reason: str = ""
    """Why the replica does not serve requests until the user acts, for example "has released its memory"."""
    failure: Json | None = None
    """The error (`to_wire`) after which the replica is not started again."""
    dp_size: int = 1
    """Number of data parallel ranks of the replica's server."""


@dataclass(frozen=True)
class ReplicaStats:
    """Requests of one replica, as one router or all routers of a fleet observe them."""

    running_requests: int
    """Number of requests that run on the replica."""
    last_progress_at: float
    """Time of the last new token of any running request (`time.monotonic`). 0 without running requests."""
    admitted: bool
    """Whether the router sends requests to the replica. False after a broken connection, even if the fleet admits
    the replica."""


def merge_stats(stats: Sequence[ReplicaStats | None]) -> ReplicaStats:
    """Combine what all routers observe of one replica. Progress at any router is progress of the replica.

    None stands for a router that does not know the replica or reports no observations.
    """
    known = [router_stats for router_stats in stats if router_stats is not None]
    busy = [router_stats for router_stats in known if router_stats.running_requests]
    return ReplicaStats(
        running_requests=sum(router_stats.running_requests for router_stats in busy),
        last_progress_at=max((router_stats.last_progress_at for router_stats in busy), default=0.0),
        admitted=all(router_stats.admitted for router_stats in known),
    )


class StatusQueue:
    """A queue that holds the latest status of each replica that the reader has not taken yet. Thread-safe.

    `sequence` counts the calls that added statuses. A reader confirms a sequence number to say which statuses it
    has applied.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._pending: dict[str, ReplicaStatus] = {}
        self._current: dict[str, ReplicaStatus] = {}
        self._closed = False
        self.sequence = 0
        """Sequence number of the last added status."""

    def put(self, *statuses: ReplicaStatus) -> None:
        """Add statuses, which a reader takes together. Each replaces a pending status of the same replica."""
        with self._condition:
            self.sequence += 1
            for status in statuses:
                self._pending[status.name] = self._current[status.name] = status
                if status.removed:
                    del self._current[status.name]
            self._condition.notify_all()

    def requeue_all(self) -> None:
        """Add the current status of every replica again, for a new reader."""
        with self._condition:
            self.sequence += 1
            self._pending = {**self._pending, **self._current}
            self._condition.notify_all()

    def latest(self, name: str) -> ReplicaStatus | None:
        """The current status of a replica. None for an unknown or removed replica."""
        return self._current.get(name)

    def take(self, timeout_s: float | None = None) -> tuple[int, list[ReplicaStatus]] | None:
        """Wait for pending statuses and take them; returns the last sequence number and the statuses.

        The list is empty after `timeout_s` seconds without a status. Returns None when the queue was closed.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._pending or self._closed, timeout_s)
            if self._closed:
                return None
            taken, self._pending = list(self._pending.values()), {}
            return self.sequence, taken

    def close(self) -> None:
        """End the queue. A waiting reader returns None."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()


# -- Snapshot ---------------------------------------------------------------------------------------
# The public state of a router: its counters and its replicas, as frozen copies that any thread may read.


@dataclass
class RouterCounters:
    """What one router has counted since its start. A generation is the work for one request id.

    Every accepted call is counted once, in `requests` or in `attached`. Every generation of `requests` that has ended
    is counted in `finished` or `failed`, unless it was cancelled.
    """

    requests: int = 0
    """Number of calls that started a generation, or continued a generation after an abort."""
    finished: int = 0
    """Number of these generations that finished."""
    failed: int = 0
    """Number of these generations that ended with an error."""
    refused: int = 0
    """Number of requests refused because no replica serves the required weights, or none serves at all."""
    attached: int = 0
    """Number of calls that received a running generation or a stored result with the same request id."""
    continued: int = 0
    """Number of lost attempts after which a generation continued from the tokens received so far."""
    restarted: int = 0
    """Number of lost attempts after which a generation started again without tokens."""
    saved_tokens: int = 0
    """Number of output tokens that were kept when a replica was lost."""
    output_tokens: int = 0
    """Number of output tokens of finished generations."""
    prompt_tokens: int = 0
    """Number of prompt tokens of finished generations."""
    cached_tokens: int = 0
    """Number of prompt tokens of finished generations that a prefix cache provided."""


@dataclass(frozen=True)
class ReplicaSnapshot:
    """State of one replica in a router at one moment."""

    name: str
    admitted: bool
    """Whether the router sends requests to the replica."""
    suspect: bool
    """Whether the replica made no progress for a long time, or failed several times in a row."""
    weight_version: int
    """Version of the weights that the replica serves."""
    running_requests: int
    """Number of requests that run on the replica."""
    tokens_in_flight: int
    """Number of tokens of these requests: prompts and received output."""


@dataclass(frozen=True)
class RouterSnapshot:
    """State of one router at one moment."""

    replicas: tuple[ReplicaSnapshot, ...]
    queued_requests: int
    """Number of requests that wait for a replica."""
    stored_results: int
    """Number of finished results that a repeated request id still receives."""
    counters: RouterCounters
    """A copy of the counters."""
    is_paused: bool = False
    """Whether all requests wait, because a trainer has paused the router or updates the weights."""

    def replica(self, name: str) -> ReplicaSnapshot | None:
        """The replica with this name. None when the router does not know it."""
        return next((replica for replica in self.replicas if replica.name == name), None)
