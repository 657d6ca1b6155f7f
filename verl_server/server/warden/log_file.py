"""A log file of bounded size that hides keys. Imports the standard library only: the warden uses it."""

from __future__ import annotations

import collections
import contextlib
import json
import os
from typing import BinaryIO

TAIL_BYTES = 32 * 1024
#: Minimum number of characters of a key. Hiding a shorter key would also hide parts of ordinary words in the log.
MIN_SECRET_CHARACTERS = 8


class BoundedLog:
    """A log file of at most about twice `limit_bytes` (with its predecessor `PATH.1`), and its last lines in memory.

    Every occurrence of a string of `secrets` with at least `MIN_SECRET_CHARACTERS` characters is written as `***`, also
    as Python or JSON print it: with escaped backslashes and quotes.
    A file that was moved or removed is created again. Lines that cannot be written, for example because the disk is
    full or the folder was removed, are kept in memory only. The constructor raises OSError if it cannot open the file.
    """

    def __init__(self, path: str, limit_bytes: int, secrets: list[str]) -> None:
        self._path, self._limit_bytes = path, limit_bytes
        self._secrets = _written_forms(secrets)
        self._partial_line = b""
        self._file: BinaryIO | None = self._open()
        """None while the file cannot be opened."""
        self._tail: collections.deque[bytes] = collections.deque()
        self._tail_bytes = 0

    def _open(self) -> BinaryIO:
        return open(self._path, "ab", buffering=0)

    def write(self, chunk: bytes) -> None:
        """Append output. Only whole lines are written, because SGLang logs its arguments, API keys included."""
        lines, newline, self._partial_line = (self._partial_line + chunk).rpartition(b"\n")
        if len(self._partial_line) > TAIL_BYTES:
            lines, newline, self._partial_line = lines + newline + self._partial_line, b"", b""
        self._write_lines(lines + newline)

    def _write_lines(self, lines: bytes) -> None:
        for secret in self._secrets:
            lines = lines.replace(secret, b"***")
        self._tail.append(lines)
        self._tail_bytes += len(lines)
        while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        with contextlib.suppress(OSError):  # a full disk must not end the server
            self._current_file().write(lines)

    def _current_file(self) -> BinaryIO:
        """The file at the path, opened again when the open file is not there any more or has its full size."""
        if self._file is not None:
            status = os.fstat(self._file.fileno())
            if not self._is_at_path(status):
                self._close_file()
            elif status.st_size > self._limit_bytes:
                os.replace(self._path, self._path + ".1")
                self._close_file()
        if self._file is None:
            self._file = self._open()
        return self._file

    def _is_at_path(self, status: os.stat_result) -> bool:
        try:
            return os.path.samestat(status, os.stat(self._path))
        except OSError:
            return False

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def tail(self) -> str:
        """The last `TAIL_BYTES` of the log."""
        return b"".join(self._tail)[-TAIL_BYTES:].decode("utf-8", "replace")

    def close(self) -> None:
        self._write_lines(self._partial_line)
        self._partial_line = b""
        self._close_file()


def _written_forms(secrets: list[str]) -> list[bytes]:
    """The secrets as texts show them, longest first: another form may be a part of it."""
    long = [secret for secret in secrets if len(secret) >= MIN_SECRET_CHARACTERS]
    forms = {form for secret in long for form in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1])}
    forms |= {repr(form)[1:-1] for form in forms}  # the arguments within a text that is printed itself
    return sorted((form.encode("utf-8", "replace") for form in forms), key=len, reverse=True)
