"""verl_server: the rollout engine for RL post-training.

    from verl_server import VerlEngine

Importing this package imports neither torch nor ray nor sglang; they come with the first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_server.adapter import AsyncHttpServerEngineAdapter, HttpServerEngineAdapter
    from verl_server.config import AdapterConfig, MemoryTag, PauseMode, RemoteServer, Timeouts, WeightsConfig
    from verl_server.engine.verl_engine import VerlEngine

__version__ = "0.1.0"

__all__ = [
    "AdapterConfig",
    "AsyncHttpServerEngineAdapter",
    "HttpServerEngineAdapter",
    "MemoryTag",
    "PauseMode",
    "RemoteServer",
    "Timeouts",
    "VerlEngine",
    "WeightsConfig",
]

_HOME = {
    "AdapterConfig": "verl_server.config",
    "MemoryTag": "verl_server.config",
    "PauseMode": "verl_server.config",
    "RemoteServer": "verl_server.config",
    "WeightsConfig": "verl_server.config",
    "Timeouts": "verl_server.config",
    "AsyncHttpServerEngineAdapter": "verl_server.adapter",
    "HttpServerEngineAdapter": "verl_server.adapter",
    "VerlEngine": "verl_server.engine.verl_engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
