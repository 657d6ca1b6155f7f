"""The records of a gateway: the lock of their folder, and which of them have an open file."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar, Unpack

from verl_server.errors import ServerBusyError
from verl_server.gateway.errors import OPEN_FILE_ERRORS, ErrorKind, GatewayError
from verl_server.gateway.threads import call_in_thread
from verl_server.ranks.placement import boot_id
from verl_server.server.process import open_file_limit
from verl_server.trajectory.graph import Node, NodeFields
from verl_server.trajectory.recorder import Recorder, close_locked, open_locked, session_file
from verl_server.types import Json
from verl_server.validation import make_writable_folder

logger = logging.getLogger(__name__)


# -- Folder lock ------------------------------------------------------------------------------------
# The lock of the folder of the records: one gateway at a time serves a folder.
#
# The kernel's lock of a file keeps other gateways out, unless it is local to a machine: on NFS with `nolock` or
# `local_lock`, and on Lustre with `localflock`. So the file also says which gateway serves, and this gateway writes
# the file again every few seconds. A gateway on another machine sees the writes, and does not start. A gateway that
# finds another gateway in the file stops serving.

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


# -- Record files -----------------------------------------------------------------------------------
# A record is opened by its first request, appended to by its turns, and closed with its session. There may be more
# sessions than open files: the records that were used longest ago are closed meanwhile.

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


class RecordFiles:
    """The records that have an open file: those that were used last. Use it in one event loop."""

    def __init__(self) -> None:
        self._max_open = max(open_file_limit() // RECORD_SHARE, 1)
        self._open = dict[ObservedRecorder, None]()
        """The records with an open file. The record that was used longest ago comes first."""
        self._reserve = list[BinaryIO]()
        """Files that are closed when a file is needed and no record can be closed."""
        self.refill()

    @property
    def has_free(self) -> bool:
        """Whether the process has free files. Files of records are closed if it has none."""
        return self.refill() or (self._pause(NUM_PAUSED) and self.refill())

    def refill(self) -> bool:
        """Fill the reserve. Returns whether a file is free besides the reserve."""
        try:
            while len(self._reserve) <= NUM_RESERVED:
                self._reserve.append(open(os.devnull, "rb"))  # noqa: SIM115 - it is kept open
        except OSError:
            return False
        self._reserve.pop().close()
        return True

    def close(self) -> None:
        """Give the reserve back, after all records."""
        while self._reserve:
            self._reserve.pop().close()

    def use(self, record: ObservedRecorder) -> None:
        """Open the file of a record unless it is open. Raises OSError."""
        self._open.pop(record, None)
        if not record.is_open:
            self.opening(record.open_again)
        self._open[record] = None
        if len(self._open) > self._max_open:
            self._pause(len(self._open) - self._max_open, keep=record)

    def forget(self, record: ObservedRecorder) -> None:
        """Forget a record whose file was closed for good."""
        self._open.pop(record, None)

    def opening(self, open_file: Callable[[], Result]) -> Result:
        """Call a function that opens a file. Without a free file, it is called again after another file was closed.

        Raises the exceptions of the function.
        """
        for _ in range(MAX_ATTEMPTS):
            try:
                return open_file()
            except OSError as error:
                if not self._make_room(error):
                    raise
        return open_file()

    async def opening_aside(self, open_file: Callable[[], Result]) -> Result:
        """`opening`, whose function is called in a worker thread."""
        for _ in range(MAX_ATTEMPTS):
            try:
                return await call_in_thread(open_file)
            except OSError as error:
                if not self._make_room(error):
                    raise
        return await call_in_thread(open_file)

    def _make_room(self, error: OSError) -> bool:
        """Close files after an error of a function that has opened a file. Returns whether this can help.

        A record that takes a file of the reserve gives it back when the next file is needed.
        """
        if error.errno not in OPEN_FILE_ERRORS:
            return False
        if self._pause(NUM_PAUSED):
            return True
        if self._reserve:
            self._reserve.pop().close()
            return True
        return False

    def _pause(self, count: int, keep: ObservedRecorder | None = None) -> bool:
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


def close_on_disk(descriptor: int) -> None:
    """Close the file of a record, whose data reaches the disk before: closing holds up other threads."""
    for step in (os.fdatasync, close_locked):
        try:
            step(descriptor)
        except OSError:  # of a disk, or of a network file system, which may write data only when the file is closed
            logger.exception("the end of a record did not reach the disk")


class ObservedRecorder(Recorder):
    """A `Recorder` without `sync` that tells about the nodes that it adds.

    Its file is closed while other records need an open file (`RecordFiles`), and opened again by the next write. The
    lock of the folder keeps other gateways from the record meanwhile.
    """

    on_node: Callable[[Node], None] | None = None
    """Called with each added node."""

    _is_ready = False
    """Whether the record was read: `RecordFiles` knows it then."""

    def __init__(self, run_dir: Path, session_id: str, files: RecordFiles) -> None:
        """Raises the errors of `Recorder`."""
        self._path, self._files = session_file(run_dir, session_id), files
        self._is_paused = self._is_ending = False
        self._closing = threading.Lock()
        """Held while the file is flushed or closed."""
        read = super().__init__
        files.opening(lambda: read(run_dir, session_id, sync=False))
        self._is_ready = True
        files.use(self)

    @property
    def is_open(self) -> bool:
        """Whether the file is open."""
        return not self._is_paused

    def pause(self) -> None:
        """Close the file until it is needed again, unless the session ends. The record has failed if this fails."""
        if self._is_ending or self._fd < 0 or self.failure is not None:
            return
        self._is_paused, fd, self._fd = True, self._fd, -1
        try:
            close_locked(fd)
        except OSError as failure:  # a network file system may write data only now
            self.failure = failure

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Keep the file open and refuse new nodes while the end of the session is written. Raises OSError.

        A node behind the end of the session would belong to no trained path.
        """
        try:
            self._files.use(self)
        except OSError as failure:
            self.failure = failure  # the next end reads the file again
            raise
        self._is_ending = True
        try:
            yield
        finally:
            self._is_ending = False

    def open_again(self) -> None:
        """Open the file after `pause`. Raises OSError, also for a file that was changed meanwhile."""
        message = f"another process records the session {self.graph.session_id!r}"
        fd = open_locked(self._path, message, may_create=False)
        if os.fstat(fd).st_size != self._num_bytes:
            close_locked(fd)
            raise OSError(errno.EIO, "another program has changed the file of the record", str(self._path))
        os.lseek(fd, self._num_bytes, os.SEEK_SET)
        self._fd, self._is_paused = fd, False

    def add_node(self, parent: int | None, token_ids: Sequence[int], **fields: Unpack[NodeFields]) -> Node:
        """Add a node, write it, and tell about it. Raises GatewayError while the end of the session is written."""
        if self._is_ending:
            raise GatewayError(ErrorKind.OVERLOADED, "the session is being ended; send the request again")
        node = super().add_node(parent, token_ids, **fields)
        if self.on_node is not None:
            self.on_node(node)
        return node

    def _write(self, *lines: Json) -> None:
        if self._is_ready and self.failure is None:
            try:
                self._files.use(self)
            except Exception as failure:
                self.failure = failure  # the graph has what the file lacks
                raise
        super()._write(*lines)

    def flush(self) -> None:
        """Return when everything written so far is on disk. Use it within `ending`. Raises OSError."""
        with self._closing:
            super().flush()

    def close(self) -> None:
        """Close the file. Calling this a second time has no effect."""
        self._files.forget(self)
        with self._closing:
            self._is_paused = False
            super().close()

    def detach(self) -> int | None:
        """Write no more. Returns the descriptor of the file, which the caller closes. None if the file is closed."""
        self._files.forget(self)
        with self._closing:
            fd, self._fd, self._is_paused = self._fd, -1, False
        return fd if fd >= 0 else None
