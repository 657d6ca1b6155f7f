"""Main program of a forkserver: a process that imports an engine and then forks servers, which need not import it.

    trainer --socket--> forkserver --forks--> warden --forks--> SGLang main --forks--> scheduler, detokenizer

The first command line argument names the module of the engine, a `ForkedEngine`.

Each server has a warden of its own, which outlives the forkserver. Standard input is a socket of packets. A request
brings three descriptors: the warden's standard input, output and error. The answer is the warden's pid with a pidfd, or
an error message. The forkserver ends when the socket is closed, when the trainer ends, whose pid is the second command
line argument, and when for `IDLE_TIMEOUT_S` it has had no server and no connection of another process: the memory of
the imports, 1.1 GB, is then its own.

The third command line argument, if there is one, is the descriptor of a listening socket. Other processes of the same
user connect to it (see "Socket folder") and send the same requests.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import importlib
import json
import multiprocessing.process
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol, cast

import verl_server
from verl_server.config import FORKSERVER_FOLDER
from verl_server.errors import BadInputError
from verl_server.server.warden import warden
from verl_server.server.warden.warden import IGNORED_SIGNALS

READY, FORK = b"ready", b"fork"
MAX_ANSWER_BYTES = 256  # of an answer to FORK
#: `struct ucred` of unix(7): process id, user id and group id of the other end of a socket.
CREDENTIALS = struct.Struct("3i")
WAIT_POLL_S = 0.01
IDLE_TIMEOUT_S = 300.0
"""Seconds without a server and without a connection of another process after which the forkserver ends."""


class ForkedEngine(Protocol):
    """The module of an engine whose servers are forked, for example `sglang_server.py`."""

    PROGRAM: str
    """File of the main module of a server that is started as a new program."""

    def load(self) -> None:
        """Import what a server imports. Exits with the reason when this process cannot fork servers."""

    def serve(self) -> None:
        """Run the server whose arguments are on standard input."""


class ForkedServer:
    """The main process of a forked server, with the part of `subprocess.Popen` that a warden uses."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid, self.stdout = pid, stdout
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        if self._exit_code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the warden has reaped it with the rest of the tree
                pid, status = self.pid, 0
            if pid:
                self._exit_code = os.waitstatus_to_exitcode(status)
        return self._exit_code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (exit_code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the server", timeout or 0.0)
            time.sleep(WAIT_POLL_S)
        return exit_code


def fork_server(spec: dict[str, Any], engine: ForkedEngine, initial_env: Mapping[str, str]) -> ForkedServer:
    """Fork a server from its warden. `warden.spawn_server` starts a new program instead."""
    arguments_fd, arguments_end = os.pipe()
    output_end, output_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run_and_exit(lambda: _run_server(spec, engine, initial_env, arguments_fd, output_fd))
    for fd in (arguments_fd, output_fd):
        os.close(fd)
    with contextlib.suppress(BrokenPipeError), os.fdopen(arguments_end, "wb") as pipe:
        pipe.write(spec["payload"].encode())
    return ForkedServer(pid, os.fdopen(output_end, "rb"))


def _run_server(
    spec: dict[str, Any], engine: ForkedEngine, initial_env: Mapping[str, str], arguments_fd: int, output_fd: int
) -> None:
    _set_standard_descriptors(arguments_fd, output_fd, output_fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _set_environment(spec["env"], initial_env)
    _set_working_folder(spec["scratch"])
    _set_process_title(" ".join(["python", *spec["argv"][1:]]))
    sys.argv = [engine.PROGRAM]
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # all forks begin with the same state; the module `random` seeds itself after a fork
    gc.enable()
    engine.serve()


def _run_warden(descriptors: list[int], engine: ForkedEngine, initial_env: Mapping[str, str]) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _set_standard_descriptors(*descriptors)
    _set_process_title("python -m verl_server.server.warden.warden")
    gc.disable()  # a collection would write to the memory that is shared with the forkserver, and so copy it
    warden.main(lambda spec: fork_server(spec, engine, initial_env))


def _set_environment(environment: Mapping[str, str], initial: Mapping[str, str]) -> None:
    """Set the server's variables. Variables that the imports have set or changed since `initial` are kept."""
    for name in initial.keys() - environment.keys():
        os.environ.pop(name, None)
    for name, value in environment.items():
        if initial.get(name) != value:
            os.environ[name] = value


def _set_working_folder(folder: str) -> None:
    """As for `python -m` in `folder`."""
    os.chdir(folder)
    tempfile.tempdir = None  # computed again from the server's TMPDIR
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, folder)


def _set_standard_descriptors(*descriptors: int) -> None:
    """Make these the descriptors 0, 1 and 2, and close all others."""
    for number, fd in enumerate(descriptors):
        os.dup2(fd, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _set_process_title(title: str) -> None:
    """The command line that `ps` shows."""
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(title)


def _run_and_exit(run: Callable[[], None]) -> NoReturn:
    """Run the rest of a forked process. It ends without the cleanup of its parent's stack and exit handlers."""
    exit_code = 1
    try:
        run()
        exit_code = 0
    except SystemExit as ending:
        exit_code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a program
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)


def _end_when_socket_closes(commands: socket.socket, enabled: bool) -> None:
    """Let the kernel end this process (SIGIO) when the socket closes, while this process imports and does not read."""
    fcntl.fcntl(commands, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(commands, fcntl.F_GETFL)
    fcntl.fcntl(commands, fcntl.F_SETFL, flags | os.O_ASYNC if enabled else flags & ~os.O_ASYNC)


class Requests:
    """The sockets and pidfds that a forkserver watches, from the end of the imports on."""

    def __init__(
        self,
        owner: socket.socket,
        owner_pidfd: int,
        listener: socket.socket | None,
        engine: ForkedEngine,
        initial_env: Mapping[str, str],
    ) -> None:
        self._owner, self._owner_pidfd, self._listener = owner, owner_pidfd, listener
        self._engine, self._initial_env = engine, initial_env
        self._connections: set[socket.socket] = {owner}
        self._wardens: set[int] = set()
        """Pidfds of the wardens that live."""

    def serve(self) -> None:
        """Fork wardens until the owner closes its socket or ends, or until the forkserver has had no use for long."""
        self._owner.send(self._ready_message())
        while True:
            in_use = bool(self._wardens) or len(self._connections) > 1
            readable = self._wait_readable(None if in_use else IDLE_TIMEOUT_S)
            if self._owner_pidfd in readable or not readable:
                return  # a fork of the owner may still hold the other end of the socket
            # Found before a descriptor is closed: a new connection may get the same number.
            connections = [entry for entry in self._connections if entry.fileno() in readable]
            for pidfd in self._wardens.intersection(readable):
                self._wardens.remove(pidfd)
                os.close(pidfd)
            if self._listener is not None and self._listener.fileno() in readable:
                self._accept(self._listener)
            for connection in connections:
                if not self._answer(connection):
                    if connection is self._owner:
                        return
                    self._connections.remove(connection)
                    connection.close()

    def _wait_readable(self, timeout_s: float | None) -> set[int]:
        """Wait until descriptors can be read, and return them. `select.select` fails for descriptors above 1023."""
        poll = select.poll()
        sockets = [*self._connections, *([] if self._listener is None else [self._listener])]
        for fd in (*(entry.fileno() for entry in sockets), *self._wardens, self._owner_pidfd):
            poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1e3)}

    def _ready_message(self) -> bytes:
        return b"%s %d" % (READY, os.getpid())

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection of a process of the same user."""
        connection, _ = listener.accept()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        if CREDENTIALS.unpack(credentials)[1] != os.getuid():
            connection.close()
            return
        with contextlib.suppress(OSError):
            connection.send(self._ready_message())
        self._connections.add(connection)

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one request. Returns False when the other end has closed the connection."""
        try:
            request, descriptors, *_ = socket.recv_fds(connection, len(FORK), 3)
        except OSError:
            return False
        if request != FORK:
            return False
        answer, pidfds = self._fork_warden(descriptors)
        try:
            socket.send_fds(connection, [answer], pidfds)
        except OSError:
            return False
        return True

    def _fork_warden(self, descriptors: list[int]) -> tuple[bytes, list[int]]:
        """A new warden's pid and pidfd, or an error message. A warden without a pidfd ends when stdin is closed."""
        try:
            pid = os.fork()
            if pid == 0:
                _run_and_exit(lambda: _run_warden(descriptors, self._engine, self._initial_env))
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            return str(error).encode()[:MAX_ANSWER_BYTES], []
        finally:
            for fd in descriptors:
                os.close(fd)
        self._wardens.add(pidfd)
        return str(pid).encode(), [pidfd]


def main() -> None:
    initial_env = dict(os.environ)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started this process may block SIGIO
    owner, owner_pidfd = socket.socket(fileno=0), os.pidfd_open(int(sys.argv[2]))
    listener = socket.socket(fileno=int(sys.argv[3])) if len(sys.argv) > 3 else None
    _end_when_socket_closes(owner, True)
    if select.select([0, owner_pidfd], [], [], 0)[0]:
        return  # the socket was closed, or the owner ended, before the kernel was asked to watch the socket
    engine = cast("ForkedEngine", importlib.import_module(sys.argv[1]))
    engine.load()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the wardens
    _end_when_socket_closes(owner, False)
    Requests(owner, owner_pidfd, listener, engine, initial_env).serve()
    os._exit(0)


if __name__ == "__main__":
    main()


# -- Socket folder ----------------------------------------------------------------------------------
# A folder of sockets through which several processes of a user share forkservers.
#
# `VERL_SERVER_FORKSERVER_DIR` names the folder. A forkserver listens at a socket whose name is a hash of everything
# that its servers inherit. A process that needs the same forkserver connects to it instead of importing SGLang again.

BACKLOG = 64
#: Seconds to wait for the kernel's part of a connection, and for another process that looks for the same forkserver.
CONNECT_TIMEOUT_S = 5.0
LOCK_TIMEOUT_S = 10.0
LOCK_POLL_S = 0.02


def socket_path(name: str) -> Path | None:
    """Path of the socket `name` in the folder of `VERL_SERVER_FORKSERVER_DIR`. None when the variable is not set.

    Raises BadInputError for a folder that another user can enter: that user could answer in place of the forkserver.
    """
    value = os.environ.get(FORKSERVER_FOLDER)
    if not value:
        return None
    folder = Path(value)
    try:
        status = folder.stat()
    except OSError as error:
        raise BadInputError(f"{FORKSERVER_FOLDER}={value}: {error.strerror}; create the folder first") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BadInputError(f"{FORKSERVER_FOLDER}={value} must be a folder of this user with the mode 0700")
    return folder / name


def connect(path: Path) -> socket.socket | None:
    """A connection to the forkserver that listens at `path`, or None when there is none.

    Raises OSError for any other failure, for example when too many connections wait until the forkserver is ready.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(CONNECT_TIMEOUT_S)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def listen(path: Path) -> socket.socket:
    """A socket that listens at `path`. Replaces the socket of a forkserver that has ended. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Let one process at a time look for the forkserver at `path` and start it. Raises OSError after a timeout."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with path.with_suffix(".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOCK_POLL_S)
        yield


# -- Inherited state --------------------------------------------------------------------------------
# What a server inherits from the process that starts it: a forkserver fits a server only if both inherit the same.

#: Variables that no import of a server on a machine without an accelerator depends on, or that differ for each server.
#: A forked server gets their values at its start. Libraries set many of them in a running program: an import of torch,
#: transformers or SGLang sets the folders of caches, an import of ray sets `RAY_` variables and PYTHONBREAKPOINT, and
#: torchrun sets a variable of NCCL.
LATE_VARIABLES = frozenset({
    "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES", "PYTEST_CURRENT_TEST", "PYTHONBREAKPOINT", "SPT_NOENV",
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "TILELANG_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE",
    "http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", FORKSERVER_FOLDER,
})  # fmt: skip
#: Other late variables: those of Ray, which a server does not import, and those that select devices, for example
#: CUDA_VISIBLE_DEVICES. A server that can be forked sees no device, whatever their values are.
LATE_PREFIX, LATE_SUFFIX = "RAY_", "_VISIBLE_DEVICES"
INHERITED_FIELDS = (
    "Umask", "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs",
    "Seccomp", "Cpus_allowed", "Mems_allowed",
)  # fmt: skip


@dataclass(frozen=True)
class InheritedState:
    """What a new program would inherit from this process, as far as a forked server cannot change it afterwards."""

    environment: Mapping[str, str] = field(repr=False)
    """Environment variables without the late variables."""
    attributes: tuple[str, ...]
    """Resource limits, control group, namespaces, priority, `INHERITED_FIELDS` of `/proc/thread-self/status`, and
    ignored signals."""

    @classmethod
    def of_server(cls, environment: Mapping[str, str]) -> InheritedState:
        """The state of a server with this `environment` that would be started by the calling thread now."""
        status = dict(line.split(":", 1) for line in _read_text("/proc/thread-self/status").splitlines())
        files = (_read_text(f"/proc/self/{name}") for name in ("limits", "cgroup", "oom_score_adj"))
        return cls(
            {name: value for name, value in environment.items() if not is_late(name)},
            (
                *(f"{name}: {status.get(name, '').strip()}" for name in INHERITED_FIELDS),
                f"ignored signals: {_without_signals_of_warden(status.get('SigIgn', '0')):x}",
                *files,
                *(os.readlink(entry) for entry in sorted(Path("/proc/self/ns").glob("*"))),
                str(os.getpriority(os.PRIO_PROCESS, 0)),
            ),
        )

    def fingerprint(self, python: str = sys.executable, engine: str = "") -> str:
        """A hash of the state, of the path of the interpreter, of the engine's module and of this package's folder."""
        code = (python, engine, str(Path(verl_server.__file__).parent))
        text = json.dumps([sorted(self.environment.items()), self.attributes, code])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe_difference(self, other: InheritedState) -> str:
        """Names of the variables that differ (their values may be secret), or the attributes that differ."""
        names = {name for name, _ in self.environment.items() ^ other.environment.items()}
        if names:
            return f"the environment variables {', '.join(sorted(names))} have changed"
        return f"the process attributes {set(self.attributes) ^ set(other.attributes)} have changed"


def is_late(name: str) -> bool:
    return name in LATE_VARIABLES or name.startswith(LATE_PREFIX) or name.endswith(LATE_SUFFIX)


def _without_signals_of_warden(mask: str) -> int:
    """The ignored signals, one bit for each, without those that the warden ignores in any case."""
    return int(mask, 16) & ~sum(1 << (number - 1) for number in IGNORED_SIGNALS)


def _read_text(path: str) -> str:
    """Content of a file of `/proc`; empty where the kernel does not have the file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
