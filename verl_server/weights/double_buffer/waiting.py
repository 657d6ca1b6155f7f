"""Waiting for the other processes of a double buffer, with a deadline and checks that they are alive."""

from __future__ import annotations

import time
from collections.abc import Callable

from verl_server.errors import DeadlineError, VerlServerError
from verl_server.weights.double_buffer.progress import ProgressCounters

POLL_INTERVAL_S = 0.0002


def wait_for_progress(
    is_ready: Callable[[], bool],
    progress: ProgressCounters,
    require_peers: Callable[[], None],
    deadline: float,
    timeout_message: str,
) -> None:
    """Poll until `is_ready()` is true.

    `require_peers` raises when the other processes are gone. `deadline` is a time of `time.monotonic`. Raises
    VerlServerError with the failure that another process recorded, and DeadlineError with `timeout_message`.
    """
    while not is_ready():
        if (failure := progress.failure) is not None:
            raise VerlServerError(failure)
        require_peers()
        if time.monotonic() > deadline:
            raise DeadlineError(timeout_message, operation="buckets")
        time.sleep(POLL_INTERVAL_S)
