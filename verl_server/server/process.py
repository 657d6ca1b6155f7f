"""The trainer's end of a server process: start it, learn of its death, end it.

The tree below is described in `warden.py`. Every `ServerProcess` owns one warden, one scratch folder and
one port reservation, and gives them back in `stop`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from verl_server.errors import BadInputError, DeadlineError, ServerDiedError, StartupError, VerlServerError
from verl_server.server import warden as warden_script
from verl_server.server.engine_profile import EngineProfile
from verl_server.server.exit_status import ExitNotifier, ExitStatus
from verl_server.server.server_main import EXIT_BAD_ARGUMENT

logger = logging.getLogger(__name__)

#: Variables of the trainer's own rendezvous. With torchrun's, SGLang's scheduler would look for the trainer's
#: store instead of making its own (TORCHELASTIC_USE_AGENT_STORE), and run on one thread (OMP_NUM_THREADS=1).
RENDEZVOUS_VARIABLES = (
    "TORCHELASTIC_", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "OMP_NUM_THREADS",
)  # fmt: skip
LOG_LIMIT_BYTES = 16 * 1024 * 1024
#: Asked while a server starts: the error to end the start with (another node has failed, say), or None.
AbortCheck = Callable[[], VerlServerError | None]


def never_abort() -> None:
    """The `AbortCheck` of a server that depends on nothing else."""


class WardenProcess(Protocol):
    """A warden that waits for its `spec`, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    @property
    def stdin(self) -> IO[bytes] | None: ...

    @property
    def stdout(self) -> IO[bytes] | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


WardenFactory = Callable[[], WardenProcess]


def spawn_warden() -> WardenProcess:
    """A process that has the standard library alone, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-I", warden_script.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


class ServerProcess(ExitNotifier):
    """One supervised server tree.

    `server_args` are the keyword arguments of SGLang's `ServerArgs`, as plain JSON values. They travel by
    pipe; nothing secret stands on a command line, in the environment or in a file.
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
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="verl-server-"))
        scratch = self._folder / "tmp"
        scratch.mkdir()
        if log_dir is None:
            self.log_path = self._folder / "server.log"
        else:
            Path(log_dir).mkdir(parents=True, exist_ok=True)
            self.log_path = Path(log_dir) / f"{self._folder.name}.log"
        super().__init__()
        self.pid: int | None = None
        spec = {
            "argv": [sys.executable, "-m", profile.main_module],
            "env": {
                **inherited_environment(),
                "TMPDIR": str(scratch),  # where the warden removes them
                **_no_proxy(str(server_args.get("host") or "127.0.0.1")),
                **env,
            },
            "payload": json.dumps(dict(server_args)) + "\n",
            "scratch": str(scratch),
            "log_path": str(self.log_path),
            "log_limit": LOG_LIMIT_BYTES,
            "secrets": [str(server_args[name]) for name in profile.secret_arguments if server_args.get(name)],
            "trainer_pid": os.getpid(),
            "deadline": time.monotonic() + start_timeout_s,
        }
        self._warden = warden_factory()
        assert self._warden.stdin is not None
        try:
            self._warden.stdin.write(json.dumps(spec).encode() + b"\n")
            self._warden.stdin.flush()
        except BrokenPipeError:
            code = self._warden.wait()
            raise StartupError(f"the warden process ended at once with exit code {code}", exit_code=code) from None
        threading.Thread(target=self._listen, name="verl-server-warden", daemon=True).start()

    def died(self, url: str) -> ServerDiedError:
        """The error for callers that needed the server. Call only when `exit` is set."""
        assert self._exit is not None
        return ServerDiedError(
            f"the server at {url} ended ({self._exit.describe()}) while it was needed",
            exit_code=self._exit.code,
            log_tail=_last_words(self._exit.log_tail),
            log_path=str(self.log_path),
            url=url,
        )

    def scheduler_seconds(self) -> float:
        """Processor time that its schedulers have used, children included."""
        seconds = 0.0
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if any("scheduler" in part for part in child.cmdline()):
                        times = child.cpu_times()
                        seconds += times.user + times.system
        return seconds

    def wait_ready(
        self,
        probe: Callable[[], bool],
        deadline_s: float,
        *,
        fatal_log_phrases: tuple[str, ...] = (),
        check_abort: AbortCheck = never_abort,
        poll_s: float = 0.05,
    ) -> None:
        """Poll `probe` until it is true. `fatal_log_phrases` in the log end the wait: SGLang may live on for minutes.

        Raises StartupError with the server's last words when it ends first, BadInputError when SGLang
        refuses an argument, DeadlineError when `deadline_s` seconds pass, and what `check_abort` returns.
        """
        deadline = time.monotonic() + deadline_s
        while not probe():
            if self._exited.wait(poll_s):
                assert self._exit is not None
                words = _last_words(self._exit.log_tail)
                kind = BadInputError if self._exit.code == EXIT_BAD_ARGUMENT else StartupError
                raise kind(
                    f"the server did not start ({self._exit.describe()})",
                    exit_code=self._exit.code,
                    log_tail=words,
                    log_path=str(self.log_path),
                )
            if (reason := check_abort()) is not None:
                raise reason
            said = self._log_end().lower() if fatal_log_phrases else ""
            if any(words in said for words in fatal_log_phrases):
                raise StartupError(
                    "the server cannot start", log_tail=_last_words(self._log_end()), log_path=str(self.log_path)
                )
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the server was not ready after {deadline_s:g} s; its log is {self.log_path}. "
                    "A cold disk cache or a large model needs a larger `timeouts.start_s`.",
                    operation="start",
                    seconds=deadline_s,
                    log_path=str(self.log_path),
                )

    def stop(self, deadline_s: float = 10.0) -> None:
        """End the whole tree and give everything back. Safe to call twice, and after a crash."""
        crashed = self._exit is not None
        if self._exit is None:
            with contextlib.suppress(OSError):
                assert self._warden.stdin is not None
                self._warden.stdin.write(b"stop\n")
                self._warden.stdin.flush()
            if not self._exited.wait(deadline_s):
                self._kill_session()
        with contextlib.suppress(OSError):
            assert self._warden.stdin is not None
            self._warden.stdin.close()
        try:
            self._warden.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._kill_session()
        if not crashed:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _log_end(self, size: int = 4096) -> str:
        """The end of the log file as it is now."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - size, 0))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

    def _listen(self) -> None:
        """Read the warden's events until its pipe ends. Runs in its own thread."""
        assert self._warden.stdout is not None
        owned: set[str] = set()
        for line in self._warden.stdout:
            event = json.loads(line)
            if event["event"] == "started":
                self.pid = event["pid"]
            elif event["event"] == "owns":
                owned.update(event["shared_memory"])
            else:
                self.note_exit(ExitStatus(event["reason"], event["code"], event["tail"]))
        self._kill_session()
        self._warden.wait()
        if self._exit is None:
            self.note_exit(ExitStatus("warden killed", None, ""))
            self._remove(owned)

    @staticmethod
    def _remove(shared_memory: set[str], patience_s: float = 5.0) -> None:
        """In the killed warden's place, once the killed tree does not map it any more."""
        deadline = time.monotonic() + patience_s
        while left := shared_memory.intersection(os.listdir(warden_script.SHM_DIR)):
            warden_script.remove_shared_memory(left, set())
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def _kill_session(self) -> None:
        """Last resort when the warden itself was killed: everything in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._warden.pid, signal.SIGKILL)


def inherited_environment() -> dict[str, str]:
    """The environment of every server: this process's variables without `RENDEZVOUS_VARIABLES`, and our defaults."""
    user_cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(RENDEZVOUS_VARIABLES)},
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(user_cache)),  # shared, and kept
        "PYTHONUNBUFFERED": "1",
        # Idle OpenMP threads spin for some 50 us, which bridges the gaps between two tensors of an update, and then
        # sleep: the trainer needs the cores. (OMP_WAIT_POLICY=PASSIVE made loading a third slower.)
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "20000"),
    }


def _no_proxy(host: str) -> dict[str, str]:
    """SGLang's warm-up calls its own server through `requests`, which would go through the machine's proxy."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    value = ",".join(filter(None, [known, "127.0.0.1", "localhost", "::1", host]))
    return {"no_proxy": value, "NO_PROXY": value}


def _last_words(tail: str, lines: int = 40) -> str:
    return "\n".join(tail.strip().splitlines()[-lines:])
