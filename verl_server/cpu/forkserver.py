"""The trainer's side of a forkserver process (`forkserver_main.py`).

A forkserver has imported an engine. A server that it forks starts in a few seconds; a server that is started as a new
program takes 15 s and more on two cores, most of it for imports. `forkserver.py` decides when a server is
forked.

`Forkserver` is a connection to a forkserver that another process owns. `OwnForkserver` starts and ends its process.
"""

from __future__ import annotations

import atexit
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

from verl_server.config import ENGINE, SERVER_PYTHON
from verl_server.cpu import forkserver_main
from verl_server.cpu.forkserver_main import FORK, MAX_ANSWER_BYTES, READY, InheritedState
from verl_server.errors import DeadlineError
from verl_server.server.environment import EngineProfile, ServerPython, may_have_accelerator, server_environment
from verl_server.server.process import AbortCheck, WardenFactory, WardenProcess, raise_open_file_limit, spawn_warden
from verl_server.server.warden.processes import has_pidfds

logger = logging.getLogger(__name__)

FORKSERVER_MODULE = "verl_server.cpu.forkserver_main"
SGLANG_SERVER = "verl_server.cpu.sglang_server"
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


# -- Shared forkserver ------------------------------------------------------------------------------
# The forkservers that the servers of this process share, and whether a server is forked.
#
# There is one forkserver for each engine and interpreter.
#
# The first server of a process starts the forkserver and waits for its imports, which costs as much as importing in
# the server. Every later server is forked, in about 2 s (SGLang). The forkserver costs about 79 MB of memory of its
# own while servers run: the memory of the imports, 1.1 GB, is shared with them. It ends with this process, and after
# five minutes without a server. `AdapterConfig(use_forkserver=False)` starts no forkserver. Processes with the same
# `VERL_SERVER_FORKSERVER_DIR` share their forkservers (`forkserver_main.py`).
#
# A server is forked only when it sees what a server that is started as a new program would see. Otherwise it is
# spawned:
#
# * where there may be an accelerator, whose driver does not survive a fork, and on systems other than Linux; * where
# there are no pidfds, through which this process watches a warden that is not its child; * with another SGLang
# platform than ours (`SGLANG_PLATFORM`, `SGLANG_USE_CPU_ENGINE`) or a selection of SGLang plugins; * when the
# forkserver cannot fork, because an SGLang plugin has started a thread, for example.
#
# Libraries read environment variables when they are imported. The forkserver is therefore replaced when the
# environment of a server differs from the environment that the forkserver was started with (see `LATE_VARIABLES`), and
# when this process has changed what a new program inherits: resource limits, processor affinity, umask, user, control
# group (`forkserver_main.py`).

#: Variables that select another SGLang platform or other SGLang plugins. Their code may not survive a fork.
PLATFORM_VARIABLES = ("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE")


class SharedForkserver:
    """Owns at most one `Forkserver` at a time: starts it, replaces it, ends it. Thread-safe.

    `python`: path of the interpreter of the forkserver and of its servers. `engine`: see `OwnForkserver`.
    """

    def __init__(self, python: str = sys.executable, engine: str = SGLANG_SERVER) -> None:
        self._python, self._engine = python, engine
        self._lock = threading.Lock()
        self._forkserver: Forkserver | None = None
        self._state: InheritedState | None = None
        """State in which the forkserver was started."""
        self._failed_state: InheritedState | None = None
        """State in which a forkserver ended by itself. No other forkserver is started in this state."""
        self._waiting_starts = 0
        """Number of servers that wait for the forkserver's imports."""

    def prepare(self, environment: Mapping[str, str]) -> Forkserver | None:
        """The forkserver for servers with this `environment`. None when such a server must be spawned.

        Starts a forkserver, which then imports its engine in the background, when there is none that fits.
        """
        if not _can_be_forked(environment):
            return None
        with self._lock:
            try:
                return self._current(environment, InheritedState.of_server(environment))
            except OSError as error:
                logger.warning("the forkserver cannot be started: %s", error)
                return None

    def _current(self, environment: Mapping[str, str], state: InheritedState) -> Forkserver | None:
        forkserver = self._forkserver
        if forkserver is not None and forkserver.has_ended:
            if forkserver.cannot_work:
                self._failed_state = self._state
            self._forget(forkserver)
        elif forkserver is not None and state != self._state:
            if self._waiting_starts:
                return None
            assert self._state is not None
            logger.info("the forkserver is replaced: %s", state.describe_difference(self._state))
            self._forget(forkserver)
        if self._forkserver is None and state != self._failed_state:
            self._forkserver, self._state = self._connect_or_start(environment, state), state
        return self._forkserver

    def _connect_or_start(self, environment: Mapping[str, str], state: InheritedState) -> Forkserver:
        path = forkserver_main.socket_path(state.fingerprint(self._python, self._engine))
        if path is None:
            return OwnForkserver(environment, None, self._python, self._engine)
        with forkserver_main.lock(path):
            if (connection := forkserver_main.connect(path)) is not None:
                return Forkserver(connection)
            with forkserver_main.listen(path) as listener:
                return OwnForkserver(environment, listener, self._python, self._engine)

    def _forget(self, forkserver: Forkserver) -> None:
        forkserver.close()
        self._forkserver = None

    def warden_factory(
        self, environment: Mapping[str, str], timeout_s: float, check_abort: AbortCheck
    ) -> WardenFactory:
        """How to start the warden of a server with this complete `environment`. Waits for the forkserver's imports.

        Raises the error that `check_abort` returns. A forkserver that is not ready after `timeout_s` seconds is ended.
        """
        forkserver = self.prepare(environment)
        if forkserver is None:
            return spawn_warden
        with self._lock:
            self._waiting_starts += 1
        try:
            return forkserver.start_warden if forkserver.wait_ready(timeout_s, check_abort) else spawn_warden
        except DeadlineError as error:
            logger.warning("%s; servers are started without it", error.message)
            forkserver.close()
            return spawn_warden
        finally:
            with self._lock:
                self._waiting_starts -= 1

    @property
    def pid(self) -> int | None:
        """Process id of the forkserver, or None when there is none."""
        with self._lock:
            return None if self._forkserver is None or self._forkserver.has_ended else self._forkserver.pid

    def close(self) -> None:
        """End the forkserver. Its servers go on; the next server of this process starts another forkserver."""
        with self._lock:
            if self._forkserver is not None:
                self._forget(self._forkserver)

    def disown(self) -> None:
        """In a fork of the owner: leave the forkserver to the owner."""
        self._lock = threading.Lock()  # another thread may have held the lock
        if self._forkserver is not None:
            self._forkserver.disown()
        self._forkserver, self._waiting_starts = None, 0


_shared: dict[tuple[str, str], SharedForkserver] = {}
"""The forkservers of this process by their interpreters and engines."""


def _shared_forkserver(python: ServerPython | None, engine: str) -> SharedForkserver:
    path = sys.executable if python is None else python.path
    return _shared.setdefault((path, engine), SharedForkserver(path, engine))


def _close_all() -> None:
    for forkserver in _shared.values():
        forkserver.close()


def _disown_all() -> None:
    for forkserver in _shared.values():
        forkserver.disown()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)


def warden_factory(
    profile: EngineProfile,
    env: Mapping[str, str],
    timeout_s: float,
    check_abort: AbortCheck,
    python: ServerPython | None = None,
) -> WardenFactory:
    """How to start the warden of a server: forked by a forkserver of this process where that is safe, else spawned.

    `env` are the variables that the caller adds for this server. `python`: its interpreter; None: this process's.
    Raises the error that `check_abort` returns.
    """
    if profile.forked_module is None:
        return spawn_warden
    raise_open_file_limit()  # the client of the server would raise it, and then the next server needs a new forkserver
    shared = _shared_forkserver(python, profile.forked_module)
    return shared.warden_factory(server_environment(env, python), timeout_s, check_abort)


def prepare_forkserver(env: Mapping[str, str] | None = None, python: ServerPython | None = None) -> None:
    """Start a forkserver of this process for SGLang in the background, so that its imports overlap with other work.

    `env`: the variables that will be added for the server. `python`: the interpreter of the server, if it is not this
    process's. Does nothing where servers are not forked, where `VERL_SERVER_ENGINE` names another engine, and where
    `VERL_SERVER_PYTHON` names another interpreter, which is checked first when a server starts.
    """
    if python is None and (os.environ.get(SERVER_PYTHON) or os.environ.get(ENGINE) not in (None, "", "sglang")):
        return
    raise_open_file_limit()  # as `warden_factory`
    _shared_forkserver(python, SGLANG_SERVER).prepare(server_environment(env or {}, python))


def forkserver_pid(python: ServerPython | None = None, engine: str = SGLANG_SERVER) -> int | None:
    """Process id of this process's forkserver for an interpreter and an engine, or None when there is none."""
    return _shared_forkserver(python, engine).pid


def forkserver_pids() -> frozenset[int]:
    """Process ids of all forkservers of this process."""
    return frozenset(pid for shared in _shared.values() if (pid := shared.pid) is not None)


def _can_be_forked(environment: Mapping[str, str]) -> bool:
    if not sys.platform.startswith("linux") or any(environment.get(name) for name in PLATFORM_VARIABLES):
        return False
    if not has_pidfds():
        return False
    return not may_have_accelerator(environment)
