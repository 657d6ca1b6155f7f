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


# -- Parallel config --------------------------------------------------------------------------------
# Parallel sizes of one replica: how many devices it takes, and which sizes can be combined. Pure functions.
#
# The rules are those of SGLang (`ServerArgs`). Tensor parallel groups are divided into pipeline stages and spread over
# nodes. Data parallel copies take their own devices, unless DP attention shares the tensor parallel devices. Experts
# are spread over the tensor parallel devices.

SIZES = ("tp_size", "pp_size", "dp_size", "ep_size", "nnodes")


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel sizes of one replica. The fields are SGLang's server arguments."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    nnodes: int = 1
    dp_attention: bool = False
    """SGLang's `enable_dp_attention`: data parallel attention on the tensor parallel devices."""

    @property
    def devices(self) -> int:
        """Number of devices of one replica, on all of its nodes."""
        return self.tp_size * self.pp_size * (1 if self.dp_attention else self.dp_size)

    @property
    def devices_per_node(self) -> int:
        """Number of devices of one replica on each of its nodes."""
        return self.devices // self.nnodes


def parse_parallel_config(server_args: Mapping[str, Any]) -> ParallelConfig:
    """The parallel sizes in SGLang's server arguments, which are validated.

    Raises BadInputError for sizes that cannot be combined.
    """
    given = {name: server_args.get(name) for name in SIZES}
    sizes = {name: 1 if value is None else value for name, value in given.items()}
    config = ParallelConfig(**sizes, dp_attention=bool(server_args.get("enable_dp_attention")))
    if config.dp_attention and config.tp_size % config.dp_size:
        raise BadInputError(
            f"DP attention divides tp_size={config.tp_size} by dp_size={config.dp_size}, which leaves a remainder"
        )
    if config.tp_size % config.ep_size:
        raise BadInputError(f"ep_size={config.ep_size} must divide tp_size={config.tp_size}")
    if config.nnodes > 1 and config.dp_size > 1 and not config.dp_attention:
        raise BadInputError(
            f"dp_size={config.dp_size} copies cannot be spread over nnodes={config.nnodes}: use that many replicas"
        )
    if (config.tp_size * config.pp_size) % config.nnodes:
        raise BadInputError(
            f"tp_size * pp_size = {config.tp_size * config.pp_size} does not spread evenly over nnodes={config.nnodes}"
        )
    return config


def require_devices(config: ParallelConfig, replicas: int, available: int | None, reason: str = "") -> None:
    """Raise BadInputError when `replicas` replicas take more than the available devices. None: unknown number.

    `reason`: the end of the message, which says why there are no more.
    """
    if available is not None and replicas * config.devices > available:
        raise BadInputError(
            f"{replicas} replicas of {config.devices} devices each take {replicas * config.devices}; "
            f"there are {available}{reason}"
        )
