"""The limits of open files and of threads. Each request in flight has a connection, which is an open file."""

from __future__ import annotations

import contextlib
import resource
import threading

from verl_server.errors import UnsupportedError

WANTED_OPEN_FILES = 65536
"""Number of open files that suffices for any client or router. SGLang raises the limit of its servers to the same
number."""


def raise_open_file_limit() -> None:
    """Raise the limit of this process towards WANTED_OPEN_FILES, as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # the system's own limit is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_file_limit() -> int:
    """Maximum number of open files of this process, at most WANTED_OPEN_FILES."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED_OPEN_FILES if soft == resource.RLIM_INFINITY else min(soft, WANTED_OPEN_FILES)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises UnsupportedError where the limit of processes and threads is reached."""
    try:
        thread.start()
    except RuntimeError as error:
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        raise UnsupportedError(
            f"{error}: this user (ulimit -u: {limit}) or container has reached its limit of processes and threads, or "
            "its memory is used up. Raise ulimit -u, and in a container its limit (docker run --pids-limit)"
        ) from error
