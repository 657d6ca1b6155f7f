"""`SessionExports`: the records of sessions in all formats. The conversion of a long record takes seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson

from verl_server.gateway.sessions.session_end import record_kinds
from verl_server.gateway.worker_threads import call_in_thread
from verl_server.trajectory.exports import ExportFormat
from verl_server.trajectory.exports.files import export_lines
from verl_server.trajectory.recorder import load_session

RECORD_FORMAT = "jsonl"
"""Name of the format of the records themselves."""
RECORD_FORMATS = (RECORD_FORMAT, *ExportFormat)
"""Formats in which the record of a session can be read."""


class SessionExports:
    """Reads one record and converts one record at a time: many exports do not slow down all turns.

    They run in daemon threads, which do not hold up the end of the gateway.
    """

    def __init__(self) -> None:
        self._reading, self._converting = asyncio.Semaphore(1), asyncio.Semaphore(1)

    async def get(
        self, file: Path, kind: str, model: str | None, has_left: Callable[[], Awaitable[bool]]
    ) -> bytes | None:
        """A record as JSON lines. None if the client has left before its record was read.

        `kind`: one of `RECORD_FORMATS`. `model`: name of the model in the lines. Raises the errors of `load_session`.
        """
        is_converted = kind != RECORD_FORMAT
        async with self._converting if is_converted else self._reading:
            if await has_left():
                return None
            if is_converted:
                return await call_in_thread(_convert, file, ExportFormat(kind), model)
            return await call_in_thread(_read_whole_lines, file)


def _read_whole_lines(file: Path) -> bytes:
    """The complete lines of a file. A session that runs may be writing the next line."""
    content = file.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _convert(file: Path, kind: ExportFormat, model: str | None) -> bytes:
    """The session in another format, as JSON lines."""
    graph = load_session(file)
    record_kinds(graph)  # of a session that runs; the file gets them at the end of the session
    return b"".join(orjson.dumps(line) + b"\n" for line in export_lines(graph, kind, model))
