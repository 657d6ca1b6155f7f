"""`SessionStore`: the sessions of a gateway, their keys, and the end of each session.

The folder of a run has for each session `<id>.jsonl`, the record, and `<id>.session.json`: the digest of the key, the
settings and the result. A gateway that is started again with the same folder serves the sessions again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pydantic

from verl_server.agent.engines import require_sampling_params
from verl_server.agent.limits import RolloutLimits
from verl_server.agent.samples import find_segments
from verl_server.errors import BadInputError
from verl_server.gateway.config import MIN_SESSION_KEY_CHARS
from verl_server.gateway.errors import ErrorKind, GatewayError, list_wrong_fields
from verl_server.gateway.records import TOO_MANY_FILES, ObservedRecorder, RecordFiles, close_on_disk
from verl_server.gateway.sessions.history import TRAINED_KINDS, ConversationKind, label_conversations, trained_ends
from verl_server.gateway.sessions.session import Session
from verl_server.gateway.threads import run_aside
from verl_server.trajectory.graph import KIND_NOTE, TrajectoryGraph, recorded_kinds
from verl_server.trajectory.recorder import Recorder, session_file
from verl_server.types import Json
from verl_server.validation import did_you_mean, is_finite_number, require_key, require_list, require_seconds

logger = logging.getLogger(__name__)


# -- Session info -----------------------------------------------------------------------------------
# `SessionInfo`: the settings and the result of a session, and the file that has them.

SETTINGS_SUFFIX = ".session.json"
OUTER_LEVELS = 8
"""Levels of objects and lists around the settings of a session, in its file and in the replies of the admin API."""


@dataclass
class SessionInfo:
    """What the gateway knows of a session besides its tokens."""

    id: str
    key_digest: str
    """SHA-256 of the key of the session. The key itself is not stored."""
    created_at: float
    """Seconds since 1970."""
    expires_at: float | None = None
    """Seconds since 1970 at which the session ends by itself."""
    metadata: Json = field(default_factory=dict)
    limits: Json = field(default_factory=dict)
    """Fields of `RolloutLimits` that replace those of the gateway."""
    sampling_params: Json = field(default_factory=dict)
    """SGLang's sampling parameters of every turn, which replace those of the agent."""
    chat_template_kwargs: Json = field(default_factory=dict)
    """Variables of the chat template of every turn, which replace those of the agent."""
    ended_at: float | None = None
    """Seconds since 1970 at which the session was ended. None while it accepts requests."""
    stop_reason: str | None = None
    reward: float | None = None
    rewards: Json = field(default_factory=dict)
    train: list[str] | None = None
    """Kinds of the conversations that are trained (`ConversationKind`). None: all but titles and other side calls."""

    def has_settings_of(self, other: SessionInfo) -> bool:
        """Whether both were created with the same id, key and settings."""
        created = ("id", "key_digest", "created_at", "expires_at", "metadata", "limits", "sampling_params")
        return all(getattr(self, name) == getattr(other, name) for name in (*created, "chat_template_kwargs"))

    @property
    def has_expired(self) -> bool:
        """Whether the time of the session is over, and its end is not recorded."""
        return self.ended_at is None and self.expires_at is not None and time.time() > self.expires_at

    def public(self) -> Json:
        """The fields for the admin API, without the digest of the key. The values are not copied."""
        return {name: value for name, value in vars(self).items() if name != "key_digest"}


SETTINGS = pydantic.TypeAdapter(SessionInfo)
"""Checks the settings in a file. Making it takes a millisecond, and a folder has thousands of files."""


def digest_of(key: str) -> str:
    """The digest of a key that `SessionInfo` has."""
    return hashlib.sha256(key.encode()).hexdigest()


def write_info(run_dir: Path, info: SessionInfo) -> None:
    """Write the file of a session in place of an earlier one. Only the user may read the file.

    After a loss of power, the file has the earlier or the new settings. Raises OSError. Raises BadInputError, and
    writes nothing, if `read_info` could not read the file: no gateway could serve the session.
    """
    fields = dataclasses.asdict(info)
    try:
        SETTINGS.validate_python(fields)
    except pydantic.ValidationError as error:
        raise BadInputError(f"the session {info.id!r} has wrong settings: {list_wrong_fields(error)}") from None
    path = run_dir / f"{info.id}{SETTINGS_SUFFIX}"
    temporary = path.with_suffix(".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        os.fchmod(fd, 0o600)  # the file may exist: a process was killed while it wrote
        file.write(orjson.dumps(fields))
        file.flush()
        os.fdatasync(fd)  # before the rename, which may reach the disk before the content: the file would be empty
    os.replace(temporary, path)


def read_info(path: Path) -> SessionInfo:
    """The session of a file. Raises BadInputError for a damaged file."""
    try:
        info = SETTINGS.validate_python(orjson.loads(path.read_bytes()))
    except pydantic.ValidationError as error:
        found = list_wrong_fields(error)
    except (OSError, ValueError) as error:
        found = str(error)
    else:
        if path.name == f"{info.id}{SETTINGS_SUFFIX}":
            return info
        found = f"the settings are those of the session {info.id!r:.80}"
    raise BadInputError(f"{path.name} cannot be read as the settings of a session: {found}")


def read_infos(run_dir: Path) -> tuple[list[SessionInfo], dict[str, str]]:
    """The sessions of a folder in the order of their creation, and the errors of the files that cannot be read, by id.

    One line of the log names all files that cannot be read.
    """
    infos, errors = list[SessionInfo](), dict[str, str]()
    for path in run_dir.glob(f"*{SETTINGS_SUFFIX}"):
        try:
            infos.append(read_info(path))
        except BadInputError as error:
            errors[path.name.removesuffix(SETTINGS_SUFFIX)] = error.message
    if errors:
        found = "; ".join(errors[name] for name in sorted(errors))
        cure = "repair the files or move them away, and start the gateway again"
        logger.error("%d sessions of %s are not served; %s: %s", len(errors), run_dir, cure, found)
    return sorted(infos, key=lambda info: info.created_at), errors


def as_json(name: str, value: Any) -> Json:
    """A copy of a mapping with the types that JSON has.

    Raises BadInputError for a value that JSON does not have: NaN and infinity, for example.
    """
    if not isinstance(value, Mapping | None):
        raise BadInputError(f"{name} must be a dict, got {type(value).__name__}")
    nested: Any = dict(value or {})
    for _ in range(OUTER_LEVELS):
        nested = [nested]
    try:
        encoded = orjson.dumps(nested, option=orjson.OPT_PASSTHROUGH_DATACLASS)
    except TypeError as error:  # also for text that is no Unicode, and for too many levels
        raise BadInputError(f"{name} must have values of JSON only: {error}") from None
    if not _is_finite(value):  # orjson writes null
        raise BadInputError(f"{name} must have values of JSON only: NaN and infinity are no numbers of JSON")
    copy: Any = orjson.loads(encoded)
    for _ in range(OUTER_LEVELS):
        copy = copy[0]
    result: Json = copy
    return result


def _is_finite(value: Any) -> bool:
    """Whether all floats of a value are finite numbers."""
    if isinstance(value, float):
        return math.isfinite(value)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return all(map(_is_finite, items))


def as_kinds(train: Sequence[str] | None) -> list[str] | None:
    """The kinds of conversations that are trained. Raises BadInputError for an unknown kind."""
    if train is None:
        return None
    allowed = [kind.value for kind in ConversationKind]
    require_list("train", train, f"the kinds are {', '.join(allowed)}")
    for kind in train:
        if kind not in allowed:
            raise BadInputError(f"train has the kind {kind!r:.80}, but the kinds are {', '.join(allowed)}")
    return [str(kind) for kind in train]


def as_rewards(rewards: Mapping[str, Any]) -> Json:
    """The rewards as floats. Raises BadInputError for values that are no finite numbers."""
    for name, value in rewards.items():
        if not is_finite_number(value):
            raise BadInputError(f"rewards must be finite numbers, but {name!r:.80} is {value!r:.80}")
    return {name: float(value) for name, value in rewards.items()}


def limits_of(info: SessionInfo, defaults: RolloutLimits) -> RolloutLimits:
    """The limits of a session. `defaults`: the limits of the gateway. Raises BadInputError for wrong limits."""
    fields = [field.name for field in dataclasses.fields(defaults)]
    for name in info.limits:
        if name not in fields:
            hint = did_you_mean(name, fields).removesuffix("?")
            raise BadInputError(f"limits has no field {name!r:.80}{hint}; its fields are {', '.join(fields)}")
    return dataclasses.replace(defaults, **info.limits)


def remaining_limits(limits: RolloutLimits, created_at: float) -> RolloutLimits:
    """The limits at this time: the seconds of a session count from its creation, also over restarts of the gateway."""
    if limits.timeout_s is None:
        return limits
    return dataclasses.replace(limits, timeout_s=max(created_at + limits.timeout_s - time.time(), 1e-6))


def require_token_limit(limits: RolloutLimits) -> None:
    """Raise BadInputError for limits without a limit of the number of tokens: a turn needs one."""
    if not limits.has_token_limit:
        raise BadInputError(
            "the number of tokens has no limit, and the engine does not tell its context length; pass "
            "max_context_tokens in the limits"
        )


# -- Session end ------------------------------------------------------------------------------------
# Records the end of a session: the kinds of its conversations, the trained paths, and the reward.


def with_result(
    info: SessionInfo,
    stop_reason: str = "done",
    *,
    reward: float | None = None,
    rewards: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    train: Sequence[str] | None = None,
) -> SessionInfo:
    """The session with its end and its result. Raises BadInputError for values that are not allowed.

    `train`: kinds of the conversations that are trained (`ConversationKind`); by default all but titles and other side
    calls. A session that has ended keeps its end and gets the new result.
    """
    if not isinstance(stop_reason, str):
        raise BadInputError(f"stop_reason must be a string, got {type(stop_reason).__name__}")
    given = as_json("the result", {"stop_reason": stop_reason, "rewards": as_rewards(rewards or {})})
    info = dataclasses.replace(
        info,
        ended_at=info.ended_at or time.time(),
        stop_reason=info.stop_reason or given["stop_reason"],
        metadata=info.metadata | as_json("metadata", metadata),
        train=info.train if train is None else as_kinds(train),
    )
    if reward is not None:
        info.reward = as_rewards({"reward": reward})["reward"]
    if rewards:
        info.rewards = given["rewards"]
    return info


def record_end(recorder: Recorder, info: SessionInfo) -> None:
    """Record the end of a session with one write. The end of each trained path has the reward."""
    graph = recorder.graph
    if not graph.nodes:
        return
    kinds = label_conversations(graph)
    ends = trained_ends(graph, kinds, TRAINED_KINDS if info.train is None else info.train)
    segments = find_segments(graph, [(end, 1.0) for end in ends])
    graph.clear_rewards()  # of an earlier end, which may have trained other paths, or could not be written
    if info.reward is not None:
        for segment in segments:
            graph.set_rewards(segment.leaf, [info.reward])
    last = segments[-1].leaf if segments else graph.nodes[-1].id
    trained = [(segment.leaf, segment.loss_weight) for segment in segments]
    notes = _new_notes(graph, kinds)
    recorder.terminate(last, info.stop_reason or "done", None, info.reward, trained, info.rewards, notes)


def record_kinds(record: Recorder | TrajectoryGraph, kinds: Mapping[int, ConversationKind] | None = None) -> None:
    """Add the kind of each conversation and branch to the record, as a note of its first node.

    `kinds`: of `label_conversations`, if they are known.
    """
    graph = record if isinstance(record, TrajectoryGraph) else record.graph
    for note in _new_notes(graph, label_conversations(graph) if kinds is None else kinds):
        record.add_note(*note)


def _new_notes(graph: TrajectoryGraph, kinds: Mapping[int, ConversationKind]) -> list[tuple[int, str, str]]:
    """The notes for the kinds that the graph does not have."""
    known = recorded_kinds(graph)
    return [(node, KIND_NOTE, kind.value) for node, kind in kinds.items() if known.get(node) != kind]


# -- Session store ----------------------------------------------------------------------------------

SHUT_DOWN = "the gateway shuts down"
MAX_WORK_S = 0.01
"""Seconds for which expired sessions are ended at a time. The event loop does other work for as long in between."""


class SessionStore:
    """Creates, finds and ends sessions. Use it in one event loop."""

    def __init__(
        self,
        run_dir: Path,
        open_session: Callable[[ObservedRecorder, RolloutLimits, SessionInfo], Session],
        limits: RolloutLimits,
        expiry_s: float | None = None,
        admin_key: str | None = None,
        require_arguments: Callable[[Json], object] = dict,
    ) -> None:
        """`open_session`: makes the session of a record. `expiry_s`: seconds after which a session ends by itself.
        `admin_key`: key of the admin API, which no session may have. `require_arguments`: raises BadInputError for
        variables that the chat template of a new session does not have.
        """
        self._require_arguments = require_arguments
        self._admin_digest = None if admin_key is None else digest_of(admin_key)
        self._run_dir, self._open_session, self._limits, self._expiry_s = run_dir, open_session, limits, expiry_s
        self._infos = dict[str, SessionInfo]()
        self._ids_by_key = dict[str, str]()
        self._open = dict[str, Session]()
        self._ending = dict[str, asyncio.Task[SessionInfo]]()
        """The ends of sessions that have not reached the disk."""
        self._failed_ends = set[str]()
        """Ids of expired sessions whose failure to end is in the log."""
        self.closed_reason: str | None = None
        """Why `close` was called. None: the sessions are served."""
        self._files = RecordFiles()
        self._closing = set[int]()
        """Descriptors of records that are used no more. `wait_closed` closes them: a network file system may write all
        their data then."""
        run_dir.mkdir(parents=True, exist_ok=True)
        infos, self._unreadable = read_infos(run_dir)
        for info in infos:
            self._add(info)

    def create(
        self,
        session_id: str | None = None,
        *,
        key: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        expires_in_s: float | None = None,
        can_expire: bool = True,
    ) -> tuple[SessionInfo, str]:
        """Create a session. Returns the session and its secret key. `can_expire`: False for a session without an end.

        With the id, the key and the settings of a session, the same session is returned again: a client may repeat the
        call. Raises BadInputError for an id that is taken or cannot be the name of a file, for a key that cannot be
        used, and for wrong limits.
        """
        self._require_open()
        if key is not None:
            require_key("key", key, MIN_SESSION_KEY_CHARS)
        session_id, key = session_id or f"s-{secrets.token_hex(8)}", key or f"sk-{secrets.token_urlsafe(32)}"
        if (error := self._unreadable.get(session_id)) is not None:
            raise BadInputError(f"the session {session_id!r} cannot be created: {error}; choose another id")
        self._require_arguments(as_json("chat_template_kwargs", chat_template_kwargs))
        has_record, existing = session_file(self._run_dir, session_id).exists(), self._infos.get(session_id)
        expiry_s = (self._expiry_s if expires_in_s is None else expires_in_s) if can_expire else None
        created_at = time.time() if existing is None else existing.created_at
        info = SessionInfo(
            session_id,
            digest_of(key),
            created_at,
            None if expiry_s is None else created_at + require_seconds("expires_in_s", expiry_s),
            as_json("metadata", metadata),
            as_json("limits", limits),
            as_json("sampling_params", require_sampling_params(sampling_params or {})),
            as_json("chat_template_kwargs", chat_template_kwargs),
        )
        if existing is not None and existing.has_settings_of(info):
            return existing, key
        if existing is not None or has_record:
            raise BadInputError(f"there is a session {session_id!r} already; choose another id")
        if info.key_digest in self._ids_by_key:
            raise BadInputError(f"another session has the key of the new session {session_id!r}; choose another key")
        if info.key_digest == self._admin_digest:
            raise BadInputError(f"the session {session_id!r} cannot have the key of the admin API; choose another key")
        session_limits = limits_of(info, self._limits)
        if self._limits.has_token_limit:  # otherwise, the engine tells its context length later
            require_token_limit(session_limits)
        if not self._files.has_free:
            raise GatewayError(ErrorKind.OVERLOADED, f"the session {session_id!r} was not created: {TOO_MANY_FILES}")
        self._files.opening(lambda: write_info(self._run_dir, info))
        self._add(info)
        return info, key

    def find_by_key(self, key: str) -> str | None:
        """Id of the session with a key. None for a wrong key."""
        return self._ids_by_key.get(digest_of(key))  # the digest of a wrong key tells nothing about the right key

    @property
    def has_free_files(self) -> bool:
        """Whether the process can open further files."""
        return self._files.has_free

    @property
    def num_open(self) -> int:
        """Number of sessions that accept requests."""
        return sum(info.ended_at is None for info in self._infos.values())

    def info(self, session_id: str) -> SessionInfo:
        """A session. Raises GatewayError (404) for an unknown session, and if its settings could not be read."""
        if (error := self._unreadable.get(session_id)) is not None:
            message = f"the session {session_id!r} is not served: {error}; repair it and start the gateway again"
            raise GatewayError(ErrorKind.NOT_FOUND, message)
        if session_id not in self._infos:
            raise GatewayError(ErrorKind.NOT_FOUND, f"there is no session {session_id!r}")
        return self._infos[session_id]

    def infos(self) -> list[SessionInfo]:
        """All sessions, in the order of their creation."""
        return list(self._infos.values())

    def session(self, session_id: str) -> Session:
        """The session, for a turn. Raises GatewayError for an unknown session, and for one that has ended."""
        self._require_open()
        if session_id in self._ending:
            raise GatewayError(ErrorKind.OVERLOADED, f"the session {session_id!r} is being ended")
        info = self.info(session_id)
        if info.ended_at is not None or info.has_expired:
            reason = info.stop_reason or "expired"  # `end_expired` records the end
            raise GatewayError(ErrorKind.PERMISSION, f"the session {session_id!r} has ended ({reason})")
        opened = self._open.get(session_id)
        if opened is not None and not _has_failed(opened):
            return opened
        if opened is not None:
            _close_failed(opened)
        recorder = ObservedRecorder(self._run_dir, session_id, self._files)
        try:
            limits = remaining_limits(limits_of(info, self._limits), info.created_at)
            session = self._open_session(recorder, limits, info)
        except BaseException:
            recorder.close()  # the engine is not there yet, for example
            raise
        if opened is not None:
            session.continue_turns_of(opened)
        self._open[session_id] = session
        return session

    async def end(self, session_id: str, stop_reason: str = "done", **result: Any) -> SessionInfo:
        """End a session: abort its turns, and record the reward at the end of each trained conversation.

        `result`: the arguments of `with_result`. A session that has ended gets the result too. Disks are waited for in
        worker threads, also if the caller is cancelled. Raises BadInputError for values that are not allowed, and
        OSError if the end cannot be written: the session has not ended then.
        """
        while (running := self._ending.get(session_id)) is not None:
            await asyncio.wait((running,))
        self._ending[session_id] = task = asyncio.create_task(self._end(session_id, stop_reason, result))
        task.add_done_callback(lambda _: self._ending.pop(session_id))
        return await asyncio.shield(task)

    async def _end(self, session_id: str, stop_reason: str, result: Json) -> SessionInfo:
        self._require_open()
        info = with_result(self.info(session_id), stop_reason, **result)
        with self._record_to_end(session_id) as recorder:
            if recorder is not None:
                record_end(recorder, info)
                await self._files.opening_aside(recorder.flush)
            # After the record: a session that has ended has its reward in the record.
            await self._files.opening_aside(lambda: write_info(self._run_dir, info))
            self._add(info)
            if (opened := self._open.pop(session_id, None)) is not None:
                opened.close()  # while the record takes no turns
        self._files.refill()  # before a connection takes the files that the end gives back
        return info

    @contextlib.contextmanager
    def _record_to_end(self, session_id: str) -> Iterator[ObservedRecorder | None]:
        """The record of a session that ends, which takes no turns meanwhile. None without a file.

        An open session stays open: it has not ended if its end cannot be written.
        """
        opened = self._open.get(session_id)
        if opened is not None and opened.record is not None and not _has_failed(opened):
            with opened.record.ending():
                yield opened.record
            return
        if opened is not None:
            _close_failed(opened)
        if not session_file(self._run_dir, session_id).exists():
            yield None
            return
        recorder = ObservedRecorder(self._run_dir, session_id, self._files)
        with recorder, recorder.ending():
            yield recorder

    async def end_expired(self) -> None:
        """End the sessions whose time is over. A session that cannot be ended is tried again by the next call.

        The event loop does other work after each `MAX_WORK_S` seconds.
        """
        began_at = time.monotonic()
        for session_id in list(self._infos):
            if self.closed_reason is not None:
                return
            try:
                if self._infos[session_id].has_expired:
                    await self.end(session_id, "expired")
            except Exception:
                if session_id not in self._failed_ends:
                    self._failed_ends.add(session_id)
                    logger.exception("the session %s has expired and cannot be ended", session_id)
            if time.monotonic() - began_at >= MAX_WORK_S:
                await asyncio.sleep(MAX_WORK_S)
                began_at = time.monotonic()

    def record_file(self, session_id: str) -> Path:
        """The file of the session's record."""
        self.info(session_id)
        return session_file(self._run_dir, session_id)

    def close(self, reason: str = SHUT_DOWN, *, at_once: bool = True) -> None:
        """Abort all turns. The sessions are served again by the next gateway with this folder.

        `at_once` False: `wait_closed` closes the files of the records.
        """
        self.closed_reason = self.closed_reason or reason
        error = GatewayError(ErrorKind.OVERLOADED, f"{self.closed_reason}; send the request again")
        for session_id in self._open.keys() - self._ending.keys():
            session = self._open.pop(session_id)
            if session.record is not None and not at_once and (fd := session.record.detach()) is not None:
                self._closing.add(fd)
            session.close(error)

    async def wait_closed(self) -> None:
        """Wait until all files are closed, after `close`."""
        while self._ending:
            await asyncio.wait(self._ending.values())
        self.close(at_once=False)  # sessions that could not be ended
        await asyncio.gather(*map(self._close_aside, self._closing))
        self._files.close()

    async def _close_aside(self, descriptor: int) -> None:
        await run_aside(False, close_on_disk, descriptor)
        self._closing.discard(descriptor)

    @property
    def num_unwritten(self) -> int:
        """Number of records that were closed, or are ended, and are perhaps not on the disk."""
        return len(self._ending) + len(self._closing)

    def _require_open(self) -> None:
        if self.closed_reason is not None:
            raise GatewayError(ErrorKind.OVERLOADED, self.closed_reason)

    def _add(self, info: SessionInfo) -> None:
        self._infos[info.id] = info
        self._ids_by_key[info.key_digest] = info.id


def _has_failed(session: Session) -> bool:
    """Whether the record of a session could not be written. The file is read again then."""
    return session.record is not None and session.record.failure is not None


def _close_failed(session: Session) -> None:
    message = "the record of the session could not be written; send the request again"
    session.close(GatewayError(ErrorKind.OVERLOADED, message))
