"""The exceptions of this library.

    VerlServerError
    ├── BadInputError            an argument is invalid; nothing changed
    │   ├── WeightManifestError  a tensor does not fit the served model (name, shape, dtype, missing)
    │   └── UserCodeError        code of a tool, a reward or an agent loop uses this library in a wrong way
    ├── UnsupportedError         this machine or this version of the engine does not support the operation
    ├── StartupError             a server ended before it was ready, or its environment cannot run it
    ├── ServerDiedError          a server process ended while it was in use
    ├── ServerError              the server replied with an error
    │   ├── NotReadyError        retryable: the server is starting, paused, or its memory is released
    │   └── ServerBusyError      retryable: the server is running requests, or its queue is full
    ├── DeadlineError            an operation did not finish before its deadline
    ├── PeerError                another trainer rank failed, ended, or did not make the same call
    ├── TornWeightsError         the served weights are not whole; retryable as an update of all tensors
    ├── InfrastructureError      retryable: the environment of a sample failed, for example a container
    └── ShutDownError            the engine, adapter, fleet or router was already shut down

`error.retryable` is True when the same call can succeed later without a change of its arguments.

Every exception can be sent between processes as plain JSON (`to_wire`, `from_wire`), so that another process raises
the same type with the same message. This module imports neither torch, ray nor sglang.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import orjson


class VerlServerError(Exception):
    """Base class of the exceptions that this library raises.

    `message` says what happened, what was expected and what to do. `details` holds plain JSON values for programs:
    `url`, `ranks`, `exit_code`, `log_tail` and so on; keys without a value are absent. `str(error)` is the message,
    followed by the end of the server's log where `details` has a `log_tail`.
    """

    retryable: ClassVar[bool] = False
    """Whether the same call can succeed later without a change of its arguments."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Any] = {key: value for key, value in details.items() if value is not None}

    def __copy__(self) -> Self:
        """An error of its own for one caller: with details of its own, and without the traceback."""
        other = type(self).__new__(type(self), self.message)
        other.__dict__.update(self.__dict__, details=dict(self.details))
        other.__cause__ = self.__cause__
        return other

    def __str__(self) -> str:
        tail = self.details.get("log_tail")
        if not tail:
            return self.message
        return f"{self.message}\n--- end of the server's log ---\n{tail.rstrip()}\n---"


class BadInputError(VerlServerError, ValueError):
    """An argument is invalid. Nothing changed.

    Raised when this library refuses an argument before it sends a request, or when the server refuses it (HTTP 400, 413
    or 422). `details`: `status`, `url` and `body` when the server refused it. To do: correct the argument that the
    message names.
    """


class UserCodeError(BadInputError):
    """Code of a tool, a reward or an agent loop uses this library in a wrong way, which the policy cannot avoid.

    Raised in a tool, it fails the sample and does not become a result that the policy reads. To do: correct the code as
    the message says.
    """


class WeightManifestError(BadInputError):
    """A tensor cannot be loaded: an unknown name, another shape or dtype, or values that `check_finite` refuses.

    Raised before generation is paused where the whole update is known then. `details`: `name`, `expected` and `got`
    (shapes as lists, dtypes as text). To do: send the tensors by their Hugging Face names, with their full shapes; for
    values that are not finite, look for the training step that made them.
    """


class UnsupportedError(VerlServerError):
    """This machine or this version of the engine does not support the operation.

    `details`: `status`, `url` and `body` when the server has no such endpoint. To do: follow the message, which names
    what is missing; `verl-server doctor` lists the supported versions.
    """


class StartupError(VerlServerError):
    """A server process ended before the server was ready, or the environment of the server cannot run it.

    `details`: `exit_code`, `log_tail` (the end of the server's log), `log_path`. To do: read the end of the log, then
    run `verl-server doctor MODEL --tp N`. Without a log, the message names what the environment lacks.
    """


class ServerDiedError(VerlServerError):
    """A server process ended while it was in use: out of memory, killed, or crashed.

    Every call that waits for the server raises it at once. `details`: `exit_code` (negative: the number of the
    signal), `log_tail`, `log_path`, `url`. To do: create a new engine. In a fleet, lost replicas are started again.
    """


class ServerError(VerlServerError):
    """The server replied with an error that has no class of its own.

    `details`: `status` (of HTTP), `url`, `body` (the server's own message), `key` (name of the key that the
    server refused), `token_index` (of an output token whose log probability is NaN). To do: read the message.
    """


class NotReadyError(ServerError):
    """The server is starting, paused, or its memory is released, so it cannot serve this call now.

    `details`: `status`, `url` and `body` when the server itself refused. To do: call `resume_memory_occupation` or
    `continue_generation`, or wait until a replica is ready; then call again.
    """

    retryable = True


class ServerBusyError(ServerError):
    """The server refused the call because it is running requests, or because its queue is full.

    `details`: `status`, `url` and `body` when the server itself refused; `queued_requests` (their number)
    from a router. To do: wait until the requests are finished, or abort them; then call again.
    """

    retryable = True


class DeadlineError(VerlServerError, TimeoutError):
    """An operation did not finish before its deadline. The process that it waited for is not known to have ended.

    `details`: `operation` (what was waited for), `seconds` (the deadline), `url`, `log_path`. To do: raise the deadline
    in `Timeouts` if the model needs longer; otherwise the server hangs and must be started again.
    """


class PeerError(VerlServerError):
    """Another trainer rank failed, ended, or did not make the same call.

    `details`: `ranks` (list of rank numbers), `operation` (the call). To do: read the error of the named ranks. All
    ranks must make the same calls in the same order.
    """


class TornWeightsError(VerlServerError):
    """The served weights are not whole: an update failed part-way, or their memory was released and resumed.

    The engine refuses to generate. After a failed update, generation also stays paused on the servers.
    `details`: `cause` (type of the error that stopped the update) and that error's own details. To do: send an update
    of all tensors, which repairs the weights. `retryable` is always True, but generations and updates of some tensors
    raise the error again until such an update has succeeded. An explicit `weight_version` must be above that of the
    last update that succeeded.
    """

    retryable = True


class InfrastructureError(VerlServerError):
    """The environment of a sample failed, for example a container or a service. The policy did not cause the failure.

    Sandboxes raise it. Raise it yourself in `Environment.setup`, in a tool or in a reward. The sample is attempted
    again with another environment, from its recorded turns. A sample that fails again has the stop reason `error`, so
    that nothing is trained on it.
    """

    retryable = True


class ProgramError(VerlServerError):
    """The program of a sample failed, or it has not used the policy. `ProgramAgentLoop` raises it.

    `details`: `exit_code`, and `stderr` and `stdout`, the ends of the outputs. The sample has the stop reason `error`.
    To do: read the outputs. If the policy can cause the exit code, for example by a wrong command, write a command that
    ends with 0: `claude -p "$PROMPT" || true`.
    """


class ShutDownError(VerlServerError):
    """The engine, adapter, fleet or router was already shut down. `details` is empty. To do: create a new object."""


def _class_by_name(base: type[VerlServerError]) -> dict[str, type[VerlServerError]]:
    """`base` and all of its subclasses, by name."""
    classes = {base.__name__: base}
    for subclass in base.__subclasses__():
        classes.update(_class_by_name(subclass))
    return classes


def to_wire(error: BaseException) -> dict[str, Any]:
    """Convert an exception to plain JSON values.

    An exception that is not of this library, for example a ValueError of a tool, keeps the name of its type. A value
    that JSON cannot carry becomes text.
    """
    message, details = (error.message, error.details) if isinstance(error, VerlServerError) else (str(error), {})
    return {
        "type": type(error).__name__,
        "message": _plain_json(message),
        "details": {name: _plain_json(value) for name, value in details.items()},
    }


def _plain_json(value: Any) -> Any:
    """The value itself, or a text instead of a value that JSON cannot carry, for example an unpaired surrogate."""
    try:
        orjson.dumps(value)
    except TypeError:
        text = value if isinstance(value, str) else repr(value)
        return text.encode("utf-8", "backslashreplace").decode()
    return value


def from_wire(wire: dict[str, Any]) -> VerlServerError:
    """Make the exception that `to_wire` converted.

    An exception that is not of this library becomes a `VerlServerError` whose message begins with the type's name.
    """
    error_class = _class_by_name(VerlServerError).get(wire["type"])
    if error_class is None:
        return VerlServerError(f"{wire['type']}: {wire['message']}", **wire["details"])
    return error_class(wire["message"], **wire["details"])
