"""Registers this plugin with verl. verl imports this module in every process that imports verl.

verl hides exceptions of plugins (`verl/__init__.py`). So every failure is logged as an error, and is raised by the
first use of the rollout `verl_server`. A run with another rollout is not affected.
"""

from __future__ import annotations

import logging
from typing import Any

from verl_server.errors import UnsupportedError

logger = logging.getLogger(__name__)

ROLLOUT = "verl_server"
"""Value of `actor_rollout_ref.rollout.name`."""
ADAPTER = "verl_server.integrations.verl.verl_classes.ServerAdapter"


def register() -> None:
    """Register the rollout, the checkpoint engine and the platform. May be called again."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(ROLLOUT, load_replica_class)
    try:
        from verl_server.integrations.verl.settings import require_supported_version

        require_supported_version()
        _register_all()
    except Exception as error:
        failures.append(error)
        logger.exception("the rollout %r of verl cannot be used", ROLLOUT)


failures: list[Exception] = []
"""Why the plugin cannot be used. Empty if it can be."""


def load_replica_class() -> type[Any]:
    """verl's class of replicas. Raises UnsupportedError if the registration has failed."""
    if failures:
        raise UnsupportedError(f"the rollout {ROLLOUT!r} cannot be used: {failures[0]}") from failures[0]
    from verl_server.integrations.verl.verl_classes import Replica

    return Replica


def _register_all() -> None:
    from verl.workers.rollout import base

    from verl_server.cpu import verl_platform
    from verl_server.integrations.verl import verl_classes

    base._ROLLOUT_REGISTRY[ROLLOUT, "async"] = ADAPTER  # verl has no public function for it
    verl_platform.register()
    verl_classes.register()


register()
