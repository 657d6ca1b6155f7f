"""verl_server: a rollout engine for reinforcement-learning post-training.

    from verl_server import VerlEngine

Public names are imported on first use. `import verl_server` imports neither torch nor ray nor sglang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_server.adapter import AsyncHttpServerEngineAdapter, HttpServerEngineAdapter
    from verl_server.config import (
        AdapterConfig,
        MemoryTag,
        PauseMode,
        RecoveryConfig,
        RemoteServer,
        RolloutMode,
        RouterConfig,
        Timeouts,
        WeightsConfig,
    )
    from verl_server.engine.verl_engine import VerlEngine
    from verl_server.errors import (
        BadInputError,
        DeadlineError,
        NotReadyError,
        PeerError,
        ServerBusyError,
        ServerDiedError,
        ServerError,
        ShutDownError,
        StartupError,
        TornWeightsError,
        UnsupportedError,
        VerlServerError,
        WeightManifestError,
    )
    from verl_server.rollout.launchers.local import LocalLauncher
    from verl_server.rollout.manager import RolloutManager
    from verl_server.router.client import RouterClient
    from verl_server.types import WeightUpdateResult

__version__ = "0.1.0"

__all__ = [
    "AdapterConfig",
    "AsyncHttpServerEngineAdapter",
    "BadInputError",
    "DeadlineError",
    "HttpServerEngineAdapter",
    "LocalLauncher",
    "MemoryTag",
    "NotReadyError",
    "PauseMode",
    "PeerError",
    "RecoveryConfig",
    "RemoteServer",
    "RolloutManager",
    "RolloutMode",
    "RouterClient",
    "RouterConfig",
    "ServerBusyError",
    "ServerDiedError",
    "ServerError",
    "ShutDownError",
    "StartupError",
    "Timeouts",
    "TornWeightsError",
    "UnsupportedError",
    "VerlEngine",
    "VerlServerError",
    "WeightManifestError",
    "WeightUpdateResult",
    "WeightsConfig",
]

_MODULES = {
    "AsyncHttpServerEngineAdapter": "verl_server.adapter",
    "HttpServerEngineAdapter": "verl_server.adapter",
    "LocalLauncher": "verl_server.rollout.launchers.local",
    "RolloutManager": "verl_server.rollout.manager",
    "RouterClient": "verl_server.router.client",
    "VerlEngine": "verl_server.engine.verl_engine",
    "WeightUpdateResult": "verl_server.types",
}
"""Module of each public name. Missing names: `verl_server.errors` if they end in `Error`, else `verl_server.config`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    default = "verl_server.errors" if name.endswith("Error") else "verl_server.config"
    return getattr(importlib.import_module(_MODULES.get(name, default)), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
