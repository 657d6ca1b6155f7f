"""What a fleet is to its trainer. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError


class RolloutMode(enum.StrEnum):
    """Terms are verl's."""

    HYBRID = "hybrid"
    """Shares the trainer's devices: takes its weights where they lie, and lends its memory (on-policy)."""
    STANDALONE = "standalone"
    """Has devices of its own, here or elsewhere: takes weights by broadcast, never sleeps (off-policy)."""
    COLOCATED = "colocated"
    """Shares devices and keeps the weights of its checkpoint, as a judge or reward model: only lends its memory."""

    @property
    def capabilities(self) -> ModeCapabilities:
        return _CAPABILITIES[self]


@dataclass(frozen=True)
class ModeCapabilities:
    """What a mode allows."""

    takes_weights: bool
    lends_memory: bool
    transport: str | None
    """Of weights; None: the nearest that reaches all replicas."""


_CAPABILITIES: Mapping[RolloutMode, ModeCapabilities] = {
    RolloutMode.HYBRID: ModeCapabilities(takes_weights=True, lends_memory=True, transport=None),
    RolloutMode.STANDALONE: ModeCapabilities(takes_weights=True, lends_memory=False, transport="distributed"),
    RolloutMode.COLOCATED: ModeCapabilities(takes_weights=False, lends_memory=True, transport=None),
}


def mode_of(given: RolloutMode | str) -> RolloutMode:
    """Raises BadInputError for a word that is none."""
    try:
        return RolloutMode(given)
    except ValueError:
        raise BadInputError(f"mode must be one of {[str(mode) for mode in RolloutMode]}, got {given!r}") from None


def server_args_for(mode: RolloutMode, server_args: Mapping[str, Any]) -> dict[str, Any]:
    """With what SGLang needs for the mode: memory can only be released by a server that was started for it."""
    args = dict(server_args)
    if mode.capabilities.lends_memory:
        args.setdefault("enable_memory_saver", True)
    return args
