"""Rules of the choice of a replica: required weights, and when a session leaves its replica. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_server.errors import ServerBusyError
from verl_server.validation import require_whole_number


@dataclass(frozen=True)
class VersionRequirement:
    """Which weights a request must be generated with. None means no requirement."""

    weight_version: int | None = None
    """Exact weight version."""
    min_weight_version: int | None = None
    """Minimum weight version."""

    def __post_init__(self) -> None:
        for name in ("weight_version", "min_weight_version"):
            value = getattr(self, name)
            if value is not None:
                require_whole_number(name, value, minimum=0)

    def is_met_by(self, weight_version: int) -> bool:
        """Whether a replica that serves `weight_version` may take the request."""
        return (self.weight_version is None or weight_version == self.weight_version) and (
            self.min_weight_version is None or weight_version >= self.min_weight_version
        )

    def __str__(self) -> str:
        if self.weight_version is not None:
            return f"weight version {self.weight_version}"
        if self.min_weight_version is not None:
            return f"weight version {self.min_weight_version} or later"
        return "any weight version"


@dataclass(frozen=True)
class RoutingRequest:
    """What the choice of a replica depends on."""

    requirement: VersionRequirement = field(default_factory=VersionRequirement)
    """Which weights the request must be generated with."""
    session_id: str | None = None
    """Session of the request. Requests of a session share a prefix and prefer the same replica."""
    prompt_tokens: int = 0
    """Number of prompt tokens."""
    may_be_refused: bool = False
    """Whether the request is refused when the queue is full. True for requests of other processes. A request of this
    process waits: its caller holds it in memory anyway."""
    is_isolated: bool = False
    """Whether the request may have ended several servers. Its replica runs no other request of this kind until it has
    returned a token: if the server ends before, this request is the cause."""


def session_moves(
    current_tokens: int, least_tokens: int, total_tokens: int, replicas: int, prompt_tokens: int, overload_factor: float
) -> bool:
    """Whether a session with a prompt of `prompt_tokens` tokens leaves its replica for the least loaded one.

    The session stays because of the prefix cache, except when its replica would exceed `overload_factor` times the mean
    load and the least loaded replica has so many tokens less in flight that computing the whole prompt there costs
    less. `total_tokens`: tokens in flight on all `replicas` replicas that could take the request.
    """
    mean_tokens = (total_tokens + prompt_tokens) / replicas
    is_overloaded = current_tokens + prompt_tokens > overload_factor * mean_tokens
    return is_overloaded and current_tokens - least_tokens > prompt_tokens


def require_queue_capacity(queued_requests: int, max_queued_requests: int) -> None:
    """Raises ServerBusyError (retryable) when the queue is full, so that requests do not wait past their deadline."""
    if queued_requests >= max_queued_requests:
        raise ServerBusyError(
            f"{queued_requests} requests are queued already, the maximum is {max_queued_requests}; try again later",
            queued_requests=queued_requests,
        )
