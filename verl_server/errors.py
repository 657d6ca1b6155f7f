"""The one error tree.

    VerlServerError
    ├── BadInputError            the caller's argument is wrong; nothing was sent, nothing changed
    │   └── WeightManifestError  a tensor that this model does not accept (name, shape, dtype, missing)
    ├── UnsupportedError         this machine or this engine version cannot do it; the message says why
    ├── StartupError             a server did not become ready; carries its last words
    ├── ServerDiedError          a server process ended; carries exit code and log tail
    ├── ServerError              the server answered with an error; carries status, URL and its words
    │   ├── NotReadyError        retryable: paused, asleep or starting
    │   └── ServerBusyError      refused because requests are running
    ├── DeadlineError            a wait outlived its deadline
    ├── PeerError                another trainer rank failed, died or did not arrive
    ├── TornWeightsError         an update failed half-way; retryable after a whole update
    └── ShutDownError            the engine was already shut down

Every error can travel between trainer ranks as plain JSON (`to_wire`, `from_wire`) so that each
rank raises the same type with the same message. Nothing here imports torch, ray or sglang.
"""

from __future__ import annotations

from typing import Any, ClassVar


class VerlServerError(Exception):
    """Base of everything that this library raises on purpose.

    `details` holds plain JSON values that callers may branch on (URL, rank, exit code, log tail);
    the message already contains what a person needs.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = {key: value for key, value in details.items() if value is not None}

    def __str__(self) -> str:
        tail = self.details.get("log_tail")
        if not tail:
            return self.message
        return f"{self.message}\n--- last words of the server ---\n{tail.rstrip()}\n--- end ---"


class BadInputError(VerlServerError, ValueError):
    """The caller's argument is wrong. Nothing was sent and nothing changed."""


class WeightManifestError(BadInputError):
    """A pushed tensor does not fit the served model. `details`: name, expected, got."""


class UnsupportedError(VerlServerError):
    """This machine or this engine version cannot do what was asked."""


class StartupError(VerlServerError):
    """A server process did not become ready. `details`: exit_code, log_tail, log_path."""


class ServerDiedError(VerlServerError):
    """A server process ended while it was needed. `details`: exit_code, log_tail, log_path."""


class ServerError(VerlServerError):
    """The server answered, with an error. `details`: status, url, body."""


class NotReadyError(ServerError):
    """The server is paused, asleep or starting. Try again when it has been resumed."""

    retryable = True


class ServerBusyError(ServerError):
    """Refused because requests are running or queued. Try again when they are done."""

    retryable = True


class DeadlineError(VerlServerError, TimeoutError):
    """A wait outlived its deadline. `details`: operation, seconds."""


class PeerError(VerlServerError):
    """Another trainer rank failed, died or did not arrive. `details`: ranks, operation."""


class TornWeightsError(VerlServerError):
    """The served weights are partly new, partly old. Push a whole update to go on."""

    retryable = True


class ShutDownError(VerlServerError):
    """The engine was already shut down."""


def _tree(cls: type[VerlServerError]) -> dict[str, type[VerlServerError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found.update(_tree(child))
    return found


def to_wire(error: BaseException) -> dict[str, Any]:
    """An error as plain JSON. A foreign exception travels as `PeerError` with its type named."""
    if isinstance(error, VerlServerError):
        return {"type": type(error).__name__, "message": error.message, "details": error.details}
    return {"type": "PeerError", "message": f"{type(error).__name__}: {error}", "details": {}}


def from_wire(wire: dict[str, Any]) -> VerlServerError:
    """The error that `to_wire` described; an unknown type becomes the base class."""
    cls = _tree(VerlServerError).get(wire["type"], VerlServerError)
    return cls(wire["message"], **wire["details"])
