"""The warden: a small process between a trainer and its server. It ends the server's tree when either of them ends.

    trainer --starts--> warden --starts--> server main (SGLang) --starts--> scheduler, detokenizer, ...

The warden imports the standard library only (about 15 MB of memory, one thread), because it must work when everything
else fails. It does the following:

* When the trainer ends (`processes.py`), or the warden's standard input ends, it ends the whole tree.
* When the server main or one of its workers ends, it ends the rest of the tree and reports the exit code and the end of
  the log to the trainer. SGLang itself takes 5 s and more to notice that a worker has ended.
* It is the sub-reaper of the tree: an orphaned scheduler becomes a child of the warden and cannot escape.
* It copies the server's output into a log file of bounded size.
* After the end it removes the temporary folder and the shared-memory files that the tree had mapped.

Protocol: standard input carries one JSON line, the specification, and then the commands `ready` (the server has
started) and `stop`. Standard output carries JSON lines, the events `started`, `owns` (shared-memory files) and
`exited`. Keys of the specification:

    argv, env, scratch   command, complete environment and working folder of the server main
    temporary            folder that is removed when the tree has ended
    payload              text for the standard input of the server main: its server arguments as one JSON line
    log_path, log_limit_bytes, secrets   see `BoundedLog`
    trainer_pid          process id of the trainer
    start_deadline       time (`time.monotonic()`) until which new shared memory is looked for often

The warden sends no requests to the server. Of SGLang it knows only the names of workers and of shared-memory files.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, BinaryIO, Protocol

from verl_server.server.warden.processes import (
    ProcessWatch,
    created_since,
    find_shared_memory,
    is_cleanup_helper,
    list_descendants,
    may_belong_to_tree,
    read_created_names,
    remove_shared_memory,
    watch_shared_memory,
    worker_name,
)

if TYPE_CHECKING:
    from verl_server.types import Json


# -- Events -----------------------------------------------------------------------------------------
# The events that a warden sends to the trainer, one JSON line each. Imports the standard library only.


def emit(event: Json) -> None:
    """Send an event to the trainer."""
    with contextlib.suppress(OSError):  # the trainer has ended, so nobody reads the events
        os.write(1, json.dumps(event).encode() + b"\n")


def emit_exit(reason: str, exit_code: int | None, log_tail: str) -> None:
    """Report the end of the server. It must be the last event."""
    emit({"event": "exited", "reason": reason, "code": exit_code, "tail": log_tail})


def describe_failure(error: Exception) -> str:
    """The reason of an end that an error of the warden itself causes. Its standard error has the traceback."""
    return f"warden failed: {type(error).__name__}: {error}"


# -- Log file ---------------------------------------------------------------------------------------
# A log file of bounded size that hides keys. Imports the standard library only: the warden uses it.

TAIL_BYTES = 32 * 1024
#: Minimum number of characters of a key. Hiding a shorter key would also hide parts of ordinary words in the log.
MIN_SECRET_CHARACTERS = 8


class BoundedLog:
    """A log file of at most about twice `limit_bytes` (with its predecessor `PATH.1`), and its last lines in memory.

    Every occurrence of a string of `secrets` with at least `MIN_SECRET_CHARACTERS` characters is written as `***`, also
    as Python or JSON print it: with escaped backslashes and quotes.
    A file that was moved or removed is created again. Lines that cannot be written, for example because the disk is
    full or the folder was removed, are kept in memory only. The constructor raises OSError if it cannot open the file.
    """

    def __init__(self, path: str, limit_bytes: int, secrets: list[str]) -> None:
        self._path, self._limit_bytes = path, limit_bytes
        self._secrets = _written_forms(secrets)
        self._partial_line = b""
        self._file: BinaryIO | None = self._open()
        """None while the file cannot be opened."""
        self._tail: collections.deque[bytes] = collections.deque()
        self._tail_bytes = 0

    def _open(self) -> BinaryIO:
        return open(self._path, "ab", buffering=0)

    def write(self, chunk: bytes) -> None:
        """Append output. Only whole lines are written, because SGLang logs its arguments, API keys included."""
        lines, newline, self._partial_line = (self._partial_line + chunk).rpartition(b"\n")
        if len(self._partial_line) > TAIL_BYTES:
            lines, newline, self._partial_line = lines + newline + self._partial_line, b"", b""
        self._write_lines(lines + newline)

    def _write_lines(self, lines: bytes) -> None:
        for secret in self._secrets:
            lines = lines.replace(secret, b"***")
        self._tail.append(lines)
        self._tail_bytes += len(lines)
        while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        with contextlib.suppress(OSError):  # a full disk must not end the server
            self._current_file().write(lines)

    def _current_file(self) -> BinaryIO:
        """The file at the path, opened again when the open file is not there any more or has its full size."""
        if self._file is not None:
            status = os.fstat(self._file.fileno())
            if not self._is_at_path(status):
                self._close_file()
            elif status.st_size > self._limit_bytes:
                os.replace(self._path, self._path + ".1")
                self._close_file()
        if self._file is None:
            self._file = self._open()
        return self._file

    def _is_at_path(self, status: os.stat_result) -> bool:
        try:
            return os.path.samestat(status, os.stat(self._path))
        except OSError:
            return False

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def tail(self) -> str:
        """The last `TAIL_BYTES` of the log."""
        return b"".join(self._tail)[-TAIL_BYTES:].decode("utf-8", "replace")

    def close(self) -> None:
        self._write_lines(self._partial_line)
        self._partial_line = b""
        self._close_file()


def _written_forms(secrets: list[str]) -> list[bytes]:
    """The secrets as texts show them, longest first: another form may be a part of it."""
    long = [secret for secret in secrets if len(secret) >= MIN_SECRET_CHARACTERS]
    forms = {form for secret in long for form in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1])}
    forms |= {repr(form)[1:-1] for form in forms}  # the arguments within a text that is printed itself
    return sorted((form.encode("utf-8", "replace") for form in forms), key=len, reverse=True)


# -- Spawned server ---------------------------------------------------------------------------------
# The server main as the warden sees it, and its start as a new program. Imports the standard library only.


class ServerMain(Protocol):
    """The main process of a server: the part of `subprocess.Popen` that the warden uses."""

    @property
    def pid(self) -> int: ...

    @property
    def stdout(self) -> IO[bytes] | None:
        """Standard output and standard error of the process."""

    def wait(self, timeout: float | None = None) -> int: ...

    def poll(self) -> int | None: ...


def spawn_server(spec: Json) -> ServerMain:
    """Start the server main as a new program."""
    server = subprocess.Popen(
        spec["argv"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=spec["env"],
        cwd=spec["scratch"],
    )
    assert server.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process has already ended; the warden's loop reports its exit
        server.stdin.write(spec["payload"].encode())
        server.stdin.close()
    return server


# -- Warden -----------------------------------------------------------------------------------------

PR_SET_CHILD_SUBREAPER = 36
#: Seconds that helpers which remove shared memory may live after the rest of the tree.
CLEANUP_HELPER_GRACE_S = 1.0
#: Seconds to wait for the exit code of the server main. Its workers end with it and may be noticed first.
MAIN_EXIT_TIMEOUT_S = 0.3
#: Seconds between two surveys of the tree while the server starts, and afterwards.
START_SURVEY_INTERVAL_S = 2.0
SURVEY_INTERVAL_S = 30.0
#: Seconds after which the creator of a file in shared memory has mapped it.
SHM_MAPPING_DELAY_S = 0.1
#: Seconds by which the time of a file can be before the time of the clock that processes read.
FILE_CLOCK_LAG_S = 0.1
MAX_SELECT_S = 0.5
#: Seconds between two looks at a tree that is being killed: at first, and at most. Each look reads all of `/proc`.
KILL_POLL_S, MAX_KILL_POLL_S = 0.01, 0.1
READ_BYTES = 65536

#: Signals that come from a terminal, on which the trainer decides. The warden and its server ignore them.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGHUP)
TRAINER_GONE = "trainer gone"
WARDEN_KILLED = "warden killed"
READY, STOP = "ready", "stop"


class Warden:
    """One server's process tree, from the start of the server main to the removal of its last file."""

    def __init__(self, spec: Json, start_server: Callable[[Json], ServerMain]) -> None:
        self._spec = spec
        self._log = BoundedLog(spec["log_path"], spec["log_limit_bytes"], spec["secrets"])
        self._selector = selectors.DefaultSelector()
        self._processes = ProcessWatch(self._selector)
        self._shared_memory: dict[str, int] = {}
        """Names and inodes of the shared-memory files that the tree has created and mapped."""
        self._watched_workers: set[int] = set()
        self._next_survey = 0.0
        self._started_at = time.time() - FILE_CLOCK_LAG_S
        self._server = start_server(spec)
        emit({"event": "started", "pid": self._server.pid})

    def run(self) -> None:
        """Watch until the server, the trainer or the command `stop` ends the tree; then remove what is left."""
        reason = WARDEN_KILLED  # SIGTERM raises SystemExit
        try:
            reason = self._watch()
        except Exception as error:
            reason = describe_failure(error)
            raise
        finally:
            self._end(reason)

    # -- while the server lives -----------------------------------------------------------------------

    def _watch(self) -> str:
        """Handle events until the tree has to end. Returns the reason."""
        assert self._server.stdout is not None
        os.set_blocking(self._server.stdout.fileno(), False)
        self._selector.register(self._server.stdout, selectors.EVENT_READ, self._on_output)
        self._selector.register(0, selectors.EVENT_READ, self._on_command)
        if (created := watch_shared_memory()) is not None:
            self._selector.register(created, selectors.EVENT_READ, lambda: self._on_shared_memory(created))
        for pid, name in ((self._server.pid, "server"), (self._spec["trainer_pid"], "trainer")):
            if not self._processes.add(pid, f"{name} gone"):
                return f"{name} gone"
        while True:
            timeout_s = min(MAX_SELECT_S, max(self._next_survey - time.monotonic(), 0.0))
            for key, _ in self._selector.select(self._processes.max_wait_s(timeout_s)):
                if (reason := key.data()) is not None:
                    return str(reason)
            if (reason := self._processes.poll()) is not None:
                return reason
            self._survey()

    def _on_output(self) -> None:
        assert self._server.stdout is not None
        if not self._copy_output():
            self._selector.unregister(self._server.stdout)

    def _on_command(self) -> str | None:
        """The reason for which standard input ends the tree, if it does."""
        commands = os.read(0, READ_BYTES).decode().split()
        if not commands:
            return TRAINER_GONE
        if READY in commands:
            self._spec["start_deadline"] = time.monotonic()
        return STOP if STOP in commands else None

    def _on_shared_memory(self, created: int) -> None:
        """Look soon whether a new file belongs to the tree: the processes may end before the next survey."""
        if any(may_belong_to_tree(name, os.getpid()) for name in read_created_names(created)):
            self._next_survey = min(self._next_survey, time.monotonic() + SHM_MAPPING_DELAY_S)

    def _copy_output(self) -> bool:
        """Copy a part of the server's output to the log. Returns False when there is none."""
        assert self._server.stdout is not None
        try:
            chunk = os.read(self._server.stdout.fileno(), READ_BYTES)
        except BlockingIOError:
            return False
        self._log.write(chunk)
        return bool(chunk)

    def _survey(self) -> None:
        """Watch new workers, and report new shared-memory files to the trainer.

        The trainer removes these files if the warden itself is killed.
        """
        now = time.monotonic()
        if now < self._next_survey:
            return
        pids = list_descendants(os.getpid())
        new_files = {
            name: inode
            for name, inode in find_shared_memory(pids).items()
            if self._shared_memory.get(name) != inode and created_since(name, self._started_at)
        }
        if new_files:
            self._shared_memory |= new_files
            emit({"event": "owns", "shared_memory": new_files})
        for pid in set(pids) - self._watched_workers:
            if (name := worker_name(pid, self._spec["worker_prefix"])) is not None:
                self._watched_workers.add(pid)
                self._processes.add(pid, f"{name} gone")
        is_starting = now < self._spec["start_deadline"]
        self._next_survey = now + (START_SURVEY_INTERVAL_S if is_starting else SURVEY_INTERVAL_S)

    # -- the end of the tree --------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        """End the tree and remove its files. Every step runs, whether or not the steps before it fail."""
        exit_code = self._exit_code(reason)
        with contextlib.ExitStack() as steps:  # the steps run in reverse order
            steps.callback(self._log.close)
            steps.callback(shutil.rmtree, self._spec["temporary"], ignore_errors=True)
            steps.callback(remove_shared_memory, self._shared_memory)
            steps.callback(self._kill_tree)
            steps.callback(lambda: emit_exit(reason, exit_code, self._log.tail()))  # callers wait for it
            steps.callback(self._drain_output)
            self._next_survey = 0.0
            self._survey()
            self._kill_once(spare_helpers=True)

    def _exit_code(self, reason: str) -> int | None:
        """Exit code of the server main if it ended by itself.

        When a worker ends, the server main often ends with it.
        """
        if reason in (STOP, TRAINER_GONE, WARDEN_KILLED):
            return None
        try:
            return self._server.wait(MAIN_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None

    def _drain_output(self) -> None:
        while self._copy_output():
            pass

    def _kill_tree(self) -> None:
        """Kill the tree with SIGKILL. Helpers that remove shared memory are killed after a grace period."""
        grace_end = time.monotonic() + CLEANUP_HELPER_GRACE_S
        poll_s = KILL_POLL_S
        while self._kill_once(spare_helpers=time.monotonic() < grace_end):
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, MAX_KILL_POLL_S)

    def _kill_once(self, spare_helpers: bool) -> bool:
        """Send SIGKILL to every process of the tree. Returns False when no process was left."""
        pids = list_descendants(os.getpid())
        for pid in pids:
            if not (spare_helpers and is_cleanup_helper(pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._reap()
        return bool(pids)

    def _reap(self) -> None:
        self._server.poll()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass


def main(start_server: Callable[[Json], ServerMain] = spawn_server) -> None:
    """Read the specification, start the server with `start_server`, and return when the tree has ended."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started this process may block signals
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally` in `run`, so that the tree ends too
    received = b""
    while b"\n" not in received:
        chunk = os.read(0, READ_BYTES)
        if not chunk:
            return  # the trainer ended before it sent the specification
        received += chunk
    specification, _, command = received.partition(b"\n")
    if STOP.encode() in command:  # the start was aborted at once
        return
    try:
        _become_subreaper()
        warden = Warden(json.loads(specification), start_server)
    except Exception as error:
        emit_exit(describe_failure(error), None, "")
        raise
    warden.run()


def _become_subreaper() -> None:
    """Become the parent of all orphans of the tree."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
