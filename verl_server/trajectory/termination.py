"""`Termination`: the end of a path in a token graph. Pure data, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl_server.types import Json


@dataclass(frozen=True)
class Termination:
    """The end of a path: why the episode stopped at a node."""

    node: int
    stop_reason: str
    error: Json | None = None
    """Exception of a failed episode as JSON (`verl_server.errors.to_wire`)."""
    reward: float | None = None
    """Weighted sum of the rewards of the sample. None if the sample has no reward or failed."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Result of each reward function and metric by its name."""
    segments: Sequence[tuple[int, float]] | None = None
    """Last node and weight of each path that is trained. None in files of earlier versions: only this path is."""
