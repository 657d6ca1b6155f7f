"""The public state of a router: its counters and its replicas, as frozen copies that any thread may read."""

from __future__ import annotations

from dataclasses import dataclass


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
