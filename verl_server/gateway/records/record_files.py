"""`RecordFiles`: which records of a gateway have an open file, and what happens when the process has no free file."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

from verl_server.gateway.errors import OPEN_FILE_ERRORS, ErrorKind, GatewayError
from verl_server.gateway.worker_threads import call_in_thread, run_aside
from verl_server.server.open_files import open_file_limit
from verl_server.trajectory.locked_files import close_locked

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

RECORD_SHARE = 4
"""The limit of open files, divided by this number, is the maximum number of records with an open file. The other files
are those of connections."""
NUM_PAUSED = 8
"""Number of records whose files are closed when the process has no free file."""
NUM_RESERVED = 4
"""Number of files that are kept free, so that sessions can be ended."""
MAX_ATTEMPTS = 4
"""Maximum number of attempts to open a file. A new connection may take a file that was given back."""
TOO_MANY_FILES = "the gateway has too many open files; close connections, or start it with a higher limit (ulimit -Hn)"


class PausableFile(Protocol):
    """A file that is opened again when it is needed."""

    @property
    def is_open(self) -> bool:
        """Whether the file is open."""

    def open_again(self) -> None:
        """Open the file after `pause`. Raises OSError."""

    def pause(self) -> None:
        """Close the file, unless it is needed now."""


class RecordFiles:
    """The records that have an open file: those that were used last. Use it in one event loop."""

    def __init__(self) -> None:
        self._max_open = max(open_file_limit() // RECORD_SHARE, 1)
        self._open = dict[PausableFile, None]()
        """The records with an open file. The record that was used longest ago comes first."""
        self._reserve = list[int]()
        """Descriptors that are closed when a file is needed and no other is free."""
        self._give_back_reserve = weakref.finalize(self, _close_all, self._reserve)
        self._closing = set[int]()
        """Descriptors of records that are used no more and are not closed."""
        self.refill()

    @property
    def has_free(self) -> bool:
        """Whether the process has free files. Files of records are closed if it has none."""
        return self.refill() or (self._pause(NUM_PAUSED) and self.refill())

    def require_free(self, purpose: str) -> None:
        """Raise GatewayError if the process has no free files. `purpose`: the beginning of its message."""
        if not self.has_free:
            raise GatewayError(ErrorKind.OVERLOADED, f"{purpose}: {TOO_MANY_FILES}")

    def refill(self) -> bool:
        """Fill the reserve. Returns whether a file is free besides the reserve."""
        if not self._give_back_reserve.alive:  # after `close`
            return False
        try:
            while len(self._reserve) <= NUM_RESERVED:
                self._reserve.append(_open_null())
        except OSError:
            return False
        os.close(self._reserve.pop())
        return True

    def use(self, record: PausableFile) -> None:
        """Open the file of a record unless it is open. Raises OSError."""
        self._open.pop(record, None)
        if not record.is_open:
            self.opening(record.open_again)
        self._open[record] = None
        if len(self._open) > self._max_open:
            self._pause(len(self._open) - self._max_open, keep=record)

    def forget(self, record: PausableFile) -> None:
        """Forget a record whose file was closed for good."""
        self._open.pop(record, None)

    @property
    def num_closing(self) -> int:
        """Number of records that are used no more and are not closed."""
        return len(self._closing)

    def close_later(self, descriptor: int) -> None:
        """Close the file of a record in `close_waiting`: a network file system may write all its data then."""
        self._closing.add(descriptor)

    async def close_waiting(self) -> None:
        """Close the files of `close_later`, in worker threads."""
        await asyncio.gather(*(self._close(descriptor) for descriptor in self._closing))

    async def _close(self, descriptor: int) -> None:
        try:
            await run_aside(False, _close_locked, descriptor)
        finally:
            self._closing.discard(descriptor)

    def close(self) -> None:
        """Close the reserve, after all records."""
        self._give_back_reserve()

    def opening(self, open_file: Callable[[], Result], *, may_use_reserve: bool = False) -> Result:
        """Call a function that opens a file. Without a free file, it is called again after another file was closed.

        `may_use_reserve`: for the end of a session. Raises the exceptions of the function.
        """
        for _ in range(MAX_ATTEMPTS):
            try:
                return open_file()
            except OSError as error:
                if not self._make_room(error, may_use_reserve=may_use_reserve):
                    raise
        return open_file()

    async def opening_aside(self, open_file: Callable[[], Result], *, may_use_reserve: bool = False) -> Result:
        """`opening`, whose function is called in a worker thread."""
        for _ in range(MAX_ATTEMPTS):
            try:
                return await call_in_thread(open_file)
            except OSError as error:
                if not self._make_room(error, may_use_reserve=may_use_reserve):
                    raise
        return await call_in_thread(open_file)

    def _make_room(self, error: OSError, *, may_use_reserve: bool) -> bool:
        """Close files after an error of a function that has opened a file. Returns whether this can help."""
        if error.errno not in OPEN_FILE_ERRORS:
            return False
        if self._pause(NUM_PAUSED):
            return True
        if may_use_reserve and self._reserve:
            os.close(self._reserve.pop())
            return True
        return False

    def _pause(self, count: int, keep: PausableFile | None = None) -> bool:
        """Close the files of the records that were used longest ago. Returns whether a file was closed.

        `keep`: the record that is used now.
        """
        num_open = len(self._open)
        for record in list(self._open):
            if len(self._open) <= num_open - count:
                break
            if record is not keep:
                record.pause()
            if not record.is_open:
                del self._open[record]
        return len(self._open) < num_open


def _close_locked(descriptor: int) -> None:
    """Close the file of a record, whose data reaches the disk before: closing holds up other threads."""
    for step in (os.fdatasync, close_locked):
        try:
            step(descriptor)
        except OSError:  # of a disk, or of a network file system, which may write data only when the file is closed
            logger.exception("the end of a record did not reach the disk")


def _open_null() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
