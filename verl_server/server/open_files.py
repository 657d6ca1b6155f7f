"""The limit of open files of this process. Each request in flight has a connection, which is an open file."""

from __future__ import annotations

import contextlib
import resource

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
