"""How many devices one replica takes, and whether its parallel sizes go together. Pure.

Facts are SGLang's (`ServerArgs`): tensor parallel groups are cut into pipeline stages and over nodes; data parallel
copies take devices of their own, unless DP attention shares the tensor parallel ones; experts are spread over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_server.errors import BadInputError, UnsupportedError

SIZES = ("tp_size", "pp_size", "dp_size", "ep_size", "nnodes")


@dataclass(frozen=True)
class ParallelConfig:
    """The parallel sizes of one replica."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    nnodes: int = 1
    dp_attention: bool = False

    @property
    def devices(self) -> int:
        """That one replica takes, on all of its nodes."""
        return self.tp_size * self.pp_size * (1 if self.dp_attention else self.dp_size)

    @property
    def devices_per_node(self) -> int:
        return self.devices // self.nnodes


def parallel_config_of(server_args: Mapping[str, Any], *, takes_weights: bool) -> ParallelConfig:
    """Raises BadInputError for sizes that do not go together; UnsupportedError for those without pushed weights."""
    sizes = {name: _size(name, server_args.get(name)) for name in SIZES}
    shape = ParallelConfig(**sizes, dp_attention=bool(server_args.get("enable_dp_attention")))
    if shape.dp_attention and shape.tp_size % shape.dp_size:
        raise BadInputError(f"DP attention divides tp_size={shape.tp_size} by dp_size={shape.dp_size}: it does not go")
    if shape.tp_size % shape.ep_size:
        raise BadInputError(f"ep_size={shape.ep_size} must divide tp_size={shape.tp_size}")
    if shape.nnodes > 1 and shape.dp_size > 1 and not shape.dp_attention:
        raise BadInputError(
            f"dp_size={shape.dp_size} copies do not go over nnodes={shape.nnodes}: use that many replicas instead"
        )
    if (shape.tp_size * shape.pp_size) % shape.nnodes:
        raise BadInputError(
            f"tp_size * pp_size = {shape.tp_size * shape.pp_size} does not spread evenly over nnodes={shape.nnodes}"
        )
    if takes_weights and shape.dp_size > 1 and not shape.dp_attention:
        raise BadInputError(
            f"SGLang takes no pushed weights with dp_size={shape.dp_size}: "
            "use that many replicas, or enable_dp_attention"
        )
    if takes_weights and shape.pp_size > 1:
        raise UnsupportedError(
            f"weights cannot be pushed into pp_size={shape.pp_size} pipeline stages: use tp_size instead"
        )
    return shape


def require_room(shape: ParallelConfig, replicas: int, devices: int | None) -> None:
    """Raises BadInputError when `replicas` of that shape take more than all `devices` (None: unknown)."""
    if devices is not None and replicas * shape.devices > devices:
        raise BadInputError(
            f"{replicas} replicas of {shape.devices} devices each take {replicas * shape.devices}; there are {devices}"
        )


def _size(name: str, given: Any) -> int:
    if given is None:
        return 1
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise BadInputError(f"{name} must be a whole number, 1 or more, got {given!r}")
    return given
