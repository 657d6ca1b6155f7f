"""The command server of a local sandbox: it runs commands, enforces the limits and ends when the trainer ends.

The trainer sends frames: `{"run": id, "command", "env", "cwd", "timeout_s"}` with the standard input, or
`{"cancel": id}`. Each command is answered by `{"id", "exit_code", "exceeded", "stdout_bytes"}` with both outputs. The
end of the socket ends the sandbox. Imports the standard library only, so that a sandbox starts quickly.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_server.agent.sandboxes import confinement
from verl_server.agent.sandboxes.confinement import PR_SET_PDEATHSIG, call_prctl, enter_process_namespace
from verl_server.server.warden.processes import list_descendants

# -- Frames -----------------------------------------------------------------------------------------
# Messages between the trainer and the command server: JSON objects with bytes.
#
# A frame is the length of the JSON and the length of the bytes, each as 4 bytes in network order, then the JSON and the
# bytes. No file descriptors are sent: Linux counts those that are on their way for each user, and refuses too many.

HEADER = struct.Struct("!II")


def encode_frame(message: Mapping[str, Any], content: bytes = b"") -> bytes:
    """The frame of a message."""
    encoded = json.dumps(message).encode()
    return HEADER.pack(len(encoded), len(content)) + encoded + content


class FrameBuffer:
    """Bytes that have arrived, until they are whole frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Add bytes. Yields each message that is complete now."""
        self._bytes += data
        while len(self._bytes) >= HEADER.size:
            message_size, content_size = HEADER.unpack_from(self._bytes)
            begin = HEADER.size + message_size
            if len(self._bytes) < begin + content_size:
                return
            message = json.loads(self._bytes[HEADER.size : begin])
            content = bytes(self._bytes[begin : begin + content_size])
            del self._bytes[: begin + content_size]
            yield message, content


# -- Outputs ----------------------------------------------------------------------------------------

PIPE_CHUNK_BYTES = 1 << 16
MAX_PIPE_BYTES = 1 << 20


class BoundedOutput:
    """Keeps at most `max_bytes` of an output: of a longer output the middle is replaced by a note."""

    def __init__(self, max_bytes: int) -> None:
        self._head_bytes, self._tail_bytes = max_bytes - max_bytes // 2, max_bytes // 2
        self._head, self._tail = bytearray(), bytearray()
        self._num_omitted = 0

    def add(self, chunk: bytes) -> None:
        """Append a part of the output."""
        room = self._head_bytes - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        excess = len(self._tail) - self._tail_bytes
        if excess > 0:
            self._num_omitted += excess
            del self._tail[:excess]

    @property
    def content(self) -> bytes:
        """The beginning, the note if there is one, and the end."""
        note = f"\n[... {self._num_omitted} bytes omitted ...]\n".encode() if self._num_omitted else b""
        return bytes(self._head) + note + bytes(self._tail)


class OutputPipe:
    """The read end of a pipe, which does not block, and what was read from it."""

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._output = BoundedOutput(max_bytes)
        self._is_taken = self._is_finished = self.is_closed = False

    def read(self) -> bool:
        """Read what is there. Returns False at the end of the output."""
        self._read_chunk()
        return not self._is_finished

    def _read_chunk(self) -> bool:
        """Read once. Returns False if there is nothing to read now."""
        try:
            chunk = os.read(self.descriptor, PIPE_CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._is_finished = not chunk
        if not self._is_taken:
            self._output.add(chunk)
        return True

    def take(self) -> bytes:
        """The output so far, with what the pipe holds. What a process prints after that is dropped."""
        for _ in range(MAX_PIPE_BYTES // PIPE_CHUNK_BYTES):
            if self._is_finished or not self._read_chunk():
                break
        self._is_taken = True
        content, self._output = self._output.content, BoundedOutput(0)
        return content

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.descriptor)
        self.is_closed = True


# -- Process usage ----------------------------------------------------------------------------------
# What the processes of a sandbox use, read from `/proc`.

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessUsage:
    """One process of a sandbox."""

    pid: int
    session: int
    """Process id of the leader of the process's session."""
    cpu_s: float
    """Processor seconds of the process and of its children that have ended."""
    num_threads: int
    memory_bytes: int
    """Resident memory. Pages that processes share are counted for each of them."""


def read_usage(pids: Sequence[int], proc: int) -> list[ProcessUsage]:
    """The processes of these ids that have not ended. `proc`: the open folder `/proc` in which they have the ids."""
    return [usage for pid in pids if (usage := _read_process(pid, proc)) is not None]


def _read_process(pid: int, proc: int) -> ProcessUsage | None:
    try:
        with open(os.open(f"{pid}/stat", os.O_RDONLY, dir_fd=proc), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] == b"Z":
        return None
    ticks = sum(int(field) for field in fields[11:15])
    return ProcessUsage(pid, int(fields[3]), ticks / TICKS_PER_S, int(fields[17]), int(fields[21]) * PAGE_BYTES)


# -- Command server ---------------------------------------------------------------------------------

CHUNK_BYTES = 1 << 18
CHECK_INTERVAL_S = 0.05
"""Seconds between two looks at the processes, while there are any."""
MAX_DEATH_S = 1.0
"""Maximum seconds to wait until processes that were killed have ended."""
DATA_FACTOR = 4
PROCESS_FACTOR = 2
"""The kernel lets commands have this many times their maximum of processes, until the command server has seen them."""
MOST_LIKELY_VICTIM = b"1000"
"""Value of `oom_score_adj`: if the memory of the machine is used up, the kernel kills commands before others."""
MAX_DESCRIPTORS = 1 << 16
RESERVED_DESCRIPTORS = 24
"""Number of file descriptors of this process that are no outputs of commands."""
CANNOT_START, NOT_FOUND, SIGNAL_BASE = 126, 127, 128
MAX_LIMIT = 2**62


@dataclass
class Command:
    """A command that runs."""

    id: int
    pid: int
    deadline: float
    cpu_s_at_start: float
    outputs: list[OutputPipe] = field(default_factory=list)
    exceeded: str | None = None


class CommandNamespace:
    """The process namespace in which commands run, and in which the command server is not.

    `maker`: socket of the process that makes a namespace for each socket that it gets.
    """

    def __init__(self, maker: socket.socket) -> None:
        self._maker = maker
        self.first_process = 0
        """A child of the command server. When it ends, all processes of the namespace end."""

    def make(self) -> None:
        """Let commands start in a new namespace. Raises OSError if none can be made.

        The reply comes by a socket of its own: it closes if a process that makes the namespace ends before.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            with theirs:
                socket.send_fds(self._maker, [b"1"], [theirs.fileno()])
            messages = ours.recvmsg(1, socket.CMSG_SPACE(4) + socket.CMSG_SPACE(12))[1]
        found = {kind: content for _, kind, content in messages}
        if socket.SCM_RIGHTS not in found:
            raise OSError(errno.EAGAIN, "no process namespace for commands can be made")
        (namespace,) = struct.unpack("i", found[socket.SCM_RIGHTS])
        try:
            enter_process_namespace(namespace)
        finally:
            os.close(namespace)
        self.first_process = struct.unpack("3i", found[socket.SCM_CREDENTIALS])[0]


class CommandServer:
    """Runs the commands of one sandbox.

    `limits`: the fields of `SandboxLimits`. `proc`: the open folder `/proc` of this process. `oom_score`: its open file
    `oom_score_adj`. `namespace`: None if the kernel has no namespaces. `counts_own_processes`: whether RLIMIT_NPROC
    counts the processes of the sandbox only.
    """

    def __init__(
        self,
        connection: socket.socket,
        limits: Mapping[str, Any],
        env: Mapping[str, str],
        proc: int,
        oom_score: int,
        namespace: CommandNamespace | None,
        counts_own_processes: bool,
    ) -> None:
        connection.setblocking(False)
        self._connection, self._limits, self._env = connection, limits, dict(env)
        self._proc, self._namespace, self._counts_own_processes = proc, namespace, counts_own_processes
        self._oom_score, self._own_oom_score = oom_score, os.pread(oom_score, 16, 0)
        self._incoming, self._outgoing = FrameBuffer(), bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, self._exchange)
        self._selector.register(_pipe_of_ended_children(), selectors.EVENT_READ, None)
        self._commands: dict[int, Command] = {}
        """Running commands by process id."""
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._open_files[1], self._open_files[1]))
        self._max_descriptors = min(self._open_files[1], MAX_DESCRIPTORS) - RESERVED_DESCRIPTORS
        self._background: dict[OutputPipe, None] = {}
        """Outputs of commands that have ended, which processes in the background may hold open. Oldest first."""
        self._killed: set[int] = set()
        """Sessions whose processes are killed, until none is left."""
        self._is_open = True
        self._next_check = 0.0

    def serve(self) -> None:
        """Serve requests until the trainer closes the socket or ends."""
        while self._is_open:
            is_idle = not self._commands and not self._list_processes()
            for key, _ in self._selector.select(None if is_idle else CHECK_INTERVAL_S):
                key.data() if key.data else os.read(key.fd, CHUNK_BYTES)
            self._reap()
            if time.monotonic() >= self._next_check:
                self._enforce_limits()
                self._next_check = time.monotonic() + CHECK_INTERVAL_S

    # -- requests -------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            data = self._connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._is_open = False
            return
        for message, content in self._incoming.feed(data):
            if "run" in message:
                self._start(message, content)
            for command in self._commands.values():
                if command.id == message.get("cancel"):
                    self._kill_session(command.pid)

    def _start(self, request: Mapping[str, Any], content: bytes) -> None:
        while len(self._selector.get_map()) >= self._max_descriptors and self._background:
            self._close(next(iter(self._background)))  # the process gets SIGPIPE when it prints
        descriptors: list[int] = []
        try:
            self._require_descriptors()
            descriptors.append(open_input(content))
            descriptors += os.pipe()
            descriptors += os.pipe()
            stdin, stdout, stdout_end, stderr, stderr_end = descriptors
            pid = self._fork()
        except OSError as error:
            for descriptor in descriptors:
                os.close(descriptor)
            message = f"sandbox: the command cannot be started: {error.strerror}\n"
            self._send(request["run"], CANNOT_START, None, b"", message.encode())
            return
        if pid == 0:
            self._execute(request, [stdin, stdout_end, stderr_end])
        for descriptor in (stdin, stdout_end, stderr_end):
            os.close(descriptor)
        cpu_s = 0.0 if self._limits["cpu_s"] is None else self._used_cpu_s()
        command = Command(request["run"], pid, time.monotonic() + request["timeout_s"], cpu_s)
        for descriptor in (stdout, stderr):
            output = OutputPipe(descriptor, self._limits["max_output_bytes"])
            command.outputs.append(output)
            self._selector.register(descriptor, selectors.EVENT_READ, functools.partial(self._read, output))
        self._commands[pid] = command

    def _fork(self) -> int:
        with contextlib.suppress(OSError):
            os.pwrite(self._oom_score, MOST_LIKELY_VICTIM, 0)  # the child cannot: `/proc` is read-only for commands
        try:
            return os.fork()
        except OSError as error:
            if self._namespace is None or error.errno != errno.ENOMEM:
                raise
            self._namespace.make()  # the first process has ended, and the kernel starts no others
            return os.fork()
        finally:
            with contextlib.suppress(OSError):
                os.pwrite(self._oom_score, self._own_oom_score, 0)

    def _require_descriptors(self) -> None:
        """Raise OSError if the outputs of running commands leave no file descriptors for another command."""
        if len(self._selector.get_map()) >= self._max_descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def _execute(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Become the command, in the child."""
        failing = ""
        try:
            arguments, env = request["command"], {**self._env, **request["env"]}
            call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_DFL)  # an ignored signal would stay ignored in the command
            os.closerange(3, 65536)
            self._set_limits()
            failing = f"cwd {request['cwd']}"
            os.chdir(request["cwd"] or ".")
            failing = arguments[0]
            os.execvpe(arguments[0], arguments, env)
        except BaseException as error:  # noqa: BLE001 - the child ends
            os.write(2, f"{failing}: {getattr(error, 'strerror', None) or error}\n".encode(errors="replace"))
        finally:
            os._exit(NOT_FOUND)

    def _set_limits(self) -> None:
        limits = {
            resource.RLIMIT_CORE: 0,
            # The address space of threads counts here, which they use in part only. Resident memory is watched.
            resource.RLIMIT_DATA: DATA_FACTOR * self._limits["memory_bytes"],
            resource.RLIMIT_FSIZE: self._limits["max_file_bytes"],
        }
        if self._counts_own_processes:
            limits[resource.RLIMIT_NPROC] = PROCESS_FACTOR * self._limits["max_processes"]
        for kind, value in limits.items():
            hard = resource.getrlimit(kind)[1]
            value = min(value, MAX_LIMIT if hard == resource.RLIM_INFINITY else hard)
            resource.setrlimit(kind, (value, value))
        resource.setrlimit(resource.RLIMIT_NOFILE, self._open_files)

    # -- the end of commands --------------------------------------------------------------------------

    def _read(self, output: OutputPipe) -> None:
        if not output.is_closed and not output.read():
            self._close(output)

    def _close(self, output: OutputPipe) -> None:
        if not output.is_closed:
            self._selector.unregister(output.descriptor)
            output.close()
            self._background.pop(output, None)

    def _reap(self) -> None:
        """Answer the commands that have ended. Orphans become children of this process and are reaped, too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (command := self._commands.pop(pid, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                self._answer(command, code if code >= 0 else SIGNAL_BASE - code)

    def _answer(self, command: Command, exit_code: int) -> None:
        """Send the result. Later output of processes in the background is dropped."""
        stdout, stderr = (output.take() for output in command.outputs)
        self._background.update((output, None) for output in command.outputs if not output.is_closed)
        is_killed = exit_code == SIGNAL_BASE + signal.SIGKILL  # a command may end at the moment of its deadline
        self._send(command.id, exit_code, command.exceeded if is_killed else None, stdout, stderr)

    def _send(self, number: int, exit_code: int, exceeded: str | None, stdout: bytes, stderr: bytes) -> None:
        reply = {"id": number, "exit_code": exit_code, "exceeded": exceeded, "stdout_bytes": len(stdout)}
        self._outgoing += encode_frame(reply, stdout + stderr)
        self._flush()

    def _flush(self) -> None:
        """Send what the socket takes. The rest follows when the trainer has read."""
        try:
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # the trainer has ended
            self._is_open = False
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._selector.modify(self._connection, wanted, self._exchange)

    def _exchange(self) -> None:
        self._flush()
        self._receive()

    # -- limits ---------------------------------------------------------------------------------------

    def _enforce_limits(self) -> None:
        running, now = self._list_processes(), time.monotonic()
        if len(running) > self._limits["max_processes"]:  # at once: thousands take long to read
            self._kill_all(running, "processes")
            return
        usages = read_usage(running, self._proc)
        self._kill_sessions(usages)
        if sum(usage.memory_bytes for usage in usages) > self._limits["memory_bytes"]:
            self._kill_all(running, "memory")
        elif sum(usage.num_threads for usage in usages) > self._limits["max_processes"]:
            self._kill_all(running, "processes")
        max_cpu_s, cpu_s = self._limits["cpu_s"], self._used_cpu_s(usages)
        for command in self._commands.values():
            exceeded = "time" if now >= command.deadline else None
            if max_cpu_s is not None and cpu_s - command.cpu_s_at_start > max_cpu_s:
                exceeded = "cpu"
            if exceeded and command.pid not in self._killed:
                command.exceeded = command.exceeded or exceeded
                self._kill_session(command.pid, usages)

    def _used_cpu_s(self, usages: Sequence[ProcessUsage] | None = None) -> float:
        """Processor seconds of all processes so far."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        running = read_usage(self._list_processes(), self._proc) if usages is None else usages
        if self._namespace is not None:
            running = [*running, *read_usage([self._namespace.first_process], self._proc)]  # has reaped others
        return ended.ru_utime + ended.ru_stime + sum(usage.cpu_s for usage in running)

    def _list_processes(self) -> list[int]:
        """The processes of commands, also those that have not been reaped."""
        if self._namespace is None:
            return list_descendants(os.getpid())
        others = {os.getpid(), self._namespace.first_process}
        return [int(entry) for entry in os.listdir(self._proc) if entry.isdigit() and int(entry) not in others]

    def _kill_all(self, running: Sequence[int], exceeded: str) -> None:
        """Kill all processes of the sandbox. Those that fork all the time leave any list of processes behind.

        The kernel ends all processes of the namespace in one step, in which none of them can fork, and also the first
        process of the commands' namespace. The next command starts in a new one.
        """
        for command in self._commands.values():
            command.exceeded = command.exceeded or exceeded
        if self._namespace is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            deadline = time.monotonic() + MAX_DEATH_S
            while self._list_processes() and time.monotonic() < deadline:
                self._reap()  # now: those that have not ended would count as processes of the next command
                time.sleep(0.001)
        else:
            kill_processes(running)

    def _kill_session(self, leader: int, usages: Sequence[ProcessUsage] | None = None) -> None:
        """Kill the processes of a command, and those that they start meanwhile."""
        self._killed.add(leader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)  # in one step: those that fork all the time leave a list behind
        self._kill_sessions(read_usage(self._list_processes(), self._proc) if usages is None else usages)

    def _kill_sessions(self, usages: Sequence[ProcessUsage]) -> None:
        members = [usage for usage in usages if usage.session in self._killed]
        kill_processes([usage.pid for usage in members])
        self._killed &= {usage.session for usage in members} | self._commands.keys()


def open_input(content: bytes) -> int:
    """The standard input of a command. Without content it is `/dev/null`: some programs read any other file."""
    if not content:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    file = os.memfd_create("sandbox-input", os.MFD_CLOEXEC)
    with open(file, "wb", closefd=False) as opened:
        opened.write(content)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _pipe_of_ended_children() -> int:
    """A pipe that can be read when a child has ended."""
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read_end


def kill_processes(pids: Sequence[int]) -> None:
    """Send SIGKILL to processes that may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


# -- Sandbox process --------------------------------------------------------------------------------
# The processes of a local sandbox: launcher, namespaces, command server.
#
# The launcher makes the folder of the sandbox and stays outside of the namespaces, so that it can remove the folder.
# Its child enters the namespaces, and the child of that child, the first process of the process namespace, becomes the
# command server. When one of them ends, the kernel ends the next one with SIGKILL, and with the command server all
# processes of the namespace.
#
# Commands run in a second process namespace within the first one, so they have no name for the command server: they
# cannot signal, trace, limit or slow it down. They can end the first process of their own namespace, and all processes
# in it. The command server then asks for another namespace, which the child of the launcher makes.

START = -1
"""Id of the answer to the start."""
TRY_WITHOUT_NAMESPACES = 77
"""Exit code if the kernel refuses namespaces, or the mounts in them."""
SHARED_FOLDERS = ("/dev/shm", "/dev/pts")
"""Folders of the machine that commands may write if they have none of their own: programs need them."""
END_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


def main(folder: str) -> None:
    """Run a sandbox until the trainer closes the socket at standard input, or ends.

    Makes `folder`, which must not exist, with the folders `work` and `tmp` in it, and removes it at the end.
    """
    os.mkdir(folder, 0o700)  # END_SIGNALS are blocked until the handlers are set (_blocked_signals in local_sandbox.py)
    try:
        for inner in ("work", "tmp"):
            os.mkdir(os.path.join(folder, inner))
        for number in END_SIGNALS:
            signal.signal(number, lambda *_: sys.exit(1))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        _run()
    finally:
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _kill_descendants()
        remove_folder(folder)


def _run() -> None:
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    settings, launcher = _receive_settings(connection), os.getpid()
    if settings is None:
        return  # the trainer has ended
    confinement.call_prctl(confinement.PR_SET_CHILD_SUBREAPER)
    _die_with_parent(settings["trainer_pid"], signal.SIGTERM)
    code = _wait(_fork(lambda: _enter_namespaces(settings, connection, launcher)))
    if code == TRY_WITHOUT_NAMESPACES:
        _wait(_fork(lambda: _serve(settings, connection, [], None)))
    connection.close()


def _receive_settings(connection: socket.socket) -> dict[str, Any] | None:
    """The first message of the trainer, which sends no other before the answer."""
    frames = FrameBuffer()
    while data := connection.recv(1 << 16):
        for message, _ in frames.feed(data):
            return message
    return None


def remove_folder(folder: str) -> None:
    """Remove a folder of processes that have ended, also if they took away the rights to folders in it.

    The programs `rm` and `chmod` can remove folders that are nested deeper than Python's functions can. They follow no
    symbolic link in the folder.
    """
    if os.path.islink(folder):
        os.unlink(folder)
        return
    remove = ["rm", "-rf", "--", folder]
    if subprocess.run(remove, stderr=subprocess.DEVNULL, check=False).returncode:
        subprocess.run(["chmod", "-R", "u+rwX", "--", folder], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(remove, check=False)


def _fork(body: Callable[[], int]) -> int:
    """Run `body` in a child, which dies with this process and ends with the exit code that `body` returns.

    Returns the id of the child.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        confinement.call_prctl(confinement.PR_SET_PDEATHSIG, signal.SIGKILL)
        code = body()
    except BaseException:  # noqa: BLE001 - the process ends
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(child: int) -> int:
    """Wait for a child. Returns its exit code, as a positive number."""
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _enter_namespaces(settings: dict[str, Any], connection: socket.socket, launcher: int) -> int:
    confined = confinement.enter_namespaces(settings["network"])
    if not confined:
        return TRY_WITHOUT_NAMESPACES
    _die_with_parent(launcher, signal.SIGKILL)  # entering a user namespace clears the parent-death signal
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = _fork(lambda: _serve(settings, connection, confined, theirs))
    connection.close()
    theirs.close()
    max_processes = PROCESS_FACTOR * settings["limits"]["max_processes"]
    while (request := socket.recv_fds(ours, 1, 1))[0]:
        for descriptor in request[1]:
            with socket.socket(fileno=descriptor) as replies, contextlib.suppress(OSError):
                _wait(_fork(functools.partial(_start_first_process, ours, replies, max_processes)))
    return _wait(child)


def _start_first_process(requests: socket.socket, replies: socket.socket, max_processes: int) -> int:
    """Start the first process of a new process namespace, which becomes a child of the command server.

    It sends the open namespace, and reaps processes that have lost their parents.
    """
    requests.close()
    confinement.enter_process_namespace(None)
    if os.fork():
        return 0
    confinement.mount_own_processes(max_processes)
    namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
    confinement.call_prctl(confinement.PR_SET_DUMPABLE, 0)
    socket.send_fds(replies, [b"1"], [namespace])
    replies.close()
    os.close(namespace)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        signal.sigwait([signal.SIGCHLD])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _serve(
    settings: dict[str, Any], connection: socket.socket, confined: list[str], maker: socket.socket | None
) -> int:
    """Confine this process and serve requests. `maker`: makes process namespaces."""
    writable = [settings["folder"], *SHARED_FOLDERS]
    proc, namespace = os.open("/proc", os.O_RDONLY), None
    if maker is not None:
        try:
            writable = confinement.mount_private_folders(
                settings["work"], settings["temporary"], hides_sockets=not settings["network"]
            )
            proc = confinement.hide_processes()
            if confinement.mount_read_only(writable):
                confined.append("read_only")
            namespace = CommandNamespace(maker)
            namespace.make()
        except OSError:
            traceback.print_exc()
            return TRY_WITHOUT_NAMESPACES
        settings["env"]["TMPDIR"] = "/tmp"
    if "network" in confined:
        confinement.start_loopback()
    confinement.call_prctl(confinement.PR_SET_CHILD_SUBREAPER)
    confinement.leave_keyring()
    confinement.drop_privileges()
    oom_score = os.open("self/oom_score_adj", os.O_RDWR, dir_fd=proc)
    if confinement.restrict_writes([*writable, *confinement.WRITABLE_DEVICES]):
        confined.append("writes")
    confinement.call_prctl(confinement.PR_SET_DUMPABLE, 0)  # commands cannot trace this process
    os.chdir(settings["work"])
    connection.sendall(encode_frame({"id": START, "confined": confined}))
    counts_own = "user" in confined and confinement.kernel_version() >= (5, 14)
    CommandServer(connection, settings["limits"], settings["env"], proc, oom_score, namespace, counts_own).serve()
    return 0


def _kill_descendants() -> None:
    """Kill all processes below this process. Without a process namespace, the kernel does not end them."""
    while running := list_descendants(os.getpid()):
        kill_processes(running)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _die_with_parent(parent: int, signal_number: int) -> None:
    """Let the kernel send a signal to this process when its parent ends."""
    confinement.call_prctl(confinement.PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)
