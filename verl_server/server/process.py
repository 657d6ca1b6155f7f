"""The trainer's side of a supervised server: start the process tree, watch it, end it.

`warden/warden.py` describes the process tree. Every `ServerProcess` owns one warden and one temporary folder and gives
both back in `stop`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from verl_server.errors import (
    BadInputError,
    DeadlineError,
    ServerDiedError,
    StartupError,
    UnsupportedError,
    VerlServerError,
)
from verl_server.server.environment import (
    LOG_NAME,
    WORKING_FOLDER,
    EngineProfile,
    ServerPython,
    make_server_folder,
    no_proxy_environment,
    server_environment,
)
from verl_server.server.server_main import EXIT_BAD_ARGUMENT, EXIT_OTHER_VERSION, OTHER_VERSION, make_payload
from verl_server.server.warden.processes import read_command_line, read_tree, remove_shared_memory

logger = logging.getLogger(__name__)


# -- Warden process ---------------------------------------------------------------------------------
# Wardens as `ServerProcess` sees them: how they start, and how they end when they do not end by themselves.

WARDEN_SCRIPT = Path(__file__).with_name("warden") / "warden_main.py"
#: Seconds to wait for the exit code of a warden that has ended or was killed.
WARDEN_EXIT_TIMEOUT_S = 5.0


class WardenProcess(Protocol):
    """A started warden that waits for its specification: the part of `subprocess.Popen` that `ServerProcess` uses."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


#: Starts a warden: `spawn_warden`, or the forkserver's.
WardenFactory = Callable[[], WardenProcess]


def spawn_warden() -> WardenProcess:
    """Start a warden in a new Python process and a new session. It imports the standard library only."""
    return subprocess.Popen(
        [sys.executable, "-I", str(WARDEN_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for_warden(warden: WardenProcess) -> int | None:
    """The exit code of a warden that ends. None if it has not ended after `WARDEN_EXIT_TIMEOUT_S`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return warden.wait(WARDEN_EXIT_TIMEOUT_S)
    return None


def kill_session(warden: WardenProcess) -> None:
    """Kill all processes of a warden's session. Used when the warden itself was killed or does not end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(warden.pid, signal.SIGKILL)


def discard_warden(warden: WardenProcess) -> int | None:
    """End a warden that has started no server, and close its pipes. Returns its exit code if it has one."""
    for pipe in (warden.stdin, warden.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()
    code = wait_for_warden(warden)
    if code is None:
        kill_session(warden)
        code = wait_for_warden(warden)
    return code


# -- Exit status ------------------------------------------------------------------------------------
# How a server ended, and the notification of everyone who waits for it.


@dataclass(frozen=True)
class ExitStatus:
    """How a server ended."""

    reason: str
    """Cause as the warden saw it: "stop", "trainer gone", "server gone", or "NAME gone" of the worker that ended,
    for example "sglang::scheduler gone"."""
    code: int | None
    """Exit code of the server main; negative for a signal. None when the server main did not end by itself."""
    log_tail: str
    """Last lines of the server's log."""

    def describe(self) -> str:
        """A short description for messages, for example "exit code 1" or "killed by SIGKILL"."""
        if self.code is None:
            is_worker = "::" in self.reason and self.reason.endswith(" gone")
            return f"its worker {self.reason}" if is_worker else self.reason
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        return f"exit code {self.code}"


class ExitNotifier:
    """The end of one server, recorded once and reported to all listeners and waiting threads."""

    def __init__(self) -> None:
        self._exit: ExitStatus | None = None
        self._exited = threading.Event()
        self._listeners: list[Callable[[ExitStatus], None]] = []
        self._lock = threading.Lock()

    @property
    def exit(self) -> ExitStatus | None:
        """How the server ended. None while it lives."""
        return self._exit

    def on_exit(self, listener: Callable[[ExitStatus], None]) -> None:
        """Call `listener` once when the server has ended, from another thread; at once if it has already ended."""
        with self._lock:
            if self._exit is None:
                self._listeners.append(listener)
                return
        listener(self._exit)

    def wait_exit(self, timeout_s: float) -> ExitStatus | None:
        """Wait until the server has ended. Returns None when it still lives after `timeout_s`."""
        self._exited.wait(timeout_s)
        return self._exit

    def note_exit(self, exit_status: ExitStatus) -> None:
        """Record the end of the server and notify everyone who waits. Later calls do nothing."""
        with self._lock:
            if self._exit is not None:
                return
            self._exit = exit_status
            listeners, self._listeners = self._listeners, []
        self._exited.set()
        logger.info("a server ended: %s", exit_status.describe())
        for listener in listeners:
            try:
                listener(exit_status)
            except Exception:  # the error of one listener must not hide the end from the others
                logger.exception("a listener failed when a server ended")


def _signal_name(number: int) -> str:
    """Name of a signal. Of the real-time signals, only the first and the last have names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- Pipe -------------------------------------------------------------------------------------------
# Writing to a pipe whose reader may hang.

POLL_MS = 100


def write_all(pipe: IO[bytes], data: bytes, timeout_s: float) -> None:
    """Write `data`, which may be longer than the buffer of the pipe.

    Raises BrokenPipeError when the reader has ended, and TimeoutError when it has not read everything after
    `timeout_s` seconds.
    """
    fd, rest = pipe.fileno(), memoryview(data)
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    os.set_blocking(fd, False)
    try:
        while rest:
            poll.poll(POLL_MS)
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(fd, rest) :]
            if rest and time.monotonic() > deadline:
                raise TimeoutError(f"{len(rest)} of {len(data)} bytes were not read within {timeout_s:g} s")
    finally:
        os.set_blocking(fd, True)


# -- Cpu time ---------------------------------------------------------------------------------------
# CPU time of a server's schedulers, read from `/proc` without a look at other processes.

#: Parts of the command lines of the processes that compute: SGLang's schedulers and vLLM's workers.
SCHEDULERS = (b"scheduler", b"VLLM::Worker")
#: Seconds between two searches for the schedulers while none is known.
SEARCH_INTERVAL_S = 5.0
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class SchedulerCpu:
    """CPU seconds since the start of a server."""

    own_s: float
    """Seconds of the schedulers. With an accelerator, a hung scheduler may use CPU time, too."""
    helpers_s: float
    """Seconds of the programs that the schedulers have started, for example compilers of kernels."""


class SchedulerCpuReader:
    """Reads the CPU time of the schedulers below a server main. The schedulers are searched for once."""

    def __init__(self, main_pid: int) -> None:
        self._main_pid = main_pid
        self._schedulers: list[int] = []
        self._next_search = 0.0

    def read(self) -> SchedulerCpu:
        """The CPU time of the schedulers that live, and of their programs. Zero while none is found."""
        times = {pid: read_cpu_times(pid) for pid in self._schedulers}
        if not times or None in times.values():
            self._search()
            times = {pid: read_cpu_times(pid) for pid in self._schedulers}
        own_s = helpers_s = 0.0
        for pid, cpu in times.items():
            if cpu is not None:
                own_s += cpu[0]
                helpers_s += cpu[1] + sum(sum(read_cpu_times(helper) or ()) for helper in read_tree(pid))
        return SchedulerCpu(own_s, helpers_s)

    def _search(self) -> None:
        now = time.monotonic()
        if now >= self._next_search:
            self._next_search = now + SEARCH_INTERVAL_S
            below = read_tree(self._main_pid)
            self._schedulers = [pid for pid in below if any(name in read_command_line(pid) for name in SCHEDULERS)]


def read_cpu_times(pid: int) -> tuple[float, float] | None:
    """CPU seconds of a process, and those of its children that have ended. None when the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    user, system, children_user, children_system = (int(field) / TICKS_PER_SECOND for field in fields[11:15])
    return user + system, children_user + children_system


# -- Supervisor -------------------------------------------------------------------------------------
# Interfaces between a server and those who need it: `Supervisor`, its process ids, and the `AbortCheck` of a start.

#: Called repeatedly while a server starts. Returns the error that ends the start, for example because another node has
#: failed, or None to continue.
AbortCheck = Callable[[], VerlServerError | None]


def never_abort() -> None:
    """The `AbortCheck` of a start that depends on nothing else."""


@dataclass(frozen=True)
class ServerPids:
    """Process ids of one server's process tree, on the machine of the server."""

    main: int
    """Server main: the process that becomes the engine's launcher and HTTP server."""
    warden: int | None
    """Leader of the warden's session: the warden itself if it was forked by a forkserver, otherwise the program that
    started the warden and waits for it. None when the server runs on another machine."""
    workers: tuple[int, ...]
    """Processes below the server main (schedulers, detokenizer). Empty when the server has ended or runs elsewhere."""


@runtime_checkable
class Supervisor(Protocol):
    """A started server as its adapter sees it: a `ServerProcess` of this machine, or a server on another machine."""

    @property
    def pids(self) -> ServerPids: ...

    @property
    def log_path(self) -> Path | None:
        """Path of the server's log file. None when the file is on another machine."""

    @property
    def exit(self) -> ExitStatus | None:
        """How the server ended. None while it lives."""

    def on_exit(self, listener: Callable[[ExitStatus], None]) -> None:
        """Call `listener` once when the server has ended, from another thread; at once if it has already ended."""

    def wait_exit(self, timeout_s: float) -> ExitStatus | None:
        """Wait until the server has ended. Returns None when it still lives after `timeout_s`."""

    def died(self, url: str) -> ServerDiedError:
        """The error for callers that needed the server. Call it only after the server has ended."""

    def keep_log(self) -> None:
        """Keep the log when the server is ended, because an error refers to it. The log of a crashed server is kept."""

    def stop(self, deadline_s: float = 10.0) -> None:
        """End the server and everything below it. May be called more than once."""

    def scheduler_cpu(self) -> SchedulerCpu:
        """CPU time of the server's schedulers and of their programs. Does not grow while it cannot be measured."""


# -- Open files -------------------------------------------------------------------------------------
# The limits of open files and of threads. Each request in flight has a connection, which is an open file.

WANTED_OPEN_FILES = 65536
"""Number of open files that suffices for any client or router. SGLang raises the limit of its servers to the same
number."""


def raise_open_file_limit() -> None:
    """Raise the limit of this process towards WANTED_OPEN_FILES, as far as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(WANTED_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # the system's own limit is lower
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_file_limit() -> int:
    """Maximum number of open files of this process, at most WANTED_OPEN_FILES."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED_OPEN_FILES if soft == resource.RLIM_INFINITY else min(soft, WANTED_OPEN_FILES)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises UnsupportedError where the limit of processes and threads is reached."""
    try:
        thread.start()
    except RuntimeError as error:
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        raise UnsupportedError(
            f"{error}: this user (ulimit -u: {limit}) or container has reached its limit of processes and threads, or "
            "its memory is used up. Raise ulimit -u, and in a container its limit (docker run --pids-limit)"
        ) from error


# -- Process ----------------------------------------------------------------------------------------

LOG_LIMIT_BYTES = 16 * 1024 * 1024
LOG_TAIL_LINES = 40
LOG_SCAN_BYTES = 4096
READY_POLL_S = 0.05
#: Seconds between two messages about a server that starts.
START_REPORT_S = 10.0
SHARED_MEMORY_POLL_S = 0.05
#: Exit codes from here on mean that a signal has ended the warden.
EXIT_BY_SIGNAL = 128
#: Seconds to wait until a killed process tree has unmapped its shared memory.
SHARED_MEMORY_TIMEOUT_S = 5.0


class ServerProcess(ExitNotifier):
    """A `Supervisor` of one server on this machine: its warden, its process tree and its log.

    `server_args` are the engine's server arguments as plain JSON values. They are sent through a pipe, so that API keys
    appear on no command line, in no environment variable and in no file. `log_dir`: absolute path of a folder that
    exists, because a forked warden has another working directory than this process. `python`: interpreter of the
    server; None is the interpreter of this process, which is also that of a spawned warden in any case.
    """

    def __init__(
        self,
        server_args: Mapping[str, Any],
        profile: EngineProfile,
        *,
        env: Mapping[str, str],
        log_dir: Path | str | None,
        start_timeout_s: float,
        warden_factory: WardenFactory,
        python: ServerPython | None = None,
    ) -> None:
        self._refusal = f"{profile.name} refuses the server arguments: "
        self._folder = make_server_folder()
        scratch = self._folder / WORKING_FOLDER
        self.log_path = self._folder / LOG_NAME if log_dir is None else Path(log_dir) / f"{self._folder.name}.log"
        super().__init__()
        self._main_pid: int | None = None
        self._cpu_reader: SchedulerCpuReader | None = None
        self._keeps_log = False
        """Whether the log outlives a clean end of the server."""
        spec = {
            "argv": [sys.executable if python is None else python.path, "-m", profile.main_module],
            "env": server_environment(
                {
                    "TMPDIR": str(scratch),  # removed by the warden
                    **no_proxy_environment(str(server_args.get("host") or "127.0.0.1")),
                    **env,
                },
                python,
            ),
            "payload": make_payload(server_args),
            "scratch": str(scratch),
            "temporary": str(scratch if log_dir is None else self._folder),
            "log_path": str(self.log_path),
            "log_limit_bytes": LOG_LIMIT_BYTES,
            "secrets": [str(server_args[name]) for name in profile.secret_arguments if server_args.get(name)],
            "trainer_pid": os.getpid(),
            "worker_prefix": profile.worker_prefix,
            "start_deadline": time.monotonic() + start_timeout_s,
        }
        self._warden = self._start_warden(warden_factory)
        self._send_spec(spec, start_timeout_s)
        start_thread(threading.Thread(target=self._listen, name="verl-server-warden", daemon=True))

    def _start_warden(self, warden_factory: WardenFactory) -> WardenProcess:
        """Start the warden. When that fails, remove the server's folder."""
        try:
            return warden_factory()
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise StartupError(
                f"the warden process, which starts the server, could not be started: {error}. Check the limits of "
                "processes (`ulimit -u`, the pids limit of the container), of open files (`ulimit -n`) and of memory"
            ) from error
        except BaseException:  # Ctrl-C
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _send_spec(self, spec: Mapping[str, Any], timeout_s: float) -> None:
        """Send the warden what it starts. When that fails, end the warden and remove the server's folder."""
        assert self._warden.stdin is not None
        try:
            write_all(self._warden.stdin, json.dumps(spec).encode() + b"\n", timeout_s)
        except BrokenPipeError:
            code = self._discard_warden()
            raise StartupError(
                f"the warden process, which starts the server, ended at once with exit code {code}. The standard error "
                f"of this process has the reason; `{sys.executable} -I {WARDEN_SCRIPT} < /dev/null` must end without "
                "an error.",
                exit_code=code,
            ) from None
        except BaseException as error:  # also Ctrl-C
            kill_session(self._warden)
            self._discard_warden()
            if isinstance(error, TimeoutError):
                raise DeadlineError(f"the warden process did not read: {error}", operation="start") from error
            raise

    @property
    def pids(self) -> ServerPids:
        """Process ids of the tree. Workers are those that live now."""
        assert self._main_pid is not None, "the server main has not started"
        return ServerPids(main=self._main_pid, warden=self._warden.pid, workers=tuple(read_tree(self._main_pid)))

    def died(self, url: str) -> ServerDiedError:
        """The error for callers that needed the server. Call it only after the server has ended."""
        assert self.exit is not None
        return ServerDiedError(
            f"the server at {url} ended ({self.exit.describe()}) while it was needed",
            exit_code=self.exit.code,
            log_tail=_last_lines(self.exit.log_tail),
            log_path=str(self.log_path),
            url=url,
        )

    def scheduler_cpu(self) -> SchedulerCpu:
        if self._cpu_reader is None:
            assert self._main_pid is not None, "the server main has not started"
            self._cpu_reader = SchedulerCpuReader(self._main_pid)
        return self._cpu_reader.read()

    def wait_ready(
        self,
        is_ready: Callable[[], bool],
        timeout_s: float,
        *,
        fatal_log_phrases: tuple[str, ...] = (),
        check_abort: AbortCheck = never_abort,
    ) -> None:
        """Poll `is_ready` until it returns true.

        Raises StartupError with the end of the log when the server ends first or logs one of `fatal_log_phrases`
        (SGLang can live on for minutes after such a line), BadInputError when the engine refuses an argument,
        DeadlineError after `timeout_s`, and the error that `check_abort` returns.
        """
        started = next_report = time.monotonic()
        deadline = started + timeout_s
        logger.info("a server starts; its log is %s", self.log_path)
        while not is_ready():
            if self.wait_exit(READY_POLL_S) is not None:
                raise self._startup_error()
            if (now := time.monotonic()) > next_report + START_REPORT_S:
                next_report = now
                last_line = next(reversed(_last_lines(self._read_log_end()).splitlines()), "nothing yet")
                logger.info("not ready after %.0f s; %s ends with: %.300s", now - started, self.log_path, last_line)
            if (error := check_abort()) is not None:
                raise error
            log_end = self._read_log_end() if fatal_log_phrases else ""
            if phrase := next((phrase for phrase in fatal_log_phrases if phrase in log_end.lower()), None):
                self.keep_log()
                raise StartupError(
                    f"the server cannot start: its log {self.log_path} has {phrase!r}. Another program uses an address "
                    "of the server: choose another `port`, or end that program.",
                    log_tail=_last_lines(log_end),
                    log_path=str(self.log_path),
                )
            if time.monotonic() > deadline:
                self.keep_log()
                raise DeadlineError(
                    f"the server was not ready after {timeout_s:g} s; its log is {self.log_path}. "
                    "A cold disk cache or a large model needs a larger `timeouts.start_s`.",
                    operation="start",
                    seconds=timeout_s,
                    log_path=str(self.log_path),
                )
        self._send_command("ready")
        logger.info("ready after %.1f s: the server with the log %s", time.monotonic() - started, self.log_path)

    def _startup_error(self) -> VerlServerError:
        """The error for a server that has ended before it was ready."""
        assert self.exit is not None
        lines = self.exit.log_tail.splitlines()
        refusals = [line for line in lines if line.startswith(self._refusal)]
        if self.exit.code == EXIT_BAD_ARGUMENT and refusals:
            return BadInputError(f"the server did not start: {refusals[-1]}", log_path=str(self.log_path))
        versions = [line.removeprefix(OTHER_VERSION) for line in lines if line.startswith(OTHER_VERSION)]
        if self.exit.code == EXIT_OTHER_VERSION and versions:
            return StartupError(versions[-1], exit_code=self.exit.code, log_path=str(self.log_path))
        causes = [found[1] for line in lines if (found := _EXCEPTION.match(line)) is not None]
        cause = f": {causes[0]:.500}" if causes else ""  # the others follow from the first one
        return StartupError(
            f"the server did not start ({self.exit.describe()}){cause}",
            exit_code=self.exit.code,
            log_tail=_last_lines(self.exit.log_tail),
            log_path=str(self.log_path),
        )

    def keep_log(self) -> None:
        self._keeps_log = True

    def stop(self, deadline_s: float = 10.0) -> None:
        """End the whole process tree and remove its files. May be called more than once, and after a crash.

        The log of a crashed server is kept, see `environment.py`.
        """
        if self.exit is not None:
            self.keep_log()
        else:
            self._send_command("stop")
            if self.wait_exit(deadline_s) is None:
                kill_session(self._warden)
        with contextlib.suppress(OSError):
            assert self._warden.stdin is not None
            self._warden.stdin.close()
        try:
            self._warden.wait(deadline_s)
        except subprocess.TimeoutExpired:
            kill_session(self._warden)
        shutil.rmtree(self._folder / WORKING_FOLDER, ignore_errors=True)  # a killed warden leaves it
        if not self._keeps_log or self.log_path.parent != self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _send_command(self, command: str) -> None:
        """Send the warden a command. Does nothing when the warden has ended."""
        with contextlib.suppress(OSError, ValueError):
            assert self._warden.stdin is not None
            self._warden.stdin.write(f"{command}\n".encode())
            self._warden.stdin.flush()

    def _read_log_end(self) -> str:
        """The last `LOG_SCAN_BYTES` of the log file."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - LOG_SCAN_BYTES, 0))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def _listen(self) -> None:
        """Read the warden's events until its pipe ends. Runs in a thread of its own."""
        assert self._warden.stdout is not None
        shared_memory: dict[str, int] = {}
        for line in self._warden.stdout:
            if not line.endswith(b"\n"):
                break  # the warden was killed while it wrote
            event = json.loads(line)
            if event["event"] == "started":
                self._main_pid = event["pid"]
            elif event["event"] == "owns":
                shared_memory.update(event["shared_memory"])
            else:
                self.note_exit(ExitStatus(event["reason"], event["code"], event["tail"]))
        kill_session(self._warden)
        code = wait_for_warden(self._warden)
        if self.exit is None:
            has_failed = code is not None and 0 < code < EXIT_BY_SIGNAL
            reason = f"its warden failed with exit code {code}: see standard error" if has_failed else "warden killed"
            self.note_exit(ExitStatus(reason, None, ""))
            _remove_unmapped(shared_memory)

    def _discard_warden(self) -> int | None:
        """End a warden that has started no server, and remove its folder. Returns its exit code if it has one."""
        shutil.rmtree(self._folder, ignore_errors=True)
        return discard_warden(self._warden)


def _remove_unmapped(shared_memory: Mapping[str, int]) -> None:
    """Remove these files of a killed warden's tree as soon as no process maps them any more."""
    deadline = time.monotonic() + SHARED_MEMORY_TIMEOUT_S
    while remove_shared_memory(shared_memory) and time.monotonic() < deadline:
        time.sleep(SHARED_MEMORY_POLL_S)


#: The last line of a traceback, also with the prefix of vLLM's loggers.
_EXCEPTION = re.compile(
    r"(?:\(\w+ pid=\d+\) )?(?:ERROR .*?\[[\w.]+:\d+\] )?((?:\w+\.)*[A-Z]\w*(?:Error|Exception): .+)"
)


def _last_lines(log: str) -> str:
    return "\n".join(log.strip().splitlines()[-LOG_TAIL_LINES:])
