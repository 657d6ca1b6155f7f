"""When a replica is sick. Pure: what was observed in, the next state out.

Death is told by the process. Wedging is told by the lack of progress: work is there, no token has come for long,
and its scheduler has not used the processor either. A slow probe tells nothing: a long prefill answers none.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from verl_server.config import RecoveryConfig


class ReplicaState(enum.StrEnum):
    """`HEALTHY -> SUSPECT -> DEAD -> RESTARTING -> STALE -> HEALTHY`, and the ends."""

    STARTING = "starting"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Quiet for long; others are preferred."""
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    """It runs, with weights that are not the current ones; it is given no requests."""
    DRAINING = "draining"
    """To be removed: it finishes what it has."""
    FAILED = "failed"
    """It was given up, after one crash too many."""
    REMOVED = "removed"


@dataclass(frozen=True)
class Observation:
    """What is seen of a replica that serves."""

    alive: bool
    """All of its processes run."""
    requests: int
    """That it works on."""
    quiet_s: float
    """Since it last made progress: a token came, or its work began. 0 without work."""
    idle_s: float
    """Since its schedulers last used the processor."""
    paused: bool = False


def judged(seen: Observation, recovery: RecoveryConfig) -> ReplicaState:
    """HEALTHY, SUSPECT or DEAD."""
    if not seen.alive:
        return ReplicaState.DEAD
    if seen.paused or seen.requests == 0:
        return ReplicaState.HEALTHY
    stuck_s = min(seen.quiet_s, seen.idle_s)
    if stuck_s >= recovery.stall_timeout_s or seen.quiet_s >= recovery.hard_stall_timeout_s:
        return ReplicaState.DEAD
    if stuck_s >= recovery.stall_timeout_s / 2 or seen.quiet_s >= recovery.hard_stall_timeout_s / 2:
        return ReplicaState.SUSPECT
    return ReplicaState.HEALTHY


def restart_after(deaths: Sequence[float], now: float, recovery: RecoveryConfig) -> float | None:
    """Seconds to wait before the next restart, given the times of past deaths; None: give it up."""
    recent = [death for death in deaths if now - death < recovery.window_s]
    if len(recent) > recovery.max_restarts:
        return None
    if len(recent) <= 1:
        return 0.0
    return float(min(recovery.backoff_s * 2.0 ** (len(recent) - 2), recovery.max_backoff_s))
