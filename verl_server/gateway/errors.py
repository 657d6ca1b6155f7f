"""`GatewayError`: an error that a dialect writes in its own words, and the conversion of this library's errors."""

from __future__ import annotations

import enum

from verl_server.errors import (
    BadInputError,
    DeadlineError,
    NotReadyError,
    ServerBusyError,
    ShutDownError,
    VerlServerError,
)


class ErrorKind(enum.Enum):
    """What went wrong, with the HTTP status. Dialects have a word of their own for each kind."""

    INVALID_REQUEST = 400
    CONTEXT_OVERFLOW = 4001
    """Status 400, with words at which agents shorten their conversation."""
    AUTHENTICATION = 401
    PERMISSION = 403
    NOT_FOUND = 404
    TOO_LARGE = 413
    LIMIT_REACHED = 429
    """A limit of the session. Sending the request again does not help."""
    OVERLOADED = 503
    """The engine cannot generate now. Agents send the request again."""
    INTERNAL = 500

    @property
    def status(self) -> int:
        """HTTP status."""
        return 400 if self is ErrorKind.CONTEXT_OVERFLOW else self.value


class GatewayError(Exception):
    """An error for the agent."""

    def __init__(
        self, kind: ErrorKind, message: str, *, num_tokens: int | None = None, max_tokens: int | None = None
    ) -> None:
        """`num_tokens`, `max_tokens`: tokens of the prompt and of the context, for `CONTEXT_OVERFLOW`."""
        super().__init__(message)
        self.kind, self.message = kind, message
        self.num_tokens, self.max_tokens = num_tokens, max_tokens


def as_gateway_error(error: Exception) -> GatewayError:
    """The error for the agent. It contains no stack trace, and nothing of an error that is not of this library."""
    if isinstance(error, GatewayError):
        return error
    if isinstance(error, BadInputError):
        return GatewayError(ErrorKind.INVALID_REQUEST, error.message)
    if isinstance(error, (NotReadyError, ServerBusyError, DeadlineError, ShutDownError)):
        return GatewayError(ErrorKind.OVERLOADED, error.message)
    if isinstance(error, VerlServerError):
        return GatewayError(ErrorKind.OVERLOADED, error.message)
    return GatewayError(ErrorKind.INTERNAL, f"the gateway failed with {type(error).__name__}; see its log")
