"""Signals that end the `verl-server` command: they are raised as an exception, so that all processes are ended."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import typer


class StopRequested(BaseException):
    """A signal asked this command to end. Not an `Exception`, so that no handler of errors catches it."""

    def __init__(self, number: int) -> None:
        self.number = number


class StopSignals:
    """Raises `StopRequested` on the first signal and ignores later signals, so that the cleanup can finish."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.is_server_ready = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        # A signal that was ignored before, as by nohup, stays ignored: the command outlives its terminal.
        numbers = [number for number in self.NUMBERS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._stop) for number in numbers}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: FrameType | None) -> NoReturn:
        for other in self.NUMBERS:
            signal.signal(other, signal.SIG_IGN)
        raise StopRequested(number)


@contextlib.contextmanager
def exit_after_cleanup() -> Iterator[None]:
    """After a signal, end the command when the body has cleaned up. The exit code is 128 and the signal's number."""
    try:
        with StopSignals():
            yield
    except StopRequested as stop:
        raise typer.Exit(128 + stop.number) from None
