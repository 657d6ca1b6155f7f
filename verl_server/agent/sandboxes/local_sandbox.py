"""A sandbox on this machine: processes in a folder of their own, within what the kernel allows."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from verl_server.agent.sandboxes.command_server import END_SIGNALS, START, FrameBuffer, encode_frame, remove_folder
from verl_server.agent.sandboxes.sandbox import (
    ANSWER_TIMEOUT_S,
    CommandOutcome,
    CommandRequest,
    Sandbox,
    SandboxLimits,
    not_running,
)
from verl_server.agent.user_code import call_user_function, wait_uncancelled, wait_within
from verl_server.errors import InfrastructureError
from verl_server.types import Json

logger = logging.getLogger(__name__)
_warned: set[str] = set()
"""Kinds of confinement whose lack was logged."""

Result = TypeVar("Result")
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[2])
import verl_server  # later imports of its modules do not use sys.path
del sys.path[0]  # it must not hide modules of the standard library
from verl_server.agent.sandboxes import command_server
command_server.main(sys.argv[1])
"""
"""First code of a sandbox, with the path of a new folder and that of the folder of `verl_server` as arguments."""
PACKAGE_FOLDER = Path(__file__).parents[3]
SEND_SOCKET = """
import socket, sys
with socket.create_server(("127.0.0.1", 0), backlog=128) as listener, socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    socket.send_fds(client, [b"1"], [listener.fileno()])
"""
RECEIVE_TIMEOUT_S = 10.0
START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 30.0
"""Maximum seconds for the sandbox to end its processes and remove its files."""
INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""Environment variables of the trainer that commands see. Others may be keys."""


class LocalSandbox(Sandbox):
    """Runs commands on this machine. Each sandbox has its own processes, folder and `/tmp`.

    The sandbox uses namespaces, read-only mounts and Landlock as far as the kernel allows them. Commands then see only
    the processes of their sandbox, have no network but their own loopback interface, and change files only in the
    folder of the sandbox, `/tmp` and `/dev/shm`. `confined` says what this kernel allows. What is missing is logged.

    Commands read the files of the trainer's user and share the kernel with the trainer. A local sandbox protects from
    mistakes of a policy. Code that may attack needs a container or a virtual machine. A process that a command starts
    in the background runs until the sandbox is closed. The sandbox ends when the trainer ends, also by SIGKILL, and its
    folder is removed.
    """

    def __init__(self, limits: SandboxLimits | None = None, *, network: bool = False) -> None:
        super().__init__(limits, network=network)
        self.folder: Path | None = None
        """Folder in which commands start. None before the start."""
        self.confined: frozenset[str] = frozenset()
        """Kinds of confinement that are active: `user`, `processes`, `mounts` and `network` (namespaces), `read_only`
        (mounts) and `writes` (Landlock)."""
        self.shell = "bash" if shutil.which("bash") else "sh"
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._log: int | None = None
        self._replies: dict[int, asyncio.Future[tuple[Json, bytes]]] = {}
        self._ids = itertools.count()

    async def start(self) -> None:
        self._begin()
        try:
            reply, _ = await _result_within(await self._launch(), START_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            with contextlib.suppress(OSError):
                await self.close()
            raise InfrastructureError(f"the sandbox did not start: {error!r}") from error
        except BaseException:
            await self.close()
            raise
        self.confined = frozenset(reply["confined"])
        wanted = {"processes", "read_only", "writes"} | (set() if self.network else {"network"})
        if missing := wanted - self.confined - _warned:
            _warned.update(missing)
            logger.warning(
                "local sandboxes cannot confine %s here, so commands of the policy are less separated from the "
                "trainer; see LocalSandbox.confined. %s",
                ", ".join(sorted(missing)),
                self._read_log(),
            )

    async def listen(self) -> socket.socket:
        # The sandbox has a network namespace of its own: its commands reach no port of the machine. A socket belongs to
        # the network namespace in which it was made, and any process can hold it. So a command makes the socket and
        # sends it through a Unix socket in the folder of the sandbox (`SCM_RIGHTS`, `man 7 unix`).
        if self.folder is None:
            raise not_running("it was not started")
        name, descriptors = f".listen-{secrets.token_hex(8)}", list[int]()
        try:
            with contextlib.ExitStack() as stack:
                opened = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, opened)
                inbox = stack.enter_context(socket.socket(socket.AF_UNIX))
                inbox.bind(f"/proc/self/fd/{opened}/{name}")  # the path of a Unix socket has at most 107 characters
                try:
                    inbox.listen(1)
                    result = await self.run([os.path.realpath(sys.executable), "-I", "-c", SEND_SOCKET, name])
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=opened)
                if result.exit_code:
                    raise InfrastructureError(f"the sandbox cannot listen on its loopback interface: {result.text}")
                inbox.settimeout(RECEIVE_TIMEOUT_S)  # the connection waits already
                connection = stack.enter_context(inbox.accept()[0])
                connection.settimeout(RECEIVE_TIMEOUT_S)
                descriptors = socket.recv_fds(connection, 1, 1)[1]
        except OSError as error:
            raise InfrastructureError(f"the sandbox has sent no socket: {error}") from error
        if not descriptors:
            raise InfrastructureError("the sandbox has sent no socket")
        os.set_inheritable(descriptors[0], False)  # a child of the trainer would keep the port
        return socket.socket(fileno=descriptors[0])

    async def close(self) -> None:
        self._disconnect("it was closed")
        try:
            if self.folder is not None:
                await wait_uncancelled(call_user_function(_wait_for_end, self._process, str(self.folder.parent)))
        finally:
            if self._log is not None:
                os.close(self._log)
                self._log = None

    async def _launch(self) -> asyncio.Future[tuple[Json, bytes]]:
        """Start the processes. The result is a future of their first message, the answer to the start."""
        # The launcher makes the folder: a trainer that is killed here would leave a folder without an owner.
        folder = Path(tempfile.gettempdir()).resolve() / f"verl-sandbox-{secrets.token_hex(8)}"
        self.folder, temporary = folder / "work", folder / "tmp"
        env = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        self._log = os.memfd_create("sandbox-log", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            with _blocked_signals():  # a signal to all processes must not end the launcher before it can clean up
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-c", PROGRAM, str(folder), str(PACKAGE_FOLDER)], stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL, stderr=self._log, env=env, cwd="/", start_new_session=True,
                )  # fmt: skip
            reader, self._writer = await asyncio.open_connection(sock=ours)
        env |= {"HOME": str(self.folder), "TMPDIR": str(temporary), "PWD": str(self.folder)}
        settings = {
            "folder": str(folder), "work": str(self.folder), "temporary": str(temporary), "network": self.network,
            "limits": asdict(self.limits), "env": env, "trainer_pid": os.getpid(),
        }  # fmt: skip
        first = self._replies[START] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read_replies(reader))
        self._writer.write(encode_frame(settings))
        return first

    async def _execute(self, request: CommandRequest) -> CommandOutcome:
        number, max_s = next(self._ids), request.timeout_s + ANSWER_TIMEOUT_S
        message = {
            "run": number, "command": request.arguments, "env": request.env, "cwd": request.cwd,
            "timeout_s": request.timeout_s,
        }  # fmt: skip
        if self._writer is None:
            raise not_running(str(self._ending))
        future = self._replies[number] = asyncio.get_running_loop().create_future()
        self._writer.write(encode_frame(message, request.stdin))
        try:
            reply, output = await _result_within(future, max_s)
        except TimeoutError:
            self._disconnect(f"it did not answer for {max_s:g} s")
            raise not_running(f"it did not answer for {max_s:g} s") from None
        except asyncio.CancelledError:
            if self._writer is not None:
                self._writer.write(encode_frame({"cancel": number}))
            raise
        finally:
            self._replies.pop(number, None)
        end = reply["stdout_bytes"]
        return CommandOutcome(reply["exit_code"], output[:end], output[end:], reply["exceeded"])

    async def _read_replies(self, reader: asyncio.StreamReader) -> None:
        """Receive answers until the end of the socket."""
        frames = FrameBuffer()
        with contextlib.suppress(ConnectionError, ValueError):  # the sandbox has ended, or sends what is no frame
            while data := await reader.read(1 << 18):
                for reply, output in frames.feed(data):
                    future = self._replies.pop(reply.get("id", START), None)
                    if future is not None and not future.done():
                        future.set_result((reply, output))
        self._disconnect(f"its process has ended. {self._read_log()}")

    def _disconnect(self, reason: str) -> None:
        """Close the socket, which ends the sandbox. Commands that still run raise InfrastructureError."""
        self._ending = self._ending or reason
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):  # a forked child of the trainer may hold the socket, too
                writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                writer.close()
        for future in self._replies.values():
            if not future.done():
                future.set_exception(not_running(reason))
                future.exception()  # so that asyncio does not log it if nobody waits
        self._replies.clear()

    def _read_log(self) -> str:
        if self._log is None:
            return ""
        return os.pread(self._log, os.fstat(self._log).st_size, 0)[-2000:].decode("utf-8", "replace")


async def _result_within(future: asyncio.Future[Result], timeout_s: float) -> Result:
    """The result of a future, also if the event loop was blocked while it arrived. Raises TimeoutError."""
    await wait_within(future, timeout_s)
    if not future.done():
        raise TimeoutError
    return future.result()


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block the signals that end programs, for this thread and the processes that it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_end(launcher: subprocess.Popen[bytes] | None, folder: str) -> None:
    """Wait until the launcher has ended all processes and removed the folder. End it if it does not end."""
    if launcher is not None:
        try:
            launcher.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()
    if os.path.exists(folder):
        remove_folder(folder)
