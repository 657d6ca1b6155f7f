"""Storage of sessions: one append-only file of JSON lines per session.

A process that is killed while it writes leaves a torn last line. The torn line is removed when the session is opened
again. Data is on disk (`fdatasync`) when a method of `Recorder` returns, unless `sync` is False. A line that cannot be
written, for example because the disk is full, leaves no part of it in the file, and the recorder writes nothing more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import errno
import fcntl
import functools
import hashlib
import inspect
import os
import re
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict
from numbers import Integral, Number
from pathlib import Path
from typing import Any, Self, Unpack

import orjson

from verl_server.errors import BadInputError, ServerBusyError, UnsupportedError
from verl_server.trajectory.graph import DETAIL_FIELDS, ForkReason, Node, NodeFields, Span, TrajectoryGraph
from verl_server.types import Json
from verl_server.validation import is_list, to_plain

# -- Locked files -----------------------------------------------------------------------------------
# Files that one process at a time may write.

NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
"""Numbers of the errors of `flock` on a file system without locks."""
_LOCKED: set[int] = set()
"""Descriptors of the files that this process has locked, and their duplicates."""
_CHANGES = threading.RLock()
"""Held while `_LOCKED` and the open descriptors differ, and by a thread that forks: a fork waits for the change."""


@functools.cache
def _null() -> int:
    """A descriptor of /dev/null. It is opened before the first lock: a forked process may have no free descriptor."""
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _leave_locks() -> None:
    """Give up the locks of the parent in a forked process, for example in a pool of processes for rewards.

    A lock belongs to all processes that have inherited it. The numbers of the descriptors stay in use: objects of the
    parent, which the forked process has too, may still close them.
    """
    try:
        for fd in _LOCKED:
            os.dup2(_null(), fd, inheritable=False)
    finally:
        _LOCKED.clear()
        _CHANGES.release()


os.register_at_fork(before=_CHANGES.acquire, after_in_parent=_CHANGES.release, after_in_child=_leave_locks)


def close_locked(fd: int) -> None:
    """Close a file that `open_locked` has opened, and give up its lock.

    `subprocess` forks without the functions of `os.register_at_fork`: until it executes the command, the new process
    has the descriptor too, and the lock would outlive the close.
    """
    with _CHANGES:
        _LOCKED.discard(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)


def open_locked(path: Path, busy: str, *, may_create: bool = True) -> int:
    """Open a file that one process at a time may write, or create it. Returns its descriptor, which holds the lock.

    Raises ServerBusyError with the message `busy` if the file is open elsewhere, UnsupportedError if the file system
    has no locks, and OSError, with `may_create` False also for a file that does not exist, and for a symbolic link:
    what it points to may be anybody's file, and its content would be cut off as a record that was not finished.
    """
    with _CHANGES:
        _null()
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if may_create else 0), 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ServerBusyError(busy) from None
        except OSError as error:
            os.close(fd)
            if error.errno in NO_LOCKS:
                raise UnsupportedError(
                    f"the file system of the folder {path.parent} has no locks of files (flock: {error.strerror}); "
                    "mount it with locks (Lustre: with flock; NFS: without nolock), or use another folder"
                ) from error
            raise
        except BaseException:
            os.close(fd)
            raise
        _LOCKED.add(fd)
        return fd


@contextlib.contextmanager
def duplicate_locked(fd: int) -> Iterator[int]:
    """A duplicate of a descriptor of `open_locked`, which another thread may close in the block. Raises OSError.

    The end of the block closes the duplicate. A process that is forked in the block gives up the lock of both.
    """
    with _CHANGES:
        duplicate = os.dup(fd)
        _LOCKED.add(duplicate)
    try:
        yield duplicate
    finally:
        with _CHANGES:
            _LOCKED.discard(duplicate)
            os.close(duplicate)


def read_all(fd: int) -> bytes:
    """The content of an open file, from its present position."""
    parts = []
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    return b"".join(parts)


# -- Inputs -----------------------------------------------------------------------------------------
# Digests of the inputs of a recorded session: what its tokens depend on, for example the messages of its task.
#
# A later run with the same session id uses a recorded session only if all inputs are the same.

VALUE_TYPES = (enum.Enum, uuid.UUID, datetime.date, datetime.time, datetime.timedelta)
"""Types of the standard library whose text is their value."""
MAX_DEPTH = 150
"""Number of containers around a value that counts for a digest. Each takes three calls of Python's stack of 1000."""
ATTRIBUTE_MARK = ": attribute "
"""Part of the name of an input that is an attribute of an object."""


def digest(value: object) -> str:
    """A short digest of a value, equal in every process. Values of any type and size have a digest.

    Equal numbers have the same digest, also scalars of numpy: 1 and 1.0. True differs from 1. A tuple equals a list,
    and a dataclass a dict of its fields. An array or a tensor counts with its dtype, shape and bytes, so it differs
    from a list of its elements; a tensor without readable memory, for example a sparse one, counts with dtype and shape
    only. A class or a function counts with its name, and an object of an unknown type with its type only. What is
    nested deeper than `MAX_DEPTH` does not count.
    """
    return hashlib.sha256(_encode(value, {})).hexdigest()[:16]


def attribute_input(owner: str, name: str) -> str:
    """The name of an input that is an attribute. Attributes are compared if both runs have them."""
    return f"{owner}{ATTRIBUTE_MARK}{name!r}"


def require_same_inputs(path: Path, recorded: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Raise BadInputError with the names of the inputs if a file was recorded with other inputs than those given.

    `recorded` and `given`: the digest of each input by the name of the input. `recorded` is empty if it is unknown.
    """
    session = f"the session {path.stem!r} in the folder {path.parent}"
    if not recorded and given:
        raise BadInputError(
            f"{session} has no digests of its inputs, so it is unknown whether they are those of this run. It was "
            "recorded by an older version of verl_server, or by a Recorder without `inputs`. Pass a new run_dir; "
            "load_session still reads the file",
            argument="run_dir",
        )
    names = {name for name in {*given, *recorded} if given.get(name) != recorded.get(name)}
    changed = sorted(name for name in names if ATTRIBUTE_MARK not in name or (name in given and name in recorded))
    if changed:
        hint = "; if the samples do not depend on an attribute, begin its name with '_'"
        raise BadInputError(
            f"{session} was recorded with other inputs: a different {', '.join(changed)}. A run_dir belongs to one "
            "run, or to the steps of one training run, and can be resumed with the same inputs only. Pass another "
            "run_dir" + hint * any(ATTRIBUTE_MARK in name for name in changed),
            argument="run_dir",
        )


def _encode(value: Any, parents: Mapping[int, int]) -> bytes:
    """The encoding of any value. Values that count as different have different encodings.

    `parents`: depth of each container of the value by its `id`.
    """
    if (scalar := _encode_scalar(value)) is not None:
        return scalar
    if id(value) in parents:  # the value contains itself
        return b"levels up:%d" % (len(parents) - parents[id(value)])
    if len(parents) > MAX_DEPTH:
        return b"too deep"
    parents = {**parents, id(value): len(parents)}

    def encode(part: Any) -> bytes:
        return _encode(part, parents)

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return _join(b"mapping", sorted(encode(key) + b":" + encode(value[key]) for key in value))
    if isinstance(value, Set):
        return _join(b"set", sorted(map(encode, value)))
    if is_list(value):
        return _join(b"list", map(encode, value))
    if (plain := to_plain(value)) is not value:  # a path or a bool of numpy, for example
        return encode(plain)
    if hasattr(type(value), "__array__"):
        return _join(b"array", map(encode, _array_parts(value)))
    return _encode_unknown(value)


def _join(kind: bytes, parts: Iterable[bytes]) -> bytes:
    return kind + b":" + hashlib.sha256(b",".join(parts)).hexdigest().encode()


def _encode_scalar(value: Any) -> bytes | None:
    """The encoding of text, bytes, a number, a bool or None. None for a value of another type."""
    if isinstance(value, str):
        content = str.encode(value, "utf-8", "surrogatepass")
        return b"str%d:%s" % (len(content), content)
    if value is None or isinstance(value, bool):
        return str(value).encode()
    if isinstance(value, Number):
        return _encode_number(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _join(b"bytes", [bytes(value)])
    return None


def _encode_number(value: Any) -> bytes:
    """An exact fraction in hexadecimal digits, because Python limits the decimal digits of an int."""
    try:
        numerator, denominator = (int(value) if isinstance(value, Integral) else value).as_integer_ratio()
    except (AttributeError, ValueError, OverflowError):  # a complex number, NaN or infinity
        return str(value).lower().encode()
    return b"%x/%x" % (numerator, denominator)


def _array_parts(value: Any) -> tuple[Any, ...]:
    """Dtype, shape and content of an array or a tensor."""
    dtype, shape = str(getattr(value, "dtype", "")).removeprefix("torch."), tuple(getattr(value, "shape", ()))
    try:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return dtype, shape, content
        import numpy as np

        array = np.asarray(value)
        content = array.ravel().tolist() if array.dtype.hasobject else array.tobytes()
        return str(array.dtype), array.shape, content
    except Exception:  # noqa: BLE001 - code of another library: a tensor without memory, for example
        return dtype, shape, None


def _encode_unknown(value: Any) -> bytes:
    """The encoding of a class or a function by its name, of some values by their text, and of others by their type."""
    if isinstance(value, VALUE_TYPES):
        return _join(type(value).__qualname__.encode(), [str(value).encode()])
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", None)
    return f"{module}.{name}".encode()


# -- Recorder ---------------------------------------------------------------------------------------

FILE_SUFFIX = ".jsonl"
FILE_FORMAT = 2
"""Version of the file format. Increased when files of earlier versions cannot be read any more.

An earlier version calls a line with a field that it does not know damaged."""
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
    for name in DETAIL_FIELDS:
        if (value := getattr(node, name)) not in (None, ""):
            fields[name] = value
    return fields
