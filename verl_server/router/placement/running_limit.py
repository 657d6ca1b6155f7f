"""`RunningLimit`: how many requests of a router run, and whether another one may start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

OPEN_FILES_RETRY_S = 10.0
"""Seconds after which a limit of running requests is raised that a lack of open files has set."""


class RunningLimit:
    """The number of running requests on all replicas together, with a limit while open files lack or requests wait."""

    def __init__(self, has_waiting: Callable[[], bool], serve: Callable[[], None]) -> None:
        """`has_waiting`: whether requests wait. `serve`: places them; it is called after the limit has risen."""
        self._has_waiting, self._serve = has_waiting, serve
        self._maximum: int | None = None
        """Maximum number of running requests. None: no limit."""
        self.running = 0
        """Number of running requests."""
        self.is_held = False
        """Whether no further request may start."""

    @property
    def is_limited(self) -> bool:
        """Whether the end of any request may let another one start."""
        return self._maximum is not None

    @property
    def is_reached(self) -> bool:
        """Whether a further request has to wait."""
        return self.is_held or (self._maximum is not None and self.running >= self._maximum)

    def lower(self, maximum: int) -> None:
        """Run at most `maximum` requests, because this process cannot open more connections.

        Every `OPEN_FILES_RETRY_S` seconds the limit is raised by an eighth, because files may have been closed
        meanwhile, and it is lifted when no request waits.
        """
        if self._maximum is not None and maximum >= self._maximum:
            return
        if self._maximum is None:
            asyncio.get_running_loop().call_later(OPEN_FILES_RETRY_S, self._raise)
        self._maximum = maximum
        logger.warning(
            "this process cannot open more files, so it runs at most %d requests at the same time; raise the limit of "
            "open files (ulimit -n) before it starts",
            maximum,
        )

    def _raise(self) -> None:
        """Run a few requests more, to see whether files were closed. No limit when no request waits."""
        if not self._has_waiting() or self._maximum is None:
            self._maximum = None
            return
        self._maximum += max(1, self._maximum // 8)
        asyncio.get_running_loop().call_later(OPEN_FILES_RETRY_S, self._raise)
        self._serve()
