"""Which replica takes a request. Pure: what the router knows in, a name out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_server.config import Limits
from verl_server.errors import BadInputError, NotReadyError, ServerBusyError


@dataclass(frozen=True)
class ReplicaLoad:
    """What the router knows of one replica."""

    name: str
    tokens: int
    """Of the requests that it works on: prompts, and what has arrived."""
    requests: int
    version: int
    """Of the weights that it serves."""
    admitted: bool = True
    """It may be given requests."""
    suspect: bool = False
    """It has been quiet for long: only taken when there is no other."""


@dataclass(frozen=True)
class VersionRequirement:
    """What a request asks of its replica."""

    weight_version: int | None = None
    """Exactly these weights."""
    min_weight_version: int | None = None
    """These or later ones."""

    def __post_init__(self) -> None:
        for name in ("weight_version", "min_weight_version"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise BadInputError(f"{name} must be a whole number, 0 or more, got {value!r}")

    def is_met_by(self, version: int) -> bool:
        return (self.weight_version is None or version == self.weight_version) and (
            self.min_weight_version is None or version >= self.min_weight_version
        )


def suitable(loads: Sequence[ReplicaLoad], need: VersionRequirement) -> list[ReplicaLoad]:
    """The replicas that could take a request, now or once they have room.

    Raises NotReadyError (retryable) when none serves such weights, or none serves at all.
    """
    serving = [load for load in loads if load.admitted]
    found = [load for load in serving if need.is_met_by(load.version)]
    if found:
        return found
    if not serving:
        raise NotReadyError("no replica serves at the moment: they start, have gone, or their memory is released")
    raise NotReadyError(
        f"no replica serves {_words(need)}; versions served: {sorted({load.version for load in serving})}"
    )


def _words(need: VersionRequirement) -> str:
    if need.weight_version is not None:
        return f"weight version {need.weight_version}"
    return f"weight version {need.min_weight_version} or later"


def choose(
    loads: Sequence[ReplicaLoad], need: VersionRequirement, sticky: str | None, size: int, limits: Limits
) -> str | None:
    """The replica for a request with a prompt of `size` tokens; None when all that are suitable are full.

    `sticky`: where the session's earlier turns ran. It stays there, for the sake of the prefix cache, unless that
    replica would have far more than its share and another has so much less to do that computing the prompt there
    again costs less. Otherwise the one with the least tokens in flight.
    """
    candidates = suitable(loads, need)
    healthy = [load for load in candidates if not load.suspect] or candidates
    room = [load for load in healthy if load.requests < limits.requests]
    if not room:
        return None
    best = min(room, key=lambda load: (load.tokens, load.requests, load.name))
    here = next((load for load in room if load.name == sticky), None)
    if here is None:
        return best.name
    share = (sum(load.tokens for load in healthy) + size) / len(healthy)
    overloaded = here.tokens + size > limits.overload * share and here.tokens - best.tokens > size
    return best.name if overloaded else here.name


def require_place_in_queue(waiting: int, limit: int) -> None:
    """Raises ServerBusyError (retryable) instead of letting a queue grow until its requests are late."""
    if waiting >= limit:
        raise ServerBusyError(f"{waiting} requests wait for a replica already; try again later", waiting=waiting)
