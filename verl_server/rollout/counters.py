"""`FleetCounters`: what a fleet has counted since its start."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FleetCounters:
    """What a fleet has counted since its start."""

    deaths: int = 0
    """Number of servers that ended or counted as stalled."""
    restarts: int = 0
    """Number of servers that were started again."""
    given_up: int = 0
    """Number of replicas that are not started again because their servers ended too often."""
    updates: int = 0
    """Number of weight updates that were published."""
    phase_s: dict[str, float] = field(default_factory=dict)
    """Seconds spent in weight updates, by phase."""
