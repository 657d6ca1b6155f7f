"""Which replica takes a request. Pure functions: the loads of all replicas in, the name of one replica out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_server.config import RouterConfig
from verl_server.errors import NotReadyError, ServerBusyError
from verl_server.validation import require_whole_number


@dataclass(frozen=True)
class ReplicaLoad:
    """Load and state of one replica at the moment of a routing decision."""

    name: str
    tokens_in_flight: int
    """Number of tokens of all requests that run on the replica: prompts and received output."""
    running_requests: int
    """Number of requests that run on the replica."""
    weight_version: int
    """Version of the weights that the replica serves."""
    admitted: bool = True
    """Whether the replica may receive requests."""
    suspect: bool = False
    """Whether the replica made no progress for a long time. It receives requests only when no other replica can."""


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
        return f"weight version {self.min_weight_version} or later"


def suitable_replicas(loads: Sequence[ReplicaLoad], requirement: VersionRequirement) -> list[ReplicaLoad]:
    """The replicas that may take a request, now or when they have capacity again.

    Raises NotReadyError (retryable) when no replica is admitted or none of them serves the required weights.
    """
    admitted = [load for load in loads if load.admitted]
    found = [load for load in admitted if requirement.is_met_by(load.weight_version)]
    if found:
        return found
    if not admitted:
        raise NotReadyError("no replica serves requests at the moment")
    raise NotReadyError(
        f"no replica serves {requirement}; versions served: {sorted({load.weight_version for load in admitted})}"
    )


def choose_replica(
    loads: Sequence[ReplicaLoad],
    requirement: VersionRequirement,
    *,
    session_replica: str | None,
    prompt_tokens: int,
    config: RouterConfig,
) -> str | None:
    """The replica for a request with a prompt of `prompt_tokens` tokens. None when all suitable replicas are full.

    `session_replica` is the replica of the session's earlier turns. The session stays there because of the prefix
    cache, except when that replica would exceed `config.overload_factor` times the mean load and another replica has
    so many tokens less in flight that computing the whole prompt there costs less. A request without such a replica
    goes to the replica with the fewest tokens in flight. Raises NotReadyError as `suitable_replicas` does.
    """
    candidates = suitable_replicas(loads, requirement)
    healthy = [load for load in candidates if not load.suspect] or candidates
    available = [load for load in healthy if load.running_requests < config.max_running_requests_per_replica]
    if not available:
        return None
    least_loaded = min(available, key=lambda load: (load.tokens_in_flight, load.running_requests, load.name))
    current = next((load for load in available if load.name == session_replica), None)
    if current is None:
        return least_loaded.name
    mean_tokens = (sum(load.tokens_in_flight for load in healthy) + prompt_tokens) / len(healthy)
    overloaded = (
        current.tokens_in_flight + prompt_tokens > config.overload_factor * mean_tokens
        and current.tokens_in_flight - least_loaded.tokens_in_flight > prompt_tokens
    )
    return least_loaded.name if overloaded else current.name


def require_queue_capacity(queued_requests: int, max_queued_requests: int) -> None:
    """Raises ServerBusyError (retryable) when the queue is full, so that requests do not wait past their deadline."""
    if queued_requests >= max_queued_requests:
        raise ServerBusyError(
            f"{queued_requests} requests are queued already, the maximum is {max_queued_requests}; try again later",
            queued_requests=queued_requests,
        )
