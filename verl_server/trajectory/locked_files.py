"""Files that one process at a time may write."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from verl_server.errors import ServerBusyError, UnsupportedError

NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
"""Numbers of the errors of `flock` on a file system without locks."""
_LOCKED: set[int] = set()
"""Descriptors of the files that this process has locked, and their duplicates."""
_CHANGES = threading.RLock()
"""Held while `_LOCKED` and the open descriptors differ, and by a thread that forks: a fork waits for the change."""


@functools.cache
def _null() -> int:
    """A descriptor of /dev/null. It is opened before the first lock: a forked process may have no free descriptor."""
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _leave_locks() -> None:
    """Give up the locks of the parent in a forked process, for example in a pool of processes for rewards.

    A lock belongs to all processes that have inherited it. The numbers of the descriptors stay in use: objects of the
    parent, which the forked process has too, may still close them.
    """
    try:
        for fd in _LOCKED:
            os.dup2(_null(), fd, inheritable=False)
    finally:
        _LOCKED.clear()
        _CHANGES.release()


os.register_at_fork(before=_CHANGES.acquire, after_in_parent=_CHANGES.release, after_in_child=_leave_locks)


def close_locked(fd: int) -> None:
    """Close a file that `open_locked` has opened, and give up its lock.

    `subprocess` forks without the functions of `os.register_at_fork`: until it executes the command, the new process
    has the descriptor too, and the lock would outlive the close.
    """
    with _CHANGES:
        _LOCKED.discard(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)


def open_locked(path: Path, busy: str, *, may_create: bool = True) -> int:
    """Open a file that one process at a time may write, or create it. Returns its descriptor, which holds the lock.

    Raises ServerBusyError with the message `busy` if the file is open elsewhere, UnsupportedError if the file system
    has no locks, and OSError, with `may_create` False also for a file that does not exist, and for a symbolic link:
    what it points to may be anybody's file, and its content would be cut off as a record that was not finished.
    """
    with _CHANGES:
        _null()
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if may_create else 0), 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ServerBusyError(busy) from None
        except OSError as error:
            os.close(fd)
            if error.errno in NO_LOCKS:
                raise UnsupportedError(
                    f"the file system of the folder {path.parent} has no locks of files (flock: {error.strerror}); "
                    "mount it with locks (Lustre: with flock; NFS: without nolock), or use another folder"
                ) from error
            raise
        except BaseException:
            os.close(fd)
            raise
        _LOCKED.add(fd)
        return fd


@contextlib.contextmanager
def duplicate_locked(fd: int) -> Iterator[int]:
    """A duplicate of a descriptor of `open_locked`, which another thread may close in the block. Raises OSError.

    The end of the block closes the duplicate. A process that is forked in the block gives up the lock of both.
    """
    with _CHANGES:
        duplicate = os.dup(fd)
        _LOCKED.add(duplicate)
    try:
        yield duplicate
    finally:
        with _CHANGES:
            _LOCKED.discard(duplicate)
            os.close(duplicate)


def read_all(fd: int) -> bytes:
    """The content of an open file, from its present position."""
    parts = []
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    return b"".join(parts)
