"""A session on disk: one file, append-only JSON lines, of which every whole one counts.

A process that dies in the middle of a line leaves a torn last line; it is cut off when the session is opened again.
What `Recorder` methods have returned from is on disk (`fsync`), unless `sync` is off.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from verl_server.errors import BadInputError, ServerBusyError
from verl_server.trajectory.graph import ForkReason, Node, Session, Span

Json = dict[str, Any]

SUFFIX = ".jsonl"
FORMAT = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def file_of(folder: Path | str, session_id: str) -> Path:
    """Raises BadInputError for an id that is no safe name of a file."""
    if not isinstance(session_id, str) or not NAME.fullmatch(session_id):
        raise BadInputError(
            f"a recorded session's id is 1 to 200 letters, digits, '.', '_' or '-', got {str(session_id)[:80]!r}"
        )
    return Path(folder) / f"{session_id}{SUFFIX}"


class Recorder:
    """A session and its file, which one process at a time may write."""

    def __init__(self, folder: Path | str, session_id: str, *, sync: bool = True) -> None:
        """Opens or makes it. Raises ServerBusyError when another process writes it."""
        path = file_of(folder, session_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sync = sync
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ServerBusyError(f"another process records the session {session_id!r}") from None
            self.session, whole = parse(session_id, _content(self._fd))
            os.ftruncate(self._fd, whole)
            os.lseek(self._fd, whole, os.SEEK_SET)
            if whole == 0:
                self._write({"format": FORMAT, "session": session_id})
        except BaseException:
            os.close(self._fd)
            raise

    def add(self, parent: int | None, tokens: Sequence[int], **fields: Any) -> Node:
        """`Session.add`."""
        node = self.session.add(parent, tokens, **fields)
        self._write({"node": _plain(node)})
        return node

    def reward(self, node: int, values: Sequence[float]) -> None:
        """`Session.reward`."""
        self.session.reward(node, values)
        self._write({"reward": [node, self.session.rewards[node]]})

    def end(self, node: int, reason: str, error: Json | None = None) -> None:
        """`Session.end`."""
        self._write({"end": asdict(self.session.end(node, reason, error))})

    def _write(self, line: Json) -> None:
        left = memoryview(orjson.dumps(line) + b"\n")
        while left:
            left = left[os.write(self._fd, left) :]
        if self._sync:
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(path: Path | str) -> Session:
    """A recorded session, also one that is being written. Raises BadInputError for a file that is none."""
    path = Path(path)
    return parse(path.name.removesuffix(SUFFIX), path.read_bytes())[0]


def recorded(folder: Path | str) -> list[Path]:
    """The files of the sessions in a folder."""
    return sorted(Path(folder).glob(f"*{SUFFIX}"))


def parse(session_id: str, content: bytes) -> tuple[Session, int]:
    """The session in the whole lines of `content`, and how many bytes these are."""
    session = Session(session_id)
    at = 0
    while (end := content.find(b"\n", at)) >= 0:
        try:
            _take(session, orjson.loads(content[at:end]))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, BadInputError) as error:
            raise BadInputError(f"the record of {session_id!r} is damaged at byte {at}: {error}") from error
        at = end + 1
    return session, at


def _take(session: Session, line: Json) -> None:
    if "node" in line:
        _add(session, line["node"])
    elif "reward" in line:
        session.reward(*line["reward"])
    elif "end" in line:
        session.end(**line["end"])
    elif line["format"] != FORMAT or line["session"] != session.id:
        raise BadInputError(f"it is of format {line['format']} and session {line['session']!r}")


def _add(session: Session, fields: Mapping[str, Any]) -> None:
    rest = dict(fields)
    number, parent, tokens = rest.pop("id"), rest.pop("parent"), rest.pop("tokens")
    spans = [Span(*span) for span in rest.pop("spans", ())]
    fork = rest.pop("fork", None)
    node = session.add(parent, tokens, spans=spans, fork=None if fork is None else ForkReason(fork), **rest)
    if node.id != number:
        raise BadInputError(f"node {number} follows {node.id - 1}")


def _plain(node: Node) -> Json:
    """Without what is not there."""
    fields: Json = {"id": node.id, "parent": node.parent, "tokens": list(node.tokens), "sampled": node.sampled}
    if node.sampled:
        fields["logprobs"] = list(node.logprobs)
        fields["spans"] = [[span.version, span.start, span.end] for span in node.spans]
    for name in ("message", "fork", "finish", "experts"):
        if (value := getattr(node, name)) is not None:
            fields[name] = value
    return fields


def _content(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    return b"".join(parts)
