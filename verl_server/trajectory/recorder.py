"""Storage of sessions: one append-only file of JSON lines per session.

A process that is killed while it writes leaves a torn last line. The torn line is removed when the session is opened
again. Data is on disk (`fdatasync`) when a method of `Recorder` returns, unless `sync` is False. A line that cannot be
written, for example because the disk is full, leaves no part of it in the file, and the recorder writes nothing more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, Unpack

import orjson

from verl_server.errors import BadInputError
from verl_server.trajectory.graph import TrajectoryGraph
from verl_server.trajectory.inputs import require_same_inputs
from verl_server.trajectory.locked_files import close_locked, open_locked, read_all
from verl_server.trajectory.nodes import ForkReason, Node, NodeFields, Span
from verl_server.types import Json

FILE_SUFFIX = ".jsonl"
FILE_FORMAT = 2
"""Version of the file format. Increased when files of earlier versions cannot be read any more."""
DIGESTS_KEY = "input_digests"
"""Key of the digests of the inputs in the header. Earlier versions wrote digests of another kind under `inputs`."""
NO_FILE = "No such file (a session gets its file with its first request)"
SESSION_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class Recorder:
    """Writes a session to a file and keeps its graph in memory. One process at a time may write a session."""

    def __init__(
        self, run_dir: Path | str, session_id: str, *, sync: bool = True, inputs: Mapping[str, str] | None = None
    ) -> None:
        """Open the session's file in `run_dir`, or create it. `graph` has the nodes that the file contains.

        `inputs`: the digest of each input of the session by name, which is recorded. None accepts any recorded inputs.

        Raises ServerBusyError if another `Recorder` has opened the session, BadInputError for an invalid session id, a
        damaged file, a file of another format, of another session or with nodes of other or unknown inputs, and OSError
        if the file cannot be opened.
        """
        path = session_file(run_dir, session_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sync = sync
        self.failure: Exception | None = None
        """Exception of the first line that could not be written, for example because the disk is full."""
        self._fd = open_locked(
            path, f"another process records the session {session_id!r}, or another Recorder of this process"
        )
        try:
            self.graph, num_bytes = parse_session(session_id, read_all(self._fd))
            if not (self.graph.nodes or self.graph.notes):  # at most a header, which is written again
                num_bytes = 0
                self.graph.inputs = dict(inputs or {})
            if inputs is not None:
                require_same_inputs(path, self.graph.inputs, inputs)
            self._written_rewards = {node: list(values) for node, values in self.graph.rewards.items()}
            """Rewards that the file has. Code of users may set or remove rewards on `graph`."""
            os.ftruncate(self._fd, num_bytes)
            os.lseek(self._fd, num_bytes, os.SEEK_SET)
            self._num_bytes = num_bytes  # size of the complete lines
            if num_bytes == 0:
                self._write({"format": FILE_FORMAT, "session_id": session_id, DIGESTS_KEY: self.graph.inputs})
        except BaseException:
            close_locked(self._fd)
            raise

    def add_node(self, parent: int | None, token_ids: Sequence[int], **fields: Unpack[NodeFields]) -> Node:
        """Add a node and write it. See `TrajectoryGraph.add_node`."""
        node = self.graph.add_node(parent, token_ids, **fields)
        self._write({"node": _node_to_json(node)})
        return node

    def add_note(self, node: int | None, name: str, value: Any) -> None:
        """Add a note and write it. See `TrajectoryGraph.add_note`."""
        self._write({"note": asdict(self.graph.add_note(node, name, value))})

    def set_rewards(self, node: int, values: Sequence[float]) -> None:
        """Set the rewards of a node and write them. See `TrajectoryGraph.set_rewards`."""
        self.graph.set_rewards(node, values)
        self._write({"rewards": {"node": node, "values": self.graph.rewards[node]}})
        self._written_rewards[node] = self.graph.rewards[node].copy()

    def record_all_rewards(self) -> None:
        """Make the rewards of the file equal to those of `graph`, also if they were set or removed on `graph`.

        Raises BadInputError for rewards that `TrajectoryGraph.set_rewards` would refuse.
        """
        self.graph.require_valid_rewards()
        self._write_rewards_and()

    def _write_rewards_and(self, *lines: Json) -> None:
        """Make the rewards of the file equal to those of `graph`, and write lines, all at once."""
        rewards = {node: [float(value) for value in values] for node, values in self.graph.rewards.items()}
        is_removed = not self._written_rewards.keys() <= rewards.keys()
        written = {} if is_removed else self._written_rewards
        changed = {node: values for node, values in rewards.items() if values != written.get(node)}
        all_lines: list[Json] = [{"cleared_rewards": True}] if is_removed else []
        all_lines += [{"rewards": {"node": node, "values": values}} for node, values in changed.items()]
        if all_lines or lines:
            self._write(*all_lines, *lines)
        self._written_rewards = rewards

    def clear_rewards(self) -> None:
        """Remove the rewards of all nodes from `graph`. The file keeps them until the next call of `terminate`."""
        self.graph.clear_rewards()

    def terminate(
        self,
        node: int,
        stop_reason: str,
        error: Json | None = None,
        reward: float | None = None,
        segments: Sequence[tuple[int, float]] | None = None,
        rewards: Mapping[str, float] | None = None,
        notes: Sequence[tuple[int | None, str, Any]] = (),
    ) -> None:
        """Record the end of a path. Write it with all rewards of `graph`, also those that were set or removed there.

        `notes`: the arguments of `add_note`, written at once with the end. See `TrajectoryGraph.terminate`. The
        termination is the last line: a file with the termination has all rewards and notes.
        """
        termination = self.graph.terminate(node, stop_reason, error, reward, segments, rewards)
        added = [{"note": asdict(self.graph.add_note(*note))} for note in notes]
        self._write_rewards_and(*added, {"termination": asdict(termination)})

    def _write(self, *lines: Json) -> None:
        """Append lines. After a failure, the file ends with its last complete line, and all later calls fail too."""
        if self.failure is not None:
            raise self.failure
        try:
            remaining = memoryview(b"".join(orjson.dumps(line) + b"\n" for line in lines))
            num_bytes = len(remaining)
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]
            if self._sync:
                os.fdatasync(self._fd)
            self._num_bytes += num_bytes
        except Exception as failure:
            self.failure = failure  # the graph has what the file lacks: a later line would not fit to the file
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._num_bytes)
            raise

    def flush(self) -> None:
        """Return when everything written so far is on disk. Needed without `sync`. Raises OSError."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file. Calling this a second time has no effect."""
        if self._fd >= 0:
            close_locked(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def session_file(run_dir: Path | str, session_id: str) -> Path:
    """The path of a session's file; `~` is the home of the user. Raises BadInputError for an id that is not safe."""
    if not isinstance(session_id, str) or not SESSION_ID_PATTERN.fullmatch(session_id):
        raise BadInputError(
            "the id of a recorded session must have 1 to 200 letters, digits, '.', '_' or '-', and begin with a letter "
            f"or a digit; got {str(session_id)[:80]!r}"
        )
    return Path(os.path.expanduser(run_dir)) / f"{session_id}{FILE_SUFFIX}"


def load_session(path: Path | str) -> TrajectoryGraph:
    """Load a recorded session. The session may still be written by another process.

    Raises BadInputError for a folder, a damaged file, a file of another format, or a file of another session, and
    FileNotFoundError if there is no file: a session of a gateway gets its file with its first request.
    """
    path = Path(os.path.expanduser(path))
    if path.is_dir():
        raise BadInputError(
            f"{path} is a folder, and load_session reads the file of one session; for all sessions of a run_dir, write "
            f"[load_session(path) for path in list_sessions({str(path)!r})]"
        )
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, NO_FILE, str(path))
    return parse_session(path.name.removesuffix(FILE_SUFFIX), path.read_bytes())[0]


def has_recorded_nodes(path: Path, inputs: Mapping[str, str]) -> bool:
    """Whether the file of a session exists and contains a node. Reads the first lines only.

    Raises BadInputError if the nodes were recorded with other or unknown inputs, and for a damaged or foreign file.
    """
    if not path.exists():
        return False
    with path.open("rb") as file:
        header, first_node = file.readline(), file.readline()
    if not first_node.endswith(b"\n"):
        return False
    graph, _ = parse_session(path.name.removesuffix(FILE_SUFFIX), header)
    require_same_inputs(path, graph.inputs, inputs)
    return True


def list_sessions(run_dir: Path | str) -> list[Path]:
    """The files of all sessions in `run_dir` and its folders of steps, sorted. Empty if there is no such folder."""
    return sorted(Path(os.path.expanduser(run_dir)).rglob(f"*{FILE_SUFFIX}"))


def parse_session(session_id: str, content: bytes) -> tuple[TrajectoryGraph, int]:
    """Parse the complete lines of a session's file. Returns the graph and the number of bytes of these lines.

    Raises BadInputError for damaged lines, for another format, and for a file that belongs to another session.
    """
    graph = TrajectoryGraph(session_id)
    start = 0
    while (end := content.find(b"\n", start)) >= 0:
        try:
            line = _parse_line(content[start:end])
            if "format" not in line:
                _apply_line(graph, line)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, BadInputError) as error:
            reason = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
            hint = "" if start else f". A file of another kind is no recorded session: pass RUN_DIR/NAME{FILE_SUFFIX}"
            damage = f"the file of session {session_id!r} is damaged at byte {start}: {reason}{hint}"
            raise BadInputError(damage) from error
        if "format" in line:
            _check_header(session_id, line)
            graph.inputs = dict(line.get(DIGESTS_KEY) or {})
        start = end + 1
    return graph, start


def _parse_line(line: bytes) -> Json:
    fields = orjson.loads(line)
    if not isinstance(fields, dict):
        raise BadInputError(f"expected a JSON object, got {type(fields).__name__}")
    return fields


def _check_header(session_id: str, header: Json) -> None:
    """Raise BadInputError if a file cannot be read as the file of this session."""
    if header["format"] != FILE_FORMAT:
        raise BadInputError(
            f"the file of session {session_id!r} is of format {header['format']}; this version of verl_server reads "
            f"format {FILE_FORMAT} only. Use another run_dir, or load the file with the version that recorded it."
        )
    if not isinstance(header.get(DIGESTS_KEY) or {}, dict):
        raise BadInputError(f"the file of session {session_id!r} is damaged: {DIGESTS_KEY} is no JSON object")
    if header.get("session_id") != session_id:
        recorded = header.get("session_id")
        raise BadInputError(
            f"the file of session {session_id!r} contains the session {recorded!r}; if the file was renamed or copied, "
            f"give it its name {recorded}{FILE_SUFFIX} again, if necessary in another folder"
        )


def _apply_line(graph: TrajectoryGraph, line: Json) -> None:
    if "node" in line:
        _add_node_from_json(graph, line["node"])
    elif "rewards" in line:
        graph.set_rewards(**line["rewards"])
    elif "note" in line:
        graph.add_note(**line["note"])
    elif "cleared_rewards" in line:
        graph.clear_rewards()
    else:
        graph.terminate(**line["termination"])


def _add_node_from_json(graph: TrajectoryGraph, fields: Mapping[str, Any]) -> None:
    other_fields = dict(fields)
    node_id, parent, token_ids = other_fields.pop("id"), other_fields.pop("parent"), other_fields.pop("token_ids")
    spans = [Span(*span) for span in other_fields.pop("spans", ())]
    reason = other_fields.pop("fork_reason", None)
    fork_reason = None if reason is None else ForkReason(reason)
    node = graph.add_node(parent, token_ids, spans=spans, fork_reason=fork_reason, **other_fields)
    if node.id != node_id:
        raise BadInputError(f"node {node_id} follows node {node.id - 1}")


def _node_to_json(node: Node) -> Json:
    """The fields of a node as JSON, without the fields that are not set."""
    fields: Json = {"id": node.id, "parent": node.parent, "token_ids": list(node.token_ids), "sampled": node.sampled}
    if node.sampled:
        fields["logprobs"] = list(node.logprobs)
        fields["spans"] = [[span.version, span.start, span.end] for span in node.spans]
    for name in ("message", "fork_reason", "finish_reason", "routed_experts", "branch", "tools_digest"):
        if (value := getattr(node, name)) not in (None, ""):
            fields[name] = value
    return fields
