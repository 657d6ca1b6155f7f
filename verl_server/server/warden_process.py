"""Wardens as `ServerProcess` sees them: how they start, and how they end when they do not end by themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

WARDEN_SCRIPT = Path(__file__).with_name("warden") / "warden_main.py"
#: Seconds to wait for the exit code of a warden that has ended or was killed.
WARDEN_EXIT_TIMEOUT_S = 5.0


class WardenProcess(Protocol):
    """A started warden that waits for its specification: the part of `subprocess.Popen` that `ServerProcess` uses."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


#: Starts a warden: `spawn_warden`, or the forkserver's.
WardenFactory = Callable[[], WardenProcess]


def spawn_warden() -> WardenProcess:
    """Start a warden in a new Python process and a new session. It imports the standard library only."""
    return subprocess.Popen(
        [sys.executable, "-I", str(WARDEN_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for_warden(warden: WardenProcess) -> int | None:
    """The exit code of a warden that ends. None if it has not ended after `WARDEN_EXIT_TIMEOUT_S`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return warden.wait(WARDEN_EXIT_TIMEOUT_S)
    return None


def kill_session(warden: WardenProcess) -> None:
    """Kill all processes of a warden's session. Used when the warden itself was killed or does not end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(warden.pid, signal.SIGKILL)


def discard_warden(warden: WardenProcess) -> int | None:
    """End a warden that has started no server, and close its pipes. Returns its exit code if it has one."""
    for pipe in (warden.stdin, warden.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()
    code = wait_for_warden(warden)
    if code is None:
        kill_session(warden)
        code = wait_for_warden(warden)
    return code
