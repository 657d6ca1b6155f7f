"""Writing to a pipe whose reader may hang."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import IO

POLL_MS = 100


def write_all(pipe: IO[bytes], data: bytes, timeout_s: float) -> None:
    """Write `data`, which may be longer than the buffer of the pipe.

    Raises BrokenPipeError when the reader has ended, and TimeoutError when it has not read everything after
    `timeout_s` seconds.
    """
    fd, rest = pipe.fileno(), memoryview(data)
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    os.set_blocking(fd, False)
    try:
        while rest:
            poll.poll(POLL_MS)
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(fd, rest) :]
            if rest and time.monotonic() > deadline:
                raise TimeoutError(f"{len(rest)} of {len(data)} bytes were not read within {timeout_s:g} s")
    finally:
        os.set_blocking(fd, True)
