"""Export of recorded sessions to the formats of other programs, and import of these formats for inspection.

The formats are imported when they are needed: the command line needs their names. An output of an export appears whole
or not at all.
"""

from __future__ import annotations

import contextlib
import enum
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from verl_server.errors import BadInputError
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.recorder import FILE_SUFFIX, NO_FILE, list_sessions, load_session
from verl_server.types import Json


class ExportFormat(enum.StrEnum):
    """A format that recorded sessions can be exported to."""

    VERIFIERS = "verifiers"
    """`traces.jsonl` of verifiers: one file, one line for each session."""
    ATIF = "atif"
    """Harbor's Agent Trajectory Interchange Format: a folder, one JSON file for each path."""
    LITELLM = "litellm"
    """LiteLLM's log of calls: one file, one line for each turn."""


@dataclass(frozen=True)
class ExportSummary:
    """What an export has written."""

    num_sessions: int
    num_documents: int
    """Number of lines (verifiers, LiteLLM) or of files (ATIF)."""


def export_lines(graph: TrajectoryGraph, kind: ExportFormat, model: str | None = None) -> list[Json]:
    """The documents of one session: one (verifiers), one for each path (ATIF) or one for each turn (LiteLLM)."""
    from verl_server.trajectory.exports.atif import to_atif
    from verl_server.trajectory.exports.litellm import to_litellm
    from verl_server.trajectory.exports.verifiers import to_verifiers

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
    folder = source if source.is_dir() else source.parent
    sessions = list_sessions(source) if source.is_dir() else [source]
    if not source.exists():
        raise BadInputError(f"{source}: {NO_FILE}; pass the file of a session, or the run_dir of a run")
    if not sessions:
        raise BadInputError(f"the folder {source} has no recorded session (*.jsonl); pass the run_dir of a run")
    is_beside = output.suffix == FILE_SUFFIX and output.resolve().parent == folder.resolve()
    is_inside = output.resolve().is_relative_to(source.resolve()) if source.is_dir() else is_beside
    if is_inside and kind is not ExportFormat.ATIF:
        raise BadInputError(
            f"{output} lies in the folder of the sessions, where the file would count as a session; pass an --output "
            f"outside of {folder}"
        )
    try:
        with _replace_when_done(output) as temporary:
            return _write(folder, sessions, temporary, kind, model)
    except OSError as error:
        raise BadInputError(f"cannot write {output}: {error.strerror or error}; choose another --output") from error


def _write(folder: Path, sessions: list[Path], output: Path, kind: ExportFormat, model: str | None) -> ExportSummary:
    """Write all lines into one file, or each ATIF document into a file in the folder that its session has."""
    from verl_server.trajectory.exports.atif import atif_file_name

    if kind is ExportFormat.ATIF:
        output.mkdir()
    num_documents = 0
    with contextlib.nullcontext() if kind is ExportFormat.ATIF else output.open("wb") as file:
        for path in sessions:
            for line in export_lines(load_session(path), kind, model):
                num_documents += 1
                if file is not None:
                    file.write(orjson.dumps(line) + b"\n")
                    continue
                target = output / path.parent.relative_to(folder) / atif_file_name(line["trajectory_id"])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(orjson.dumps(line))
        if file is not None:
            file.flush()
            os.fsync(file.fileno())
    return ExportSummary(len(sessions), num_documents)


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
