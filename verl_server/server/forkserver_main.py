"""First code of a forkserver: a process that has imported SGLang, and forks servers that need not import it again.

    trainer --socket--> forkserver --forks--> warden --forks--> SGLang main --forks--> scheduler, detokenizer

Each server has a warden of its own, as always, which outlives the forkserver. On standard input is a socket of packets:
three descriptors come (a warden's standard input, output and error), its pid and a pidfd go back. The forkserver ends with
the socket, and with the trainer, whose pid is its argument.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import IO, Any, NoReturn

from verl_server.server import server_main, warden

READY, FORK = b"ready", b"fork"
#: What servers import after they have forked their workers; where a version of SGLang has no such module, they do.
MORE = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
    "sglang.srt.constrained.xgrammar_backend",
)


class ForkedServer:
    """The part of `subprocess.Popen` that a warden uses."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid, self.stdout = pid, stdout
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # reaped with the rest of the tree
                pid, status = self.pid, 0
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the server", timeout or 0.0)
            time.sleep(0.01)
        return code


def forked(spec: dict[str, Any]) -> ForkedServer:
    """`warden.spawned`, without a new program."""
    payload, wishes = os.pipe()
    output, words = os.pipe()
    pid = os.fork()
    if pid == 0:
        _leave(lambda: _be_server(spec, payload, words))
    for fd in (payload, words):
        os.close(fd)
    with contextlib.suppress(BrokenPipeError), os.fdopen(wishes, "wb") as pipe:
        pipe.write(spec["payload"].encode())
    return ForkedServer(pid, os.fdopen(output, "rb"))


def _be_server(spec: dict[str, Any], payload: int, words: int) -> None:
    _take_descriptors(payload, words, words)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in spec["drop_env"]:
        os.environ.pop(name, None)
    os.environ.update(spec["env"])
    os.chdir(spec["scratch"])
    tempfile.tempdir = None
    _be_called("python -m verl_server.server.server_main")
    gc.enable()
    server_main.serve(server_main.read_arguments())


def _be_warden(descriptors: list[int]) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _take_descriptors(*descriptors)
    _be_called("python -m verl_server.server.warden")
    gc.disable()  # it would touch, and so copy, what it shares with the forkserver
    warden.main(forked)


def _take_descriptors(*standard: int) -> None:
    """Have these as 0, 1 and 2, and no others."""
    for number, fd in enumerate(standard):
        os.dup2(fd, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _be_called(name: str) -> None:
    """What `ps` shows."""
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(name)


def _leave(work: Callable[[], None]) -> NoReturn:
    """The rest of a forked process's life: what its parent has on the stack and would do at its end is not its own."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a program
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end_with_trainer(commands: socket.socket, whether: bool) -> None:
    """Let the kernel end this process when the socket closes while nobody reads it (SIGIO). Nothing comes meanwhile."""
    fcntl.fcntl(commands, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(commands, fcntl.F_GETFL)
    fcntl.fcntl(commands, fcntl.F_SETFL, flags | os.O_ASYNC if whether else flags & ~os.O_ASYNC)


def main() -> None:
    commands, trainer = socket.socket(fileno=0), os.pidfd_open(int(sys.argv[1]))
    _end_with_trainer(commands, True)
    server_main.load()
    for name in MORE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    from verl_server.platforms import workers

    if not workers.can_fork():
        sys.exit(f"this process has {len(os.listdir('/proc/self/task'))} threads: it cannot fork servers")
    workers.trust_forks()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # wardens are reaped by the kernel
    _end_with_trainer(commands, False)
    commands.send(READY)
    while True:
        if trainer in select.select([commands.fileno(), trainer], [], [])[0]:
            os._exit(0)  # a fork of the trainer's may still hold the other end of the socket
        word, descriptors, *_ = socket.recv_fds(commands, len(FORK), 3)
        if word != FORK:
            os._exit(0)  # the trainer has closed it, or is gone
        pid = os.fork()
        if pid == 0:
            _leave(lambda given=descriptors: _be_warden(given))  # type: ignore[misc]
        for fd in descriptors:
            os.close(fd)
        watched = os.pidfd_open(pid)
        socket.send_fds(commands, [str(pid).encode()], [watched])
        os.close(watched)


if __name__ == "__main__":
    main()
