"""How a server ended, and who is told: the same for one of this machine and one that somebody looks after elsewhere."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from verl_server.errors import ServerDiedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExitStatus:
    """How a server ended. `code` is the exit code, negative for a signal; None when we ended it."""

    reason: str
    code: int | None
    log_tail: str

    def describe(self) -> str:
        if self.code is None:
            return f"its {self.reason}" if self.reason.startswith("sglang::") else self.reason
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        return f"exit code {self.code}"


class ExitNotifier:
    """An end that is told once, to whoever waits for it or listens."""

    def __init__(self) -> None:
        self._exit: ExitStatus | None = None
        self._exited = threading.Event()
        self._listeners: list[Callable[[ExitStatus], None]] = []
        self._lock = threading.Lock()

    @property
    def exit(self) -> ExitStatus | None:
        """How the server ended, or None while it lives."""
        return self._exit

    def on_exit(self, listener: Callable[[ExitStatus], None]) -> None:
        """Call `listener` once, from another thread, when the server has ended; at once if it has."""
        with self._lock:
            if self._exit is None:
                self._listeners.append(listener)
                return
        listener(self._exit)

    def wait_exit(self, timeout_s: float) -> ExitStatus | None:
        """Wait until the server has ended; None if it lives on."""
        self._exited.wait(timeout_s)
        return self._exit

    def note_exit(self, ended: ExitStatus) -> None:
        """Tell everybody who waits, the first time."""
        with self._lock:
            if self._exit is not None:
                return
            self._exit = ended
            listeners, self._listeners = self._listeners, []
        self._exited.set()
        logger.info("a server ended: %s", ended.describe())
        for listener in listeners:
            listener(ended)


class Supervisor(Protocol):
    """Whoever started a server and sees to its end: a `ServerProcess`, or somebody on another machine."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exit(self) -> ExitStatus | None:
        """How the server ended, or None while it lives."""

    def on_exit(self, listener: Callable[[ExitStatus], None]) -> None: ...
    def wait_exit(self, timeout_s: float) -> ExitStatus | None: ...
    def died(self, url: str) -> ServerDiedError: ...
    def stop(self, deadline_s: float = 10.0) -> None: ...
    def scheduler_seconds(self) -> float:
        """Processor time that its schedulers have used; also stands still when it cannot be asked."""
