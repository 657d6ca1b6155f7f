"""Many servers that behave as one: replicas, the router in front of them, their manager, recovery.

The manager brings torch with it; the router, which is in this package, too, must not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_server.rollout.manager import RolloutManager

__all__ = ["RolloutManager"]


def __getattr__(name: str) -> Any:
    if name != "RolloutManager":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl_server.rollout.manager import RolloutManager

    return RolloutManager
