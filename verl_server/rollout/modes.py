"""What a fleet is to its trainer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_server.config import RolloutMode
from verl_server.errors import BadInputError


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


def capabilities_of(mode: RolloutMode) -> ModeCapabilities:
    return _CAPABILITIES[mode]


def mode_of(given: RolloutMode | str) -> RolloutMode:
    """Raises BadInputError for a word that is none."""
    try:
        return RolloutMode(given)
    except ValueError:
        raise BadInputError(f"mode must be one of {[str(mode) for mode in RolloutMode]}, got {given!r}") from None


def server_args_for(mode: RolloutMode, server_args: Mapping[str, Any]) -> dict[str, Any]:
    """With what SGLang needs for the mode: memory can only be released by a server that was started for it."""
    args = dict(server_args)
    if capabilities_of(mode).lends_memory:
        args.setdefault("enable_memory_saver", True)
    return args
