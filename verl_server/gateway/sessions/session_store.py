"""`SessionStore`: the sessions of a gateway, their keys, and the end of each session.

The folder of a run has for each session `<id>.jsonl`, the record, and `<id>.session.json`: the digest of the key, the
settings and the result. A gateway that is started again with the same folder serves the sessions again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pydantic

from verl_server.agent.episodes.segments import find_segments
from verl_server.agent.generate_fn import require_sampling_params
from verl_server.agent.limits import RolloutLimits
from verl_server.errors import BadInputError
from verl_server.gateway.errors import ErrorKind, GatewayError, list_wrong_fields
from verl_server.gateway.sessions.session import Session
from verl_server.trajectory.recorder import Recorder, session_file
from verl_server.types import Json
from verl_server.validation import is_finite_number, require_seconds

logger = logging.getLogger(__name__)

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
    ended_at: float | None = None
    """Seconds since 1970 at which the session was ended. None while it accepts requests."""
    stop_reason: str | None = None
    reward: float | None = None
    rewards: Json = field(default_factory=dict)

    def public(self) -> Json:
        """The fields for the admin API, without the digest of the key."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "key_digest"}


class SessionStore:
    """Creates, finds and ends sessions. Use it in one event loop."""

    def __init__(
        self,
        run_dir: Path,
        open_session: Callable[[Recorder, RolloutLimits, Json], Session],
        limits: RolloutLimits,
        expiry_s: float | None = None,
    ) -> None:
        """`open_session`: makes the session of a record. `expiry_s`: seconds after which a session ends by itself."""
        self._run_dir, self._open_session, self._limits, self._expiry_s = run_dir, open_session, limits, expiry_s
        self._infos = dict[str, SessionInfo]()
        self._ids_by_key = dict[str, str]()
        self._open = dict[str, Session]()
        self._is_closed = False
        run_dir.mkdir(parents=True, exist_ok=True)
        for path in sorted(run_dir.glob(f"*{SETTINGS_SUFFIX}")):
            self._add(_read_info(path))

    def create(
        self,
        session_id: str | None = None,
        *,
        key: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        expires_in_s: float | None = None,
    ) -> tuple[SessionInfo, str]:
        """Create a session. Returns the session and its secret key.

        Raises BadInputError for an id that is taken or cannot be the name of a file, and for wrong limits.
        """
        session_id, key = session_id or f"s-{secrets.token_hex(8)}", key or f"sk-{secrets.token_urlsafe(32)}"
        has_record = session_file(self._run_dir, session_id).exists()
        if session_id in self._infos or has_record:
            raise BadInputError(f"there is a session {session_id!r} already; choose another id")
        now, expiry_s = time.time(), expires_in_s or self._expiry_s
        info = SessionInfo(
            session_id,
            _digest(key),
            now,
            None if expiry_s is None else now + require_seconds("expires_in_s", expiry_s),
            _as_json("metadata", metadata),
            _as_json("limits", limits),
            _as_json("sampling_params", require_sampling_params(sampling_params or {})),
        )
        if info.key_digest in self._ids_by_key:
            raise BadInputError(f"another session has the key of the new session {session_id!r}; choose another key")
        require_token_limit(self._limits_of(info))
        self._write(info)
        self._add(info)
        return info, key

    def find_by_key(self, key: str) -> str | None:
        """Id of the session with a key. None for a wrong key."""
        return self._ids_by_key.get(_digest(key))  # the digest of a wrong key tells nothing about the right key

    def info(self, session_id: str) -> SessionInfo:
        """A session. Raises GatewayError (404) for an unknown session."""
        if session_id not in self._infos:
            raise GatewayError(ErrorKind.NOT_FOUND, f"there is no session {session_id!r}")
        return self._infos[session_id]

    def infos(self) -> list[SessionInfo]:
        """All sessions, in the order of their creation."""
        return sorted(self._infos.values(), key=lambda info: info.created_at)

    def session(self, session_id: str) -> Session:
        """The session, for a turn. Raises GatewayError for an unknown session, and for one that has ended."""
        if self._is_closed:
            raise GatewayError(ErrorKind.OVERLOADED, "the gateway shuts down")
        self._end_if_expired(self.info(session_id))
        info = self.info(session_id)
        if info.ended_at is not None:
            raise GatewayError(ErrorKind.PERMISSION, f"the session {session_id!r} has ended ({info.stop_reason})")
        if session_id in self._open and self._open[session_id].record.failure is not None:
            self._open.pop(session_id).close()  # the disk was full, for example: the file is read again
        if session_id not in self._open:
            recorder = Recorder(self._run_dir, session_id, sync=False)
            self._open[session_id] = self._open_session(recorder, self._limits_of(info), info.sampling_params)
        return self._open[session_id]

    def end(
        self,
        session_id: str,
        stop_reason: str = "done",
        *,
        reward: float | None = None,
        rewards: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> SessionInfo:
        """End a session: abort its turns, and record the reward at the end of each of its conversations.

        A session that has ended gets the reward too.
        """
        info = self.info(session_id)
        given = _as_json("the result", {"stop_reason": stop_reason, "rewards": _as_rewards(rewards or {})})
        info = dataclasses.replace(
            info,
            ended_at=info.ended_at or time.time(),
            stop_reason=info.stop_reason or given["stop_reason"],
            metadata=info.metadata | _as_json("metadata", metadata),
        )
        if reward is not None:
            info.reward = _as_rewards({"reward": reward})["reward"]
        if rewards:
            info.rewards = given["rewards"]
        self._write(info)
        self._add(info)
        opened = self._open.pop(session_id, None)
        if opened is not None:
            opened.close()
        with_record = session_file(self._run_dir, session_id).exists()
        if with_record:
            with Recorder(self._run_dir, session_id) as recorder:
                _terminate(recorder, info)
        return info

    def end_expired(self) -> None:
        """End the sessions whose time is over."""
        for info in list(self._infos.values()):
            try:
                self._end_if_expired(info)
            except Exception:
                logger.exception("the session %s has expired and cannot be ended", info.id)

    def _end_if_expired(self, info: SessionInfo) -> None:
        if info.ended_at is None and info.expires_at is not None and time.time() > info.expires_at:
            self.end(info.id, "expired")

    def record_file(self, session_id: str) -> Path:
        """The file of the session's record."""
        self.info(session_id)
        return session_file(self._run_dir, session_id)

    def close(self) -> None:
        """Abort all turns. The sessions are served again by the next gateway with this folder."""
        self._is_closed = True
        for session in self._open.values():
            session.close(is_shutdown=True)
        self._open.clear()

    def _limits_of(self, info: SessionInfo) -> RolloutLimits:
        try:
            return dataclasses.replace(self._limits, **info.limits)
        except TypeError as error:
            raise BadInputError(f"the limits of the session are wrong: {error}") from error

    def _add(self, info: SessionInfo) -> None:
        self._infos[info.id] = info
        self._ids_by_key[info.key_digest] = info.id

    def _write(self, info: SessionInfo) -> None:
        path = self._run_dir / f"{info.id}{SETTINGS_SUFFIX}"
        temporary = path.with_suffix(".new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o600)  # the file may exist: a process was killed while it wrote
            file.write(orjson.dumps(dataclasses.asdict(info)))
        os.replace(temporary, path)


def _read_info(path: Path) -> SessionInfo:
    try:
        info = pydantic.TypeAdapter(SessionInfo).validate_python(orjson.loads(path.read_bytes()))
    except pydantic.ValidationError as error:
        found = list_wrong_fields(error)
    except (OSError, ValueError) as error:
        found = str(error)
    else:
        if path.name == f"{info.id}{SETTINGS_SUFFIX}":
            return info
        found = f"the settings are those of the session {info.id!r:.80}"
    raise BadInputError(f"{path} cannot be read as the settings of a session: {found}; move the file away")


def _terminate(recorder: Recorder, info: SessionInfo) -> None:
    """Record the end of the session: each path to a last turn is trained, and has the reward."""
    graph = recorder.graph
    if not graph.nodes:
        return
    turns = [[node.id for node in graph.path(leaf) if node.sampled and node.token_ids] for leaf in graph.leaves]
    segments = find_segments(graph, [(path[-1], 1.0) for path in turns if path])
    if info.reward is not None:
        for segment in segments:
            graph.set_rewards(segment.leaf, [info.reward])
    last = segments[-1].leaf if segments else graph.nodes[-1].id
    ends = [(segment.leaf, segment.loss_weight) for segment in segments]
    recorder.terminate(last, info.stop_reason or "done", None, info.reward, ends, info.rewards)


def require_token_limit(limits: RolloutLimits) -> None:
    """Raise BadInputError for limits without a limit of the number of tokens: a turn needs one."""
    if not limits.has_token_limit:
        raise BadInputError(
            "the number of tokens has no limit, and the engine does not tell its context length; pass "
            "max_context_tokens in the limits"
        )


def _as_json(name: str, value: Any) -> Json:
    """A copy of a mapping with the types that JSON has. Raises BadInputError for a value that JSON does not have."""
    if not isinstance(value, Mapping | None):
        raise BadInputError(f"{name} must be a dict, got {type(value).__name__}")
    nested: Any = dict(value or {})
    for _ in range(OUTER_LEVELS):
        nested = [nested]
    try:
        encoded = orjson.dumps(nested)
    except TypeError as error:  # also for text that is no Unicode, and for too many levels
        raise BadInputError(f"{name} must have values of JSON only: {error}") from None
    copy: Any = orjson.loads(encoded)
    for _ in range(OUTER_LEVELS):
        copy = copy[0]
    result: Json = copy
    return result


def _as_rewards(rewards: Mapping[str, Any]) -> Json:
    for name, value in rewards.items():
        if not is_finite_number(value):
            raise BadInputError(f"rewards must be finite numbers, but {name!r:.80} is {value!r:.80}")
    return {name: float(value) for name, value in rewards.items()}


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
