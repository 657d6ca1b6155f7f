"""The trainer's side of a forkserver process (`forkserver_main.py`).

A forkserver has imported an engine. A server that it forks starts in a few seconds; a server that is started as a new
program takes 15 s and more on two cores, most of it for imports. `shared_forkserver.py` decides when a server is
forked.

`Forkserver` is a connection to a forkserver that another process owns. `OwnForkserver` starts and ends its process.
"""

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
from collections.abc import Mapping
from typing import IO

from verl_server.errors import DeadlineError
from verl_server.server.forkserver.forkserver_main import FORK, MAX_ANSWER_BYTES, READY
from verl_server.server.supervisor import AbortCheck
from verl_server.server.warden_process import WardenProcess, spawn_warden

logger = logging.getLogger(__name__)

FORKSERVER_MODULE = "verl_server.server.forkserver.forkserver_main"
SGLANG_SERVER = "verl_server.server.forkserver.sglang_server"
POLL_S = 0.05
FORK_TIMEOUT_S = 10.0
END_TIMEOUT_S = 5.0
LOG_TAIL_BYTES = 2000


class ForkedWarden:
    """A warden that the forkserver has forked, with the part of `subprocess.Popen` that `ServerProcess` uses."""

    def __init__(self, pid: int, pidfd: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._pidfd = pidfd
        weakref.finalize(self, os.close, pidfd)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the warden has ended. Returns 0: only the warden's parent can read its exit code."""
        if not _is_readable(self._pidfd, timeout):
            raise subprocess.TimeoutExpired("the warden", timeout or 0.0)
        return 0


class Forkserver:
    """A connection to a forkserver process. The process lives until its owner closes it or ends. Thread-safe."""

    def __init__(self, commands: socket.socket) -> None:
        self._lock = threading.Lock()
        self._commands = commands
        self._is_ready: bool | None = None
        """Whether the process can fork servers. None: the process has not reported yet."""
        self._pid: int | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the forkserver. None: the process has not reported yet."""
        return self._pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended or the connection is closed."""
        try:
            return _is_readable(self._commands, 0.0) and not self._commands.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    @property
    def cannot_work(self) -> bool:
        """Whether the process ended with an error of its own. A new process in the same environment would end, too."""
        return False

    def wait_ready(self, timeout_s: float, check_abort: AbortCheck) -> bool:
        """Wait until the process can fork servers. Returns False when it has ended; the log then contains the reason.

        Raises DeadlineError after `timeout_s` seconds, and the error that `check_abort` returns.
        """
        deadline = time.monotonic() + timeout_s
        while self._is_ready is None:
            if (error := check_abort()) is not None:
                raise error
            with self._lock:
                if self._is_ready is None and self._has_message():
                    message, _, pid = self._receive().partition(b" ")
                    self._is_ready = message == READY
                    if self._is_ready:
                        self._pid = int(pid)
                    else:
                        logger.warning(
                            "servers are started without a forkserver, which ended: %s", self._describe_end()
                        )
            if time.monotonic() > deadline:
                raise DeadlineError(f"the forkserver was not ready after {timeout_s:g} s", operation="start")
        return self._is_ready

    def _has_message(self) -> bool:
        """Whether the process has sent a message or has ended. Waits for a short time."""
        if self._commands.fileno() < 0:  # closed by another thread
            return True
        return _is_readable(self._commands, POLL_S)

    def _receive(self) -> bytes:
        try:
            return self._commands.recv(64)
        except OSError:
            return b""

    def _describe_end(self) -> str:
        return "another process owned it"

    def start_warden(self) -> WardenProcess:
        """A forked warden, which forks its server. A spawned warden when the forkserver cannot fork or answer."""
        try:
            return self._fork_warden()
        except ChildProcessError as error:
            logger.warning("the forkserver cannot fork a server: %s", error)
            return spawn_warden()
        except (OSError, ValueError) as error:
            logger.warning("the forkserver does not answer: %s: %s", type(error).__name__, error)
            self.close()
            return spawn_warden()

    def _fork_warden(self) -> WardenProcess:
        """Raises ChildProcessError if the forkserver answers that it cannot fork, OSError or ValueError otherwise."""
        with contextlib.ExitStack() as undo:
            child_stdin, stdin_fd = os.pipe()
            undo.callback(os.close, child_stdin)
            stdin = undo.enter_context(os.fdopen(stdin_fd, "wb"))
            stdout_fd, child_stdout = os.pipe()
            undo.callback(os.close, child_stdout)
            stdout = undo.enter_context(os.fdopen(stdout_fd, "rb"))
            with self._lock:
                self._commands.settimeout(FORK_TIMEOUT_S)
                socket.send_fds(self._commands, [FORK], [child_stdin, child_stdout, 2])
                answer, pidfds, *_ = socket.recv_fds(self._commands, MAX_ANSWER_BYTES, 1)
            if answer and not pidfds:
                raise ChildProcessError(answer.decode("utf-8", "replace"))
            (pidfd,) = pidfds
            warden = ForkedWarden(int(answer), pidfd, stdin, stdout)
            undo.pop_all()
        os.close(child_stdin)
        os.close(child_stdout)
        return warden

    def close(self) -> None:
        """Close the connection. The servers that the process has forked go on. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._commands.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold the socket open
        self._commands.close()

    def disown(self) -> None:
        """In a fork of this process: close the descriptors without ending the process or its connection."""
        self._commands.close()


class OwnForkserver(Forkserver):
    """A forkserver process that this process has started. It ends in `close`, or when this process ends.

    `environment` is the complete environment of the process. The process is started in the folder `/`. Relative entries
    of `PYTHONPATH` are left out: a spawned server would resolve them in its own empty folder. `listener`: a socket at
    which the forkserver accepts the connections of other processes. `python`: path of its interpreter.
    `engine`: module that it imports and runs, a `ForkedEngine`.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        listener: socket.socket | None = None,
        python: str = sys.executable,
        engine: str = SGLANG_SERVER,
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        commands, remote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(commands)
        listener_fds = () if listener is None else (listener.fileno(),)
        try:
            self._process = subprocess.Popen(
                [python, "-P", "-m", FORKSERVER_MODULE, engine, str(os.getpid()), *map(str, listener_fds)],
                stdin=remote_end.fileno(),
                stdout=self._log,
                stderr=self._log,
                env=_with_absolute_python_path(environment),
                cwd="/",
                start_new_session=True,
                pass_fds=listener_fds,
            )
        except BaseException:
            self._commands.close()
            self._log.close()
            raise
        finally:
            remote_end.close()
        self._pid = self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def cannot_work(self) -> bool:
        return self._process.poll() is not None and self._process.returncode > 0

    def _describe_end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        output = ""
        with contextlib.suppress(ValueError):  # closed by another thread
            self._log.seek(0)
            output = self._log.read()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
        return output or "it was killed"

    def close(self) -> None:
        """End the process. Its servers go on. Safe to call twice."""
        super().close()
        if self._is_ready:  # before, the process may not see that the socket is closed
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT_S)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def disown(self) -> None:
        super().disown()
        self._log.close()


def _is_readable(file: int | socket.socket, timeout_s: float | None) -> bool:
    """Whether a descriptor becomes readable within `timeout_s` seconds; None: no limit.

    `select.select` fails for descriptors above 1023, which a trainer with many connections has.
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1e3))


def _with_absolute_python_path(environment: Mapping[str, str]) -> dict[str, str]:
    entries = environment.get("PYTHONPATH", "").split(os.pathsep)
    return {**environment, "PYTHONPATH": os.pathsep.join(entry for entry in entries if os.path.isabs(entry))}
