"""`ObservedRecorder`: a `Recorder` that tells about the nodes that it adds, and whose file may be closed meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Unpack

from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.records.record_files import RecordFiles
from verl_server.trajectory.locked_files import close_locked, open_locked
from verl_server.trajectory.nodes import Node, NodeFields
from verl_server.trajectory.recorder import Recorder, session_file
from verl_server.types import Json


class ObservedRecorder(Recorder):
    """A `Recorder` without `sync` that tells about the nodes that it adds.

    Its file is closed while other records need an open file (`RecordFiles`), and opened again by the next write. The
    lock of the folder keeps other gateways from the record meanwhile.
    """

    on_node: Callable[[Node], None] | None = None
    """Called with each added node."""

    _is_ready = False
    """Whether the record was read: `RecordFiles` knows it then."""

    def __init__(self, run_dir: Path, session_id: str, files: RecordFiles, *, may_use_reserve: bool = False) -> None:
        """`may_use_reserve`: for the end of a session. Raises the errors of `Recorder`."""
        self._path, self._files = session_file(run_dir, session_id), files
        self._is_paused = self._is_ending = False
        self._closing = threading.Lock()
        """Held while the file is flushed or closed."""
        read = super().__init__
        files.opening(lambda: read(run_dir, session_id, sync=False), may_use_reserve=may_use_reserve)
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
        if self._is_paused:
            try:
                self._files.opening(self.open_again, may_use_reserve=True)
            except OSError as failure:
                self.failure = failure  # the next end reads the file again
                raise
        self._files.use(self)
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

    def close_later(self) -> None:
        """Close the file in `RecordFiles.close_waiting`."""
        self._files.forget(self)
        with self._closing:
            if self._fd >= 0:
                self._files.close_later(self._fd)
            self._fd, self._is_paused = -1, False
