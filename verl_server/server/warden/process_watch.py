"""Notice of the end of processes, with or without pidfds. Imports the standard library only: the warden uses it.

A pidfd becomes readable when its process ends. Some systems have none: a Python that was built for old kernels lacks
`os.pidfd_open`, and the seccomp profiles of some containers forbid the system call. Then `/proc/PID/stat` is read
several times a second.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable

#: Seconds between two looks at the processes that have no pidfd.
POLL_S = 0.1


def open_pidfd(pid: int) -> int | None:
    """A pidfd of the process. None where this system has none. Raises ProcessLookupError if the process has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None


def has_pidfds() -> bool:
    """Whether this Python, this kernel and this container let processes open pidfds."""
    pidfd = open_pidfd(os.getpid())
    if pidfd is None:
        return False
    os.close(pidfd)
    return True


def start_time(pid: int) -> bytes | None:
    """Start time of a process, which tells it from a later process with the same id. None when the process has ended.

    A process whose first thread has ended is a zombie, but it lives as long as it has other threads.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    state, num_threads = fields[0], int(fields[17])
    return None if state in (b"Z", b"X") and num_threads <= 1 else fields[19]


class ProcessWatch:
    """Reports the end of processes through a selector. `poll` must be called for processes without a pidfd."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._polled: dict[int, tuple[bytes, str]] = {}
        """Start time and end message of each process without a pidfd."""

    def add(self, pid: int, message: str) -> bool:
        """Report `message` when the process ends. Returns False when it has already ended.

        The selector's data of a pidfd is a function that returns the message.
        """
        try:
            pidfd = open_pidfd(pid)
        except ProcessLookupError:
            return False
        if pidfd is not None:
            report: Callable[[], str] = lambda: message  # noqa: E731 - typed, for the selector's data
            self._selector.register(pidfd, selectors.EVENT_READ, report)
            return True
        started = start_time(pid)
        if started is None:
            return False
        self._polled[pid] = (started, message)
        return True

    def poll(self) -> str | None:
        """The message of a process without a pidfd that has ended, or None."""
        for pid, (started, message) in self._polled.items():
            if start_time(pid) != started:
                return message
        return None

    def max_wait_s(self, timeout_s: float) -> float:
        """The seconds for which a caller that wants to wait `timeout_s` may wait until it calls `poll` again."""
        return min(timeout_s, POLL_S) if self._polled else timeout_s
