"""Interfaces between a server and those who need it: `Supervisor`, its process ids, and the `AbortCheck` of a start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from verl_server.errors import ServerDiedError, VerlServerError
from verl_server.server.cpu_time import SchedulerCpu
from verl_server.server.exit_status import ExitStatus

#: Called repeatedly while a server starts. Returns the error that ends the start, for example because another node has
#: failed, or None to continue.
AbortCheck = Callable[[], VerlServerError | None]


def never_abort() -> None:
    """The `AbortCheck` of a start that depends on nothing else."""


@dataclass(frozen=True)
class ServerPids:
    """Process ids of one server's process tree, on the machine of the server."""

    main: int
    """Server main: the process that becomes the engine's launcher and HTTP server."""
    warden: int | None
    """Leader of the warden's session: the warden itself if it was forked by a forkserver, otherwise the program that
    started the warden and waits for it. None when the server runs on another machine."""
    workers: tuple[int, ...]
    """Processes below the server main (schedulers, detokenizer). Empty when the server has ended or runs elsewhere."""


@runtime_checkable
class Supervisor(Protocol):
    """A started server as its adapter sees it: a `ServerProcess` of this machine, or a server on another machine."""

    @property
    def pids(self) -> ServerPids: ...

    @property
    def log_path(self) -> Path | None:
        """Path of the server's log file. None when the file is on another machine."""

    @property
    def exit(self) -> ExitStatus | None:
        """How the server ended. None while it lives."""

    def on_exit(self, listener: Callable[[ExitStatus], None]) -> None:
        """Call `listener` once when the server has ended, from another thread; at once if it has already ended."""

    def wait_exit(self, timeout_s: float) -> ExitStatus | None:
        """Wait until the server has ended. Returns None when it still lives after `timeout_s`."""

    def died(self, url: str) -> ServerDiedError:
        """The error for callers that needed the server. Call it only after the server has ended."""

    def keep_log(self) -> None:
        """Keep the log when the server is ended, because an error refers to it. The log of a crashed server is kept."""

    def stop(self, deadline_s: float = 10.0) -> None:
        """End the server and everything below it. May be called more than once."""

    def scheduler_cpu(self) -> SchedulerCpu:
        """CPU time of the server's schedulers and of their programs. Does not grow while it cannot be measured."""
