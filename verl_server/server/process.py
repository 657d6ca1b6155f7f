"""The trainer's side of a supervised server: start the process tree, watch it, end it.

`warden/warden.py` describes the process tree. Every `ServerProcess` owns one warden and one temporary folder and gives
both back in `stop`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError, DeadlineError, ServerDiedError, StartupError, VerlServerError
from verl_server.server.cpu_time import SchedulerCpu, SchedulerCpuReader
from verl_server.server.engine_profile import EngineProfile
from verl_server.server.environment import no_proxy_environment, server_environment
from verl_server.server.exit_status import ExitNotifier, ExitStatus
from verl_server.server.interpreter.server_python import ServerPython
from verl_server.server.open_files import start_thread
from verl_server.server.pipe import write_all
from verl_server.server.server_folder import LOG_NAME, WORKING_FOLDER, make_server_folder
from verl_server.server.server_main import EXIT_BAD_ARGUMENT, EXIT_OTHER_VERSION, OTHER_VERSION, make_payload
from verl_server.server.supervisor import AbortCheck, ServerPids, never_abort
from verl_server.server.warden.process_tree import read_tree
from verl_server.server.warden.shared_memory_files import remove_shared_memory
from verl_server.server.warden_process import (
    WARDEN_SCRIPT,
    WardenFactory,
    WardenProcess,
    discard_warden,
    kill_session,
    wait_for_warden,
)

logger = logging.getLogger(__name__)

LOG_LIMIT_BYTES = 16 * 1024 * 1024
LOG_TAIL_LINES = 40
LOG_SCAN_BYTES = 4096
READY_POLL_S = 0.05
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
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if self.wait_exit(READY_POLL_S) is not None:
                raise self._startup_error()
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
        return StartupError(
            f"the server did not start ({self.exit.describe()})",
            exit_code=self.exit.code,
            log_tail=_last_lines(self.exit.log_tail),
            log_path=str(self.log_path),
        )

    def keep_log(self) -> None:
        self._keeps_log = True

    def stop(self, deadline_s: float = 10.0) -> None:
        """End the whole process tree and remove its files. May be called more than once, and after a crash.

        The log of a crashed server is kept, see `server_folder.py`.
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


def _last_lines(log: str) -> str:
    return "\n".join(log.strip().splitlines()[-LOG_TAIL_LINES:])
