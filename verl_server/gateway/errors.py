"""`GatewayError`: an error that a dialect writes in its own words, and the conversion of this library's errors."""

from __future__ import annotations

import enum
import errno
import logging
import math
import os
import re
import time
from collections.abc import Collection

import pydantic

from verl_server.errors import (
    BadInputError,
    ServerBusyError,
    UnsupportedError,
    VerlServerError,
)
from verl_server.validation import did_you_mean

LOG_INTERVAL_S = 10.0
"""Seconds between two errors of the engine of the same type in the log."""

DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
"""Numbers of the errors of files that cannot be written. No connection has such an error."""
OPEN_FILE_ERRORS = frozenset({errno.EMFILE, errno.ENFILE})
"""Numbers of the errors of a process, or of a machine, that has too many open files."""

MAX_ENGINE_CHARS = 200
"""Maximum number of characters of an engine's message in the error for the agent."""
_URL = re.compile(r"\bhttps?://[^\s'\",;)]+")
_FILE = re.compile(r"(?<![\w/.])(?:\[[\d:]+\] )?/(?:[\w.@+-]+/)+[\w.@+-]*(?::\d+)?(?:: )?")
"""The path of a file with the time before it and the number of the line after it, as in errors of xgrammar."""

logger = logging.getLogger(__name__)


class ErrorKind(enum.Enum):
    """What went wrong, with the HTTP status. Dialects have a word of their own for each kind."""

    INVALID_REQUEST = 400
    CONTEXT_OVERFLOW = 4001
    """Status 400, with words at which agents shorten their conversation."""
    AUTHENTICATION = 401
    PERMISSION = 403
    NOT_FOUND = 404
    TOO_LARGE = 413
    UNSUPPORTED_ENCODING = 415
    """The body is compressed in a way that the gateway does not know."""
    LIMIT_REACHED = 429
    """A limit of the session. Sending the request again does not help."""
    TOO_MANY_REQUESTS = 4291
    """Status 429: more requests at a time than the session may have. Agents send the request again."""
    OVERLOADED = 503
    """The engine cannot generate now. Agents send the request again."""
    INTERNAL = 500

    @property
    def status(self) -> int:
        """HTTP status."""
        return {ErrorKind.CONTEXT_OVERFLOW: 400, ErrorKind.TOO_MANY_REQUESTS: 429}.get(self, self.value)

    @property
    def is_retryable(self) -> bool:
        """Whether the same request can succeed later."""
        return self in (ErrorKind.TOO_MANY_REQUESTS, ErrorKind.OVERLOADED)


class GatewayError(Exception):
    """An error for the agent."""

    def __init__(
        self, kind: ErrorKind, message: str, *, num_tokens: int | None = None, max_tokens: int | None = None
    ) -> None:
        """`num_tokens`, `max_tokens`: tokens of the prompt and of the context, for `CONTEXT_OVERFLOW`."""
        super().__init__(message)
        self.kind, self.message = kind, message
        self.num_tokens, self.max_tokens = num_tokens, max_tokens


def overflow_error(num_tokens: int | None, max_tokens: int) -> GatewayError:
    """The error for a conversation that does not fit into the context. `num_tokens`: None if it is not known."""
    count = "more" if num_tokens is None else str(num_tokens)
    return GatewayError(
        ErrorKind.CONTEXT_OVERFLOW,
        f"the conversation has {count} tokens, and the context has room for {max_tokens}",
        num_tokens=num_tokens,
        max_tokens=max_tokens,
    )


def list_wrong_fields(error: pydantic.ValidationError, known: Collection[str] = ()) -> str:
    """What is wrong with the first fields, without their values: a value can be a secret, or very long.

    `known`: names of the fields, for an unknown field.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)
    lines = list[str]()
    for item in found[:3]:
        name, text = ".".join(map(str, item["loc"]))[:80], item["msg"][:200]
        if item["type"] == "extra_forbidden" and known:
            fields = f"; the fields are {', '.join(known)}"
            text = f"there is no such field{did_you_mean(name, known) or fields}"
        lines.append(f"{name}: {text}")
    return "; ".join(lines)


def as_gateway_error(error: Exception) -> GatewayError:
    """The error for the agent.

    It contains no stack trace, and nothing of a failure of the engine or of other code. Of a request that the engine
    refuses, it contains the engine's message, without URLs and paths of files.
    """
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, (BadInputError, UnsupportedError)):
        message = _shorten_refusal(error.message) if _is_of_engine(error) else error.message
        return GatewayError(ErrorKind.INVALID_REQUEST, message)
    if isinstance(error, ServerBusyError):
        return GatewayError(ErrorKind.OVERLOADED, "the engine is busy; send the request again")
    if isinstance(error, VerlServerError):
        return GatewayError(ErrorKind.OVERLOADED, "the engine does not answer; send the request again")
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        message = f"the gateway cannot write its files: {os.strerror(error.errno)}; send the request again"
        return GatewayError(ErrorKind.OVERLOADED, message)
    if isinstance(error, OSError) and error.errno in OPEN_FILE_ERRORS:
        message = f"the gateway cannot open its files: {os.strerror(error.errno)}; send the request again"
        return GatewayError(ErrorKind.OVERLOADED, message)
    return GatewayError(ErrorKind.INTERNAL, f"the gateway failed with {type(error).__name__}; see its log")


def _is_of_engine(error: Exception) -> bool:
    """Whether the engine has refused the request. This library's own errors name neither a status nor a URL."""
    return isinstance(error, (BadInputError, UnsupportedError)) and not error.details.keys().isdisjoint(
        ("status", "url")
    )


def _shorten_refusal(message: str) -> str:
    """The message of an engine without the URL of the engine and without paths of its files."""
    return _FILE.sub("", _URL.sub("the engine", message))[:MAX_ENGINE_CHARS]


class FailureLog:
    """Writes errors to the log of which agents get a short text only."""

    def __init__(self) -> None:
        self._logged_at = dict[type[Exception], float]()
        """Time of the last logged error of each type."""

    def as_gateway_error(self, error: Exception, request: str, request_id: str) -> GatewayError:
        """The error for the agent. `request`: name of the request for the log, without the key of the session.

        Each refusal of the engine is one line. Errors of the engine are logged once in `LOG_INTERVAL_S` seconds for
        each type: while an engine is down, each request fails.
        """
        found = as_gateway_error(error)
        if found is error:
            return found
        if _is_of_engine(error):
            logger.warning("%s was refused, request id %s: %r", request, request_id, str(error))
        elif found.kind is ErrorKind.INTERNAL or (found.kind is ErrorKind.OVERLOADED and self._is_due(type(error))):
            logger.error("%s failed, request id %s", request, request_id, exc_info=error)
        return found

    def _is_due(self, kind: type[Exception]) -> bool:
        """Whether no error of this type was logged in the last seconds. The error is logged now."""
        now = time.monotonic()
        if now - self._logged_at.get(kind, -math.inf) < LOG_INTERVAL_S:
            return False
        self._logged_at[kind] = now
        return True
