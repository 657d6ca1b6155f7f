"""Fleets on a Ray cluster: `RayLauncher` starts the servers of a fleet as Ray actors, `discover` finds them by name.

Requires the package `ray`: `pip install 'verl-server[ray]'`. Without it, the first use of a name raises
UnsupportedError. Importing this module does not import ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_server.rollout.launchers.ray_launcher import RayLauncher, discover

__all__ = ["RayLauncher", "discover"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("verl_server.rollout.launchers.ray_launcher"), name)
