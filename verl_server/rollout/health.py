"""Decides when a replica is unhealthy and when its server is started again. Pure functions.

The end of a server is reported by its process. A stall is detected by missing progress: the replica has running
requests, has produced no token for a long time, and there was no sign of life of its schedulers either
(`signs_of_life.py`). One slow answer is no sign of a stall, because a server does not answer during a long prefill.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from verl_server.config import RecoveryConfig

MAX_LOOK_INTERVAL_S = 5.0


class ReplicaState(enum.StrEnum):
    """State of a replica. The usual cycle: `HEALTHY -> SUSPECT -> DEAD -> RESTARTING -> STALE -> HEALTHY`."""

    STARTING = "starting"
    """Its first server is starting."""
    HEALTHY = "healthy"
    """It serves the current weights."""
    SUSPECT = "suspect"
    """It made no progress for half of the stall timeout. Other replicas are preferred."""
    DEAD = "dead"
    """Its server has ended or counts as stalled."""
    RESTARTING = "restarting"
    """A new server is starting."""
    STALE = "stale"
    """Its server runs with other weights than the current ones. It receives no requests."""
    DRAINING = "draining"
    """It is being removed and finishes its running requests."""
    FAILED = "failed"
    """Its server has ended too often and is not started again."""
    REMOVED = "removed"
    """It has left the fleet."""


@dataclass(frozen=True)
class Observation:
    """What is observed of a replica at one moment."""

    is_alive: bool
    """Whether all processes of its server run."""
    running_requests: int
    """Number of requests that run on it."""
    no_progress_s: float
    """Seconds since the last new token, or since its requests began. 0 without requests."""
    no_sign_s: float
    """Seconds since the last sign of life of its schedulers, at most `no_progress_s`."""
    is_paused: bool = False
    """Whether generation is paused or memory is released."""


def classify_health(observation: Observation, config: RecoveryConfig) -> ReplicaState:
    """HEALTHY, SUSPECT or DEAD. A stalled replica is DEAD."""
    if not observation.is_alive:
        return ReplicaState.DEAD
    if observation.is_paused or observation.running_requests == 0:
        return ReplicaState.HEALTHY
    stalled_s = min(observation.no_progress_s, observation.no_sign_s)
    if stalled_s >= config.stall_timeout_s or observation.no_progress_s >= config.hard_stall_timeout_s:
        return ReplicaState.DEAD
    if stalled_s >= config.stall_timeout_s / 2 or observation.no_progress_s >= config.hard_stall_timeout_s / 2:
        return ReplicaState.SUSPECT
    return ReplicaState.HEALTHY


def look_interval_s(config: RecoveryConfig) -> float:
    """Seconds between two looks for signs of life of a replica that makes no progress."""
    return min(MAX_LOOK_INTERVAL_S, config.stall_timeout_s / 8)


def restart_delay_s(
    deaths: Sequence[float], now: float, config: RecoveryConfig, failed_starts: int = 0
) -> float | None:
    """Seconds to wait before the next restart. None: no further restart.

    `deaths` are the times at which the replica's servers ended, on the clock of `now`. `failed_starts`: number of
    starts in a row that have failed. They count however long they took.
    """
    recent = [death for death in deaths if now - death < config.restart_window_s]
    if max(len(recent), failed_starts) > config.max_restarts:
        return None
    if len(recent) <= 1:
        return 0.0
    return float(min(config.backoff_s * 2.0 ** (len(recent) - 2), config.max_backoff_s))


KEEPS_NO_WEIGHTS = "it waits for an update of all weights: the trainer does not keep the published ones"


def unavailable_reason(
    state: ReplicaState, released_memory: Collection[str], weights_undefined: bool, waits_for_update: bool
) -> str:
    """Why a replica in this state does not serve until the user acts. Empty when it serves or will serve."""
    if state is ReplicaState.FAILED:
        return "has failed: correct the cause, then call restart_failed() of the fleet"
    if state is ReplicaState.DRAINING:
        return "is being removed"
    if released_memory:
        return f"has released its memory ({', '.join(sorted(released_memory))}): call resume_memory_occupation"
    if weights_undefined:
        return "has no whole weights: send an update of all weights"
    return "has old weights: send an update of all weights" if waits_for_update else ""
