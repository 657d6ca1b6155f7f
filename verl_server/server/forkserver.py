"""The trainer's end of a forkserver (`forkserver_main.py`): wardens whose servers have nothing left to import."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from typing import IO

from verl_server.errors import DeadlineError
from verl_server.server.forkserver_main import FORK, READY
from verl_server.server.process import AbortCheck, WardenProcess, base_env, rendezvous_variables, spawn_warden

logger = logging.getLogger(__name__)

POLL_S = 0.05
FORK_S = 10.0
END_S = 5.0


class ForkedWarden:
    """The part of `subprocess.Popen` that `ServerProcess` uses, of a process that is not our child."""

    def __init__(self, pid: int, pidfd: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._pidfd = pidfd
        weakref.finalize(self, os.close, pidfd)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code is its parent's to know: 0 here, whatever it was."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1e3):
            raise subprocess.TimeoutExpired("the warden", timeout or 0.0)
        return 0


class Forkserver:
    """Owns one process, from here to `close`. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self._commands, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            drop = rendezvous_variables()
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "verl_server.server.forkserver_main",
                    str(os.getpid()),
                ],  # not this folder's
                stdin=theirs.fileno(),
                stdout=self._said,
                stderr=self._said,
                env={name: value for name, value in os.environ.items() if name not in drop} | base_env(),
                start_new_session=True,
            )
        except BaseException:
            self._commands.close()
            self._said.close()
            raise
        finally:
            theirs.close()
        self._ready: bool | None = None
        """None: not yet."""

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def is_unfit(self) -> bool:
        """Whether it ended by itself: another one would, too."""
        return self._process.poll() is not None and self._process.returncode > 0

    def wait_ready(self, deadline_s: float, check_abort: AbortCheck) -> bool:
        """Whether it can fork. False: it has ended, and says why in the log.

        Raises DeadlineError, and what `check_abort` returns.
        """
        deadline = time.monotonic() + deadline_s
        while self._ready is None:
            if (reason := check_abort()) is not None:
                raise reason
            with self._lock:
                if self._ready is None and self._has_spoken():
                    self._ready = self._word() == READY
                    if not self._ready:
                        self._say_why()
            if time.monotonic() > deadline:
                raise DeadlineError(f"the servers' forkserver was not ready after {deadline_s:g} s", operation="start")
        return self._ready

    def _has_spoken(self) -> bool:
        """Within a moment."""
        if self._commands.fileno() < 0:  # closed by another thread
            return True
        return bool(select.select([self._commands], [], [], POLL_S)[0])

    def _word(self) -> bytes:
        try:
            return self._commands.recv(64)
        except OSError:
            return b""

    def _say_why(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        words = ""
        with contextlib.suppress(ValueError):  # closed by another thread
            self._said.seek(0)
            words = self._said.read()[-2000:].decode("utf-8", "replace").strip()
        logger.warning("servers are started one by one, since their forkserver ended: %s", words or "killed")

    def warden(self) -> WardenProcess:
        """One that forks its server. Where the forkserver cannot (any more), one that starts it as usual."""
        try:
            return self._forked()
        except (OSError, ValueError) as error:
            logger.warning("the servers' forkserver does not answer: %s: %s", type(error).__name__, error)
            self.close()
            return spawn_warden()

    def _forked(self) -> WardenProcess:
        with contextlib.ExitStack() as undo:
            theirs_in, ours_in = os.pipe()
            undo.callback(os.close, theirs_in)
            stdin = undo.enter_context(os.fdopen(ours_in, "wb"))
            ours_out, theirs_out = os.pipe()
            undo.callback(os.close, theirs_out)
            stdout = undo.enter_context(os.fdopen(ours_out, "rb"))
            with self._lock:
                self._commands.settimeout(FORK_S)
                socket.send_fds(self._commands, [FORK], [theirs_in, theirs_out, 2])
                word, pidfds, *_ = socket.recv_fds(self._commands, 64, 1)
            (pidfd,) = pidfds
            warden = ForkedWarden(int(word), pidfd, stdin, stdout)
            undo.pop_all()
        os.close(theirs_in)
        os.close(theirs_out)
        return warden

    def close(self) -> None:
        """Its servers are not touched. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._commands.shutdown(socket.SHUT_RDWR)  # a fork of ours may hold it open
        self._commands.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._said.close()
