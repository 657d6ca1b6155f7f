"""`ServerEngine`: what the rest of this library needs to know to start servers of one kind of inference engine.

A running server needs no such knowledge: the servers of both kinds answer the same HTTP routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from verl_server.config import AdapterConfig, EngineKind, parse_engine_kind
from verl_server.server.engine_profile import EngineProfile
from verl_server.server.launch import LaunchedServer
from verl_server.server.supervisor import AbortCheck
from verl_server.types import Json


class ServerEngine(Protocol):
    """One kind of inference engine. `server_args` have SGLang's names where both engines have the argument."""

    @property
    def profile(self) -> EngineProfile: ...

    def launch(
        self, server_args: Mapping[str, Any], config: AdapterConfig, env: Mapping[str, str], check_abort: AbortCheck
    ) -> LaunchedServer:
        """Start a server and wait until it is ready. Raises the errors of `verl_server.server.launch.launch_server`."""

    def with_common_names(self, server_args: Mapping[str, Any]) -> Json:
        """A copy with SGLang's names where both engines have the argument. Checks nothing."""

    def validate_server_args(self, server_args: Mapping[str, Any]) -> Json:
        """A copy with absolute paths that can travel as JSON. Raises BadInputError for arguments that it refuses."""

    def validate_fleet_args(self, server_args: Mapping[str, Any]) -> Json:
        """`validate_server_args` for the replicas of a fleet, which chooses ports and devices."""

    def add_fleet_defaults(self, server_args: Mapping[str, Any], *, has_sglang_router: bool) -> Json:
        """`server_args` with the values that suit servers behind a router of this library."""

    def require_pushable(self, server_args: Mapping[str, Any]) -> None:
        """Raise UnsupportedError if a server with these arguments cannot take pushed weights."""

    def require_divisible_model(self, server_args: Mapping[str, Any]) -> None:
        """Raise BadInputError if `tp_size` ranks cannot divide the model."""

    def place_on_devices(
        self, server_args: Mapping[str, Any], env: Mapping[str, str], first: int, count: int
    ) -> tuple[Json, Mapping[str, str]]:
        """Arguments and environment of a server that uses `count` of the visible accelerators from `first`."""


def with_common_names(config: AdapterConfig, server_args: Mapping[str, Any]) -> Json:
    """A copy of the arguments of the engine's server with SGLang's names where both engines have the argument."""
    return get_engine(config.engine_kind).with_common_names(server_args)


def get_engine(kind: EngineKind | str | None) -> ServerEngine:
    """The engine of this kind. Its module is imported here, so that programs load the words of one engine only.

    Raises BadInputError for another kind.
    """
    if parse_engine_kind(kind) == EngineKind.VLLM:
        from verl_server.adapter.vllm.launch import VllmEngine

        return VllmEngine()
    from verl_server.adapter.sglang.launch import SglangEngine

    return SglangEngine()
