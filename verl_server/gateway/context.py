"""What the tasks of a request know about it."""

from __future__ import annotations

from contextvars import ContextVar

ARRIVED_AT: ContextVar[float | None] = ContextVar("verl_gateway_arrived_at", default=None)
"""Time at which the request arrived (`time.monotonic`). A generation is a task that its first request has started."""
