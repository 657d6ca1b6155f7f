"""Ends verl's task runner when the servers of a fleet are lost for ever.

The asynchronous trainers of verl replace failed requests by new ones, without an end and without a pause
(`ReplayBufferAsync`). So a run whose servers cannot be started any more would never end.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any

from ray.exceptions import ActorDiedError

from verl_server.rollout.launchers.ray_server import first_line

logger = logging.getLogger(__name__)

WAIT_S = 30.0
"""Seconds that one call waits in the actor."""
SILENT_S = 1800.0
"""Seconds without an answer of the actor, after which the fleet counts as lost."""
GRACE_S = 10.0
"""Seconds after the end of the actor: at the end of a job, Ray ends this process, too."""

_watched: set[Any] = set()
"""Ids of the actors that are watched."""
_lock = threading.Lock()


def watch(actor: Any, name: str) -> None:
    """Watch the fleet `name` in a thread of this process. Does nothing if it is watched already."""
    with _lock:
        if actor._actor_id in _watched:
            return
        _watched.add(actor._actor_id)
    threading.Thread(target=_watch, args=(actor, name), name=f"verl-server-watch-{name}", daemon=True).start()


def _watch(actor: Any, name: str) -> None:
    answered_at = time.monotonic()
    while True:
        try:
            reason = actor.wait_for_loss.remote(WAIT_S).future().result(2 * WAIT_S)
            answered_at = time.monotonic()
        except ActorDiedError as error:
            time.sleep(GRACE_S)
            reason = f"its actor has ended: {first_line(error)}"
        except Exception as error:  # noqa: BLE001 - Ray may only be busy
            silent_s = time.monotonic() - answered_at
            logger.warning("the actor of the fleet %s has not answered for %.0f s: %r", name, silent_s, error)
            if silent_s < SILENT_S:
                time.sleep(WAIT_S)
                continue
            reason = f"its actor has not answered for {silent_s:.0f} s"
        if reason is not None:
            _end(f"verl_server: the run cannot go on, because the fleet {name} is lost: {reason}")


def _end(message: str) -> None:
    """End this process. An exception of a thread would not end it."""
    logger.critical(message)
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    os._exit(1)
