"""Main program of a forkserver: a process that imports SGLang and then forks servers, which need not import it again.

    trainer --socket--> forkserver --forks--> warden --forks--> SGLang main --forks--> scheduler, detokenizer

Each server has a warden of its own, which outlives the forkserver. Standard input is a socket of packets. A request
brings three descriptors: the warden's standard input, output and error. The answer is the warden's pid with a pidfd.
The forkserver ends when the socket is closed, when the trainer ends, whose pid is the first command line argument, and
when it has had no server for `IDLE_TIMEOUT_S`: the memory of the imports, 1.1 GB, is then its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import multiprocessing.process
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from typing import IO, Any, NoReturn

from verl_server.server import server_main
from verl_server.server.warden import warden

READY, FORK = b"ready", b"fork"
#: Modules that a server imports after it has forked its workers. A version of SGLang may not have all of them.
LATE_MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
    "sglang.srt.constrained.xgrammar_backend",
)
WAIT_POLL_S = 0.01
IDLE_TIMEOUT_S = 300.0
"""Seconds without any server after which the forkserver ends."""


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


def fork_server(spec: dict[str, Any], initial_env: Mapping[str, str]) -> ForkedServer:
    """Fork a server from its warden. `warden.spawn_server` starts a new program instead."""
    arguments_fd, arguments_end = os.pipe()
    output_end, output_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run_and_exit(lambda: _run_server(spec, initial_env, arguments_fd, output_fd))
    for fd in (arguments_fd, output_fd):
        os.close(fd)
    with contextlib.suppress(BrokenPipeError), os.fdopen(arguments_end, "wb") as pipe:
        pipe.write(spec["payload"].encode())
    return ForkedServer(pid, os.fdopen(output_end, "rb"))


def _run_server(spec: dict[str, Any], initial_env: Mapping[str, str], arguments_fd: int, output_fd: int) -> None:
    _set_standard_descriptors(arguments_fd, output_fd, output_fd)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _set_environment(spec["env"], initial_env)
    _set_working_folder(spec["scratch"])
    _set_process_title("python -m verl_server.server.server_main")
    sys.argv = [server_main.__file__]
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # all forks begin with the same state; the module `random` seeds itself after a fork
    gc.enable()
    server_main.serve(server_main.read_arguments())


def _run_warden(descriptors: list[int], initial_env: Mapping[str, str]) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _set_standard_descriptors(*descriptors)
    _set_process_title("python -m verl_server.server.warden.warden")
    gc.disable()  # a collection would write to the memory that is shared with the forkserver, and so copy it
    warden.main(lambda spec: fork_server(spec, initial_env))


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


def _import_sglang() -> None:
    """Import what a server imports, and check that this process can fork. Exits with an error when it cannot."""
    server_main.load()
    gc.disable()  # as in `load`
    for name in LATE_MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.enable()

    from sglang.srt.platforms import current_platform

    from verl_server.platforms import workers
    from verl_server.platforms.cpu import TorchNativeCpuPlatform

    if not isinstance(current_platform, TorchNativeCpuPlatform):
        sys.exit("another SGLang platform than the one for machines without an accelerator is active")
    if not workers.can_fork():
        sys.exit(f"this process has {len(os.listdir('/proc/self/task'))} threads: it cannot fork servers")
    workers.allow_forks_to_fork()
    gc.collect()
    gc.freeze()


def main() -> None:
    initial_env = dict(os.environ)
    commands, trainer = socket.socket(fileno=0), os.pidfd_open(int(sys.argv[1]))
    _end_when_socket_closes(commands, True)
    if select.select([commands.fileno(), trainer], [], [], 0)[0]:
        return  # the socket was closed, or the trainer ended, before the kernel was asked to watch the socket
    _import_sglang()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the wardens
    _end_when_socket_closes(commands, False)
    commands.send(READY)
    wardens: set[int] = set()
    """Pidfds of the wardens that live."""
    while True:
        idle_timeout_s = None if wardens else IDLE_TIMEOUT_S
        readable, *_ = select.select([commands.fileno(), trainer, *wardens], [], [], idle_timeout_s)
        if trainer in readable:
            os._exit(0)  # a fork of the trainer may still hold the other end of the socket
        for pidfd in wardens.intersection(readable):
            wardens.remove(pidfd)
            os.close(pidfd)
        if not readable:
            os._exit(0)
        if commands.fileno() not in readable:
            continue
        request, descriptors, *_ = socket.recv_fds(commands, len(FORK), 3)
        if request != FORK:
            os._exit(0)  # the trainer has closed the socket
        pid = os.fork()
        if pid == 0:
            _run_and_exit(lambda received=descriptors: _run_warden(received, initial_env))  # type: ignore[misc]
        for fd in descriptors:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        wardens.add(pidfd)
        socket.send_fds(commands, [str(pid).encode()], [pidfd])


if __name__ == "__main__":
    main()
