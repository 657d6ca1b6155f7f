"""The lock of the folder of the records: one gateway at a time serves a folder.

The kernel's lock of a file keeps other gateways out, unless it is local to a machine: on NFS with `nolock` or
`local_lock`, and on Lustre with `localflock`. So the file also says which gateway serves, and this gateway writes the
file again every few seconds. A gateway on another machine sees the writes, and does not start. A gateway that finds
another gateway in the file stops serving.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from pathlib import Path

from verl_server.errors import ServerBusyError
from verl_server.ranks.machine import boot_id
from verl_server.trajectory.locked_files import close_locked, open_locked
from verl_server.validation import make_writable_folder

logger = logging.getLogger(__name__)

LOCK_FILE = ".gateway.lock"
"""File in the folder of the records that a running gateway holds locked. It says which gateway serves."""
REFRESH_S = 5.0
"""Seconds between two writes of the file."""
RECENT_S = 60.0
"""Seconds after the last write in which a gateway on another machine may still run."""
WATCH_S = 12.0
"""Seconds for which the file is watched before another machine's gateway counts as ended."""
WATCH_INTERVAL_S = 0.5
"""Seconds between two reads of the file that is watched."""
NUM_BYTES = 1024
"""Size of the text in the file, with spaces at its end: a text of constant size is replaced by one write."""


@dataclasses.dataclass(frozen=True)
class FolderOwner:
    """The gateway that serves a folder."""

    url: str
    process: int
    """Id of the process."""
    host: str
    """Name of the machine or of the container."""
    machine: str
    """Id of the running kernel: processes with the same kernel exclude each other by locks."""
    token: str
    """Random text of this gateway."""

    def __str__(self) -> str:
        return f"{self.url}, process {self.process} on the host {self.host}"


class FolderLock:
    """The lock of a folder. `refresh` must be called every `REFRESH_S` seconds."""

    def __init__(self, run_dir: Path, url: str) -> None:
        """Lock the folder for the gateway at `url`.

        Raises ServerBusyError if another gateway serves the folder, BadInputError if the folder takes no files, and
        UnsupportedError if its file system has no locks. A folder that a gateway of another machine served a short time
        ago, and has not released, is watched for `WATCH_S` seconds.
        """
        with contextlib.suppress(OSError):  # the next line raises the error
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = make_writable_folder("run_dir", run_dir)
        self._path = self._folder / LOCK_FILE
        self._owner = FolderOwner(url, os.getpid(), socket.gethostname(), boot_id(), secrets.token_hex(16))
        self._num_writes, self._is_lost = 0, False
        self._changes = threading.Lock()
        """Held while the file is written or closed."""
        found = self._read()[0]
        self._fd: int | None = open_locked(self._path, self._busy(found))
        try:
            if found is not None and found.machine != self._owner.machine and self._is_recent():
                self._require_no_writes(found)
        except BaseException:
            close_locked(self._fd)
            raise
        self._write()

    def refresh(self) -> FolderOwner | None:
        """Write the file again. Returns the other gateway that serves the folder now, if there is one.

        It may be called in a thread: a file system that hangs holds up the call.
        """
        found, _ = self._read()
        if found is not None and found.token != self._owner.token:
            self._is_lost = True
            return found
        self._write()
        return None

    def require_own(self) -> None:
        """`refresh`. Raises ServerBusyError if another gateway serves the folder now."""
        if (owner := self.refresh()) is not None:
            raise ServerBusyError(self._busy(owner))

    def release(self) -> None:
        """Give up the lock. Calling this a second time has no effect."""
        with self._changes:
            if self._fd is None:
                return
            found, _ = self._read()
            if not self._is_lost and (found is None or found.token == self._owner.token):
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)  # the next gateway does not watch the file
            close_locked(self._fd)
            self._fd = None

    def _write(self) -> None:
        """Write who serves. On a full disk, the file stays empty, and only the lock keeps other gateways out."""
        with self._changes, contextlib.suppress(OSError):
            if self._fd is None:
                return
            self._num_writes += 1
            text = json.dumps({**dataclasses.asdict(self._owner), "writes": self._num_writes})
            os.pwrite(self._fd, text.encode().ljust(NUM_BYTES), 0)
            os.fsync(self._fd)  # other machines do not see what is not on the server of the file system

    def _read(self) -> tuple[FolderOwner | None, str]:
        """The gateway in the file, and the text of the file. The file is opened: an open file may show an old text."""
        try:
            text = self._path.read_text()
            fields = json.loads(text)
            return FolderOwner(**{field.name: fields[field.name] for field in dataclasses.fields(FolderOwner)}), text
        except (OSError, ValueError, TypeError, KeyError):
            return None, ""

    def _is_recent(self) -> bool:
        """Whether the file was written a short time ago, by the clock of the file system."""
        with tempfile.TemporaryFile(dir=self._folder) as probe:
            return os.fstat(probe.fileno()).st_mtime - self._path.stat().st_mtime < RECENT_S

    def _require_no_writes(self, owner: FolderOwner) -> None:
        """Raise ServerBusyError if the gateway of another machine writes the file."""
        message = "%s was served by %s; waiting %g s to see whether this gateway still runs"
        logger.warning(message, self._folder, owner, WATCH_S)
        text, deadline = self._read()[1], time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            time.sleep(WATCH_INTERVAL_S)
            now = self._read()[1]
            if now and now != text:
                raise ServerBusyError(self._busy(owner))

    def _busy(self, owner: FolderOwner | None) -> str:
        return (
            f"another gateway serves the folder {self._folder}: {owner or 'it is starting'}; "
            "use that gateway, or pass another folder"
        )
