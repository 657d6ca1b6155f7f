"""Parallel sizes of one replica: how many devices it takes, and which sizes can be combined. Pure functions.

The rules are those of SGLang (`ServerArgs`). Tensor parallel groups are divided into pipeline stages and spread over
nodes. Data parallel copies take their own devices, unless DP attention shares the tensor parallel devices. Experts are
spread over the tensor parallel devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError
from verl_server.validation import require_whole_number

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
    """The parallel sizes in SGLang's server arguments.

    Raises BadInputError for sizes that cannot be combined.
    """
    given = {name: server_args.get(name) for name in SIZES}
    sizes = {name: 1 if value is None else require_whole_number(name, value) for name, value in given.items()}
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
