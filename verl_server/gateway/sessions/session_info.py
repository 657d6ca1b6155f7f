"""`SessionInfo`: the settings and the result of a session, and the file that has them."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pydantic

from verl_server.agent.generate_fn import require_sampling_params
from verl_server.agent.limits import RolloutLimits
from verl_server.errors import BadInputError
from verl_server.gateway.errors import list_wrong_fields
from verl_server.gateway.sessions.conversation_kinds import ConversationKind
from verl_server.types import Json
from verl_server.validation import did_you_mean, is_finite_number, require_list, require_seconds

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


def new_info(
    session_id: str,
    key: str,
    created_at: float,
    expiry_s: float | None,
    metadata: Mapping[str, Any] | None,
    limits: Mapping[str, Any] | None,
    sampling_params: Mapping[str, Any] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> SessionInfo:
    """A session with these settings. Raises BadInputError for values that are not allowed."""
    return SessionInfo(
        session_id,
        digest_of(key),
        created_at,
        None if expiry_s is None else created_at + require_seconds("expires_in_s", expiry_s),
        as_json("metadata", metadata),
        as_json("limits", limits),
        as_json("sampling_params", require_sampling_params(sampling_params or {})),
        as_json("chat_template_kwargs", chat_template_kwargs),
    )


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
