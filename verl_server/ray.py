"""Fleets on a Ray cluster: `RayLauncher` starts the servers of a fleet as Ray actors, `discover` finds them by name.

Requires the package `ray`: `pip install 'verl-server[ray]'`. Without it, the first use of a name raises
UnsupportedError. Importing this module does not import ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_server.lazy_exports import export_lazily

if TYPE_CHECKING:
    from verl_server.rollout.launchers.ray_launcher import RayLauncher, discover

__all__ = ["RayLauncher", "discover"]


__getattr__, __dir__ = export_lazily(
    __name__,
    {
        "verl_server.rollout.launchers.ray_launcher": (
            "RayLauncher",
            "discover",
        ),
    },
)
