"""Export of recorded sessions from files to files. An output appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from verl_server.errors import BadInputError
from verl_server.trajectory.exports import ExportFormat
from verl_server.trajectory.exports.atif import atif_file_name, to_atif
from verl_server.trajectory.exports.litellm import to_litellm
from verl_server.trajectory.exports.verifiers import to_verifiers
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.recorder import FILE_SUFFIX, NO_FILE, list_sessions, load_session
from verl_server.types import Json


@dataclass(frozen=True)
class ExportSummary:
    """What an export has written."""

    num_sessions: int
    num_documents: int
    """Number of lines (verifiers, LiteLLM) or of files (ATIF)."""


def export_lines(graph: TrajectoryGraph, kind: ExportFormat, model: str | None = None) -> list[Json]:
    """The documents of one session: one (verifiers), one for each path (ATIF) or one for each turn (LiteLLM)."""
    if kind is ExportFormat.VERIFIERS:
        return [to_verifiers(graph, model=model)]
    return to_atif(graph, model=model) if kind is ExportFormat.ATIF else to_litellm(graph, model=model)


def export_sessions(source: Path, output: Path, kind: ExportFormat, model: str | None = None) -> ExportSummary:
    """Export the session in the file `source`, or all sessions in the folder `source`.

    `output`: the file (verifiers, LiteLLM) or the folder (ATIF) to write. `model`: name of the model. Raises
    BadInputError if there is no session, if the output exists, if it cannot be written, if a file lies in the folder of
    the sessions, and for a damaged session. Then no output is written.
    """
    source, output = source.expanduser(), output.expanduser()
    sessions = _find_sessions(source)
    is_file = kind is not ExportFormat.ATIF
    if is_file and source.is_dir() and output.resolve().is_relative_to(source.resolve()):
        raise BadInputError(
            f"{output} lies in the folder of the sessions, where the file would count as a session; pass an --output "
            f"outside of {source}"
        )
    is_beside = source.is_file() and output.resolve().parent == source.resolve().parent
    if is_file and is_beside and output.suffix == FILE_SUFFIX:
        raise BadInputError(
            f"{output} lies beside the session {source.name}, where the file would count as a session; pass an "
            "--output in another folder"
        )
    try:
        with _replace_when_done(output) as temporary:
            if is_file:
                return _write_lines(sessions, temporary, kind, model)
            return _write_atif(source, sessions, temporary, model)
    except OSError as error:
        raise BadInputError(f"cannot write {output}: {error.strerror or error}; choose another --output") from error


def _find_sessions(source: Path) -> list[Path]:
    if source.is_dir():
        sessions = list_sessions(source)
        if not sessions:
            raise BadInputError(f"the folder {source} has no recorded session (*.jsonl); pass the run_dir of a run")
        return sessions
    if not source.exists():
        raise BadInputError(f"{source}: {NO_FILE}; pass the file of a session, or the run_dir of a run")
    return [source]


@contextlib.contextmanager
def _replace_when_done(output: Path) -> Iterator[Path]:
    """A path beside `output`, which becomes `output` at the end. After an exception it is removed."""
    _require_absent(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex}")
    try:
        yield temporary
        _require_absent(output)
        os.rename(temporary, output)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def _require_absent(output: Path) -> None:
    if os.path.lexists(output):
        raise BadInputError(f"{output} exists, and an export overwrites nothing; remove it, or pass another --output")


def _write_lines(sessions: list[Path], output: Path, kind: ExportFormat, model: str | None) -> ExportSummary:
    num_lines = 0
    with output.open("wb") as file:
        for path in sessions:
            lines = export_lines(load_session(path), kind, model)
            file.writelines(orjson.dumps(line) + b"\n" for line in lines)
            num_lines += len(lines)
        file.flush()
        os.fsync(file.fileno())
    return ExportSummary(len(sessions), num_lines)


def _write_atif(source: Path, sessions: list[Path], output: Path, model: str | None) -> ExportSummary:
    """Write the documents of each session into the folder that the session has below `source`."""
    output.mkdir()
    num_documents = 0
    for path in sessions:
        folder = output / (path.parent.relative_to(source) if source.is_dir() else "")
        folder.mkdir(parents=True, exist_ok=True)
        for document in to_atif(load_session(path), model=model):
            (folder / atif_file_name(document["trajectory_id"])).write_bytes(orjson.dumps(document))
            num_documents += 1
    return ExportSummary(len(sessions), num_documents)
