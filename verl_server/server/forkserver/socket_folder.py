"""A folder of sockets through which several processes of a user share forkservers.

`VERL_SERVER_FORKSERVER_DIR` names the folder. A forkserver listens at a socket whose name is a hash of everything that
its servers inherit. A process that needs the same forkserver connects to it instead of importing SGLang again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from verl_server.errors import BadInputError

FOLDER_VARIABLE = "VERL_SERVER_FORKSERVER_DIR"
BACKLOG = 64
#: Seconds to wait for the kernel's part of a connection, and for another process that looks for the same forkserver.
CONNECT_TIMEOUT_S = 5.0
LOCK_TIMEOUT_S = 10.0
LOCK_POLL_S = 0.02


def shares_forkservers() -> bool:
    """Whether this process shares forkservers with other processes of the user."""
    return bool(os.environ.get(FOLDER_VARIABLE))


def socket_path(name: str) -> Path | None:
    """Path of the socket `name` in the folder of `VERL_SERVER_FORKSERVER_DIR`. None when the variable is not set.

    Raises BadInputError for a folder that another user can enter: that user could answer in place of the forkserver.
    """
    value = os.environ.get(FOLDER_VARIABLE)
    if not value:
        return None
    folder = Path(value)
    try:
        status = folder.stat()
    except OSError as error:
        raise BadInputError(f"{FOLDER_VARIABLE}={value}: {error.strerror}; create the folder first") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BadInputError(f"{FOLDER_VARIABLE}={value} must be a folder of this user with the mode 0700")
    return folder / name


def connect(path: Path) -> socket.socket | None:
    """A connection to the forkserver that listens at `path`, or None when there is none.

    Raises OSError for any other failure, for example when too many connections wait until the forkserver is ready.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(CONNECT_TIMEOUT_S)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def listen(path: Path) -> socket.socket:
    """A socket that listens at `path`. Replaces the socket of a forkserver that has ended. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Let one process at a time look for the forkserver at `path` and start it. Raises OSError after a timeout."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.with_suffix(".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOCK_POLL_S)
        yield
