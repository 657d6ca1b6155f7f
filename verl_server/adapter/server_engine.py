"""`ServerEngine`: what the rest of this library needs to know to start servers of one kind of inference engine.

A running server needs no such knowledge: the servers of both kinds answer the same HTTP routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_server.config import AdapterConfig
from verl_server.server.launch import LaunchedServer
from verl_server.server.process import AbortCheck
from verl_server.types import Json

ServerArgs = Mapping[str, Any]


@dataclass(frozen=True)
class ServerEngine:
    """One kind of inference engine. `server_args` have SGLang's names where both engines have the argument."""

    launch: Callable[[ServerArgs, AdapterConfig, Mapping[str, str], AbortCheck], LaunchedServer]
    """Starts a server and waits until it is ready. Raises the errors of `verl_server.server.launch.launch_server`."""
    with_common_names: Callable[[ServerArgs], Json]
    """Returns a copy with SGLang's names where both engines have the argument. Checks nothing."""
    validate_server_args: Callable[[ServerArgs], Json]
    """Returns a copy with absolute paths that can travel as JSON. Raises BadInputError for refused arguments."""
    validate_fleet_args: Callable[[ServerArgs], Json]
    """`validate_server_args` for the replicas of a fleet, which chooses ports and devices."""
    add_fleet_defaults: Callable[[ServerArgs, bool], Json]
    """Returns the arguments with the values that suit servers behind a router of this library. The second argument:
    whether the servers are also registered with an `sglang-router`."""
    require_pushable: Callable[[ServerArgs, Mapping[str, str]], None]
    """Raises UnsupportedError if a server with these arguments and added variables cannot take pushed weights."""
    require_divisible_model: Callable[[ServerArgs], None]
    """Raises BadInputError if `tp_size` ranks cannot divide the model."""
    place_on_devices: Callable[[ServerArgs, Mapping[str, str], int, int], tuple[Json, Mapping[str, str]]]
    """Returns arguments and environment variables of a server that uses a number of accelerators. The last arguments:
    index of its first one among the visible accelerators, and their number."""
