"""verl_server: a rollout engine for reinforcement-learning post-training.

    from verl_server import VerlEngine

Public names are imported on first use. `import verl_server` imports neither torch nor ray nor sglang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.lazy_exports import export_lazily

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
        InfrastructureError,
        NotReadyError,
        PeerError,
        ProgramError,
        ServerBusyError,
        ServerDiedError,
        ServerError,
        ShutDownError,
        StartupError,
        TornWeightsError,
        UnsupportedError,
        UserCodeError,
        VerlServerError,
        WeightManifestError,
    )
    from verl_server.rollout.launchers.local import LocalLauncher
    from verl_server.rollout.manager import RolloutManager
    from verl_server.router.client import RouterClient
    from verl_server.types import GenerateReply, WeightUpdateResult

__version__ = "0.1.0"

__all__ = [
    "AdapterConfig",
    "AsyncHttpServerEngineAdapter",
    "BadInputError",
    "DeadlineError",
    "GenerateReply",
    "HttpServerEngineAdapter",
    "InfrastructureError",
    "LocalLauncher",
    "MemoryTag",
    "NotReadyError",
    "PauseMode",
    "PeerError",
    "ProgramError",
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
    "UserCodeError",
    "VerlEngine",
    "VerlServerError",
    "WeightManifestError",
    "WeightUpdateResult",
    "WeightsConfig",
]

__getattr__, __dir__ = export_lazily(
    __name__,
    {
        "verl_server.adapter": (
            "AsyncHttpServerEngineAdapter",
            "HttpServerEngineAdapter",
        ),
        "verl_server.config": (
            "AdapterConfig",
            "MemoryTag",
            "PauseMode",
            "RecoveryConfig",
            "RemoteServer",
            "RolloutMode",
            "RouterConfig",
            "Timeouts",
            "WeightsConfig",
        ),
        "verl_server.engine.verl_engine": ("VerlEngine",),
        "verl_server.errors": (
            "BadInputError",
            "DeadlineError",
            "InfrastructureError",
            "NotReadyError",
            "PeerError",
            "ProgramError",
            "ServerBusyError",
            "ServerDiedError",
            "ServerError",
            "ShutDownError",
            "StartupError",
            "TornWeightsError",
            "UnsupportedError",
            "UserCodeError",
            "VerlServerError",
            "WeightManifestError",
        ),
        "verl_server.rollout.launchers.local": ("LocalLauncher",),
        "verl_server.rollout.manager": ("RolloutManager",),
        "verl_server.router.client": ("RouterClient",),
        "verl_server.types": ("GenerateReply", "WeightUpdateResult"),
    },
)
