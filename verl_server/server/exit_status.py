"""How a server ended, and the notification of everyone who waits for it."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExitStatus:
    """How a server ended."""

    reason: str
    """Cause as the warden saw it: "stop", "trainer gone", "server gone", or "NAME gone" of the worker that ended,
    for example "sglang::scheduler gone"."""
    code: int | None
    """Exit code of the server main; negative for a signal. None when the server main did not end by itself."""
    log_tail: str
    """Last lines of the server's log."""

    def describe(self) -> str:
        """A short description for messages, for example "exit code 1" or "killed by SIGKILL"."""
        if self.code is None:
            is_worker = "::" in self.reason and self.reason.endswith(" gone")
            return f"its worker {self.reason}" if is_worker else self.reason
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        return f"exit code {self.code}"


class ExitNotifier:
    """The end of one server, recorded once and reported to all listeners and waiting threads."""

    def __init__(self) -> None:
        self._exit: ExitStatus | None = None
        self._exited = threading.Event()
        self._listeners: list[Callable[[ExitStatus], None]] = []
        self._lock = threading.Lock()

    @property
    def exit(self) -> ExitStatus | None:
        """How the server ended. None while it lives."""
        return self._exit

    def on_exit(self, listener: Callable[[ExitStatus], None]) -> None:
        """Call `listener` once when the server has ended, from another thread; at once if it has already ended."""
        with self._lock:
            if self._exit is None:
                self._listeners.append(listener)
                return
        listener(self._exit)

    def wait_exit(self, timeout_s: float) -> ExitStatus | None:
        """Wait until the server has ended. Returns None when it still lives after `timeout_s`."""
        self._exited.wait(timeout_s)
        return self._exit

    def note_exit(self, exit_status: ExitStatus) -> None:
        """Record the end of the server and notify everyone who waits. Later calls do nothing."""
        with self._lock:
            if self._exit is not None:
                return
            self._exit = exit_status
            listeners, self._listeners = self._listeners, []
        self._exited.set()
        logger.info("a server ended: %s", exit_status.describe())
        for listener in listeners:
            try:
                listener(exit_status)
            except Exception:  # the error of one listener must not hide the end from the others
                logger.exception("a listener failed when a server ended")


def _signal_name(number: int) -> str:
    """Name of a signal. Of the real-time signals, only the first and the last have names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
