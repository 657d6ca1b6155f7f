"""A paused scheduler must not burn a core.

With `sleep_on_idle` SGLang's event loop sleeps when it has nothing to do, but not while generation is
paused: then it polls its sockets without a break, exactly when a trainer wants the cores to push weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def ingest_requests(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """AROUND `Scheduler.ingest_requests`: wait for a message (at most a second) while paused."""
    if scheduler._engine_paused:
        scheduler.maybe_sleep_on_idle()
    return original(scheduler, *args, **options)
