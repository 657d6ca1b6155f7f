"""A paused scheduler sleeps instead of using a whole core.

With `sleep_on_idle` SGLang's event loop sleeps when it is idle, but not while generation is paused. It then polls its
sockets in a loop, at the time when a trainer needs the cores for a weight update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def ingest_requests(original: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """Sleep before `Scheduler.ingest_requests` while generation is paused: until a message arrives, at most one second.

    SGLang itself polls its sockets in a loop then, which uses a whole core.
    """
    if scheduler._engine_paused:
        scheduler.maybe_sleep_on_idle()
    return original(scheduler, *args, **options)
