"""What each rollout mode allows a fleet to do. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_server.config import RolloutMode
from verl_server.errors import BadInputError
from verl_server.validation import did_you_mean


@dataclass(frozen=True)
class ModeCapabilities:
    """What a fleet of one rollout mode can do."""

    takes_weights: bool
    """Whether the trainer can push weights."""
    releases_memory: bool
    """Whether the fleet can release its memory for other users of the devices."""
    transport: str | None
    """Name of the weight transport. None: the cheapest transport that reaches all replicas."""


_CAPABILITIES: Mapping[RolloutMode, ModeCapabilities] = {
    RolloutMode.HYBRID: ModeCapabilities(takes_weights=True, releases_memory=True, transport=None),
    RolloutMode.STANDALONE: ModeCapabilities(takes_weights=True, releases_memory=False, transport="distributed"),
    RolloutMode.COLOCATED: ModeCapabilities(takes_weights=False, releases_memory=True, transport=None),
}


def capabilities_of(mode: RolloutMode) -> ModeCapabilities:
    return _CAPABILITIES[mode]


def parse_mode(mode: RolloutMode | str | None) -> RolloutMode:
    """The rollout mode of that name; `HYBRID` for None. Raises BadInputError for an unknown name."""
    if mode is None:
        return RolloutMode.HYBRID
    try:
        return RolloutMode(mode)
    except ValueError:
        known = [str(mode) for mode in RolloutMode]
        raise BadInputError(f"mode must be one of {known}, got {mode!r}{did_you_mean(mode, known)}") from None


def server_args_for_mode(mode: RolloutMode, server_args: Mapping[str, Any]) -> dict[str, Any]:
    """`server_args` with the arguments that the engine needs for the mode.

    On an accelerator, an engine can release memory only when the server was started with `enable_memory_saver`.
    """
    args = dict(server_args)
    if capabilities_of(mode).releases_memory:
        args.setdefault("enable_memory_saver", True)
    return args
