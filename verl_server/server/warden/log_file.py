"""A log file of bounded size that hides keys. Imports the standard library only: the warden uses it."""

from __future__ import annotations

import collections
import contextlib
import os

TAIL_BYTES = 32 * 1024
#: Minimum number of characters of a key. Hiding a shorter key would also hide parts of ordinary words in the log.
MIN_SECRET_CHARACTERS = 8


class BoundedLog:
    """A log file of at most about twice `limit_bytes` (with its predecessor `PATH.1`), and its last lines in memory.

    Every occurrence of a string of `secrets` with at least `MIN_SECRET_CHARACTERS` characters is written as `***`.
    """

    def __init__(self, path: str, limit_bytes: int, secrets: list[str]) -> None:
        self._path, self._limit_bytes = path, limit_bytes
        self._secrets = [secret.encode() for secret in secrets if len(secret) >= MIN_SECRET_CHARACTERS]
        self._partial_line = b""
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close()
        self._tail: collections.deque[bytes] = collections.deque()
        self._tail_bytes = 0

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
            if self._file.tell() > self._limit_bytes:
                self._file.close()
                os.replace(self._path, self._path + ".1")
                self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
            self._file.write(lines)

    def tail(self) -> str:
        """The last `TAIL_BYTES` of the log."""
        return b"".join(self._tail)[-TAIL_BYTES:].decode("utf-8", "replace")

    def close(self) -> None:
        self._write_lines(self._partial_line)
        self._partial_line = b""
        self._file.close()
