"""Many servers that behave as one: replicas, the router in front of them, their manager, recovery."""

from verl_server.rollout.manager import RolloutManager

__all__ = ["RolloutManager"]
