"""The events that a warden sends to the trainer, one JSON line each. Imports the standard library only."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the warden itself imports the standard library only
    from verl_server.types import Json


def emit(event: Json) -> None:
    """Send an event to the trainer."""
    with contextlib.suppress(OSError):  # the trainer has ended, so nobody reads the events
        os.write(1, json.dumps(event).encode() + b"\n")


def emit_exit(reason: str, exit_code: int | None, log_tail: str) -> None:
    """Report the end of the server. It must be the last event."""
    emit({"event": "exited", "reason": reason, "code": exit_code, "tail": log_tail})


def describe_failure(error: Exception) -> str:
    """The reason of an end that an error of the warden itself causes. Its standard error has the traceback."""
    return f"warden failed: {type(error).__name__}: {error}"
