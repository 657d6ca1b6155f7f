"""The choice of the inference engine whose servers are started, by the setting `engine_kind`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_server.adapter.server_engine import ServerEngine
from verl_server.config import AdapterConfig, EngineKind, parse_engine_kind
from verl_server.types import Json


def with_common_names(config: AdapterConfig, server_args: Mapping[str, Any]) -> Json:
    """A copy of the arguments of the engine's server with SGLang's names where both engines have the argument."""
    return get_engine(config.engine_kind).with_common_names(server_args)


def get_engine(kind: EngineKind | str | None) -> ServerEngine:
    """The engine of this kind. Its module is imported here, so that programs load the words of one engine only.

    Raises BadInputError for another kind.
    """
    if parse_engine_kind(kind) == EngineKind.VLLM:
        from verl_server.adapter.vllm.server_arguments import VLLM_ENGINE

        return VLLM_ENGINE
    from verl_server.adapter.sglang.server_arguments import SGLANG_ENGINE

    return SGLANG_ENGINE
