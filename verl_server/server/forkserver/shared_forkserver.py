"""The forkservers that the servers of this process share, and whether a server is forked.

There is one forkserver for each engine and interpreter.

The first server of a process starts the forkserver and waits for its imports, which costs as much as importing in the
server. Every later server is forked, in about 2 s (SGLang). The forkserver costs about 79 MB of memory of its own while
servers run: the memory of the imports, 1.1 GB, is shared with them. It ends with this process, and after five minutes
without a server. `AdapterConfig(use_forkserver=False)` starts no forkserver. Processes with the same
`VERL_SERVER_FORKSERVER_DIR` share their forkservers (`socket_folder.py`).

A server is forked only when it sees what a server that is started as a new program would see. Otherwise it is spawned:

* where there may be an accelerator, whose driver does not survive a fork, and on systems other than Linux;
* where there are no pidfds, through which this process watches a warden that is not its child;
* with another SGLang platform than ours (`SGLANG_PLATFORM`, `SGLANG_USE_CPU_ENGINE`) or a selection of SGLang plugins;
* when the forkserver cannot fork, because an SGLang plugin has started a thread, for example.

Libraries read environment variables when they are imported. The forkserver is therefore replaced when the environment
of a server differs from the environment that the forkserver was started with (see `LATE_VARIABLES`), and when this
process has changed what a new program inherits: resource limits, processor affinity, umask, user, control group
(`inherited_state.py`).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from verl_server.config import ENGINE, SERVER_PYTHON
from verl_server.errors import DeadlineError
from verl_server.server.engine_profile import EngineProfile
from verl_server.server.environment import server_environment
from verl_server.server.forkserver import socket_folder
from verl_server.server.forkserver.forkserver import SGLANG_SERVER, Forkserver, OwnForkserver
from verl_server.server.forkserver.inherited_state import LATE_SUFFIX, InheritedState
from verl_server.server.interpreter.server_python import ServerPython
from verl_server.server.open_files import raise_open_file_limit
from verl_server.server.supervisor import AbortCheck
from verl_server.server.warden.process_watch import has_pidfds
from verl_server.server.warden_process import WardenFactory, spawn_warden

logger = logging.getLogger(__name__)

#: Variables that select another SGLang platform or other SGLang plugins. Their code may not survive a fork.
PLATFORM_VARIABLES = ("SGLANG_PLATFORM", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE")
#: Device files of NVIDIA, AMD, Intel, Ascend, Moore Threads and other accelerators. Without any of them, torch need not
#: be imported to know that there is no accelerator.
ACCELERATOR_FILES = ("nvidia*", "kfd", "dri/render*", "davinci*", "mtgpu*", "accel/*", "dxg")


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
        path = socket_folder.socket_path(state.fingerprint(self._python, self._engine))
        if path is None:
            return OwnForkserver(environment, None, self._python, self._engine)
        with socket_folder.lock(path):
            if (connection := socket_folder.connect(path)) is not None:
                return Forkserver(connection)
            with socket_folder.listen(path) as listener:
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


def may_have_accelerator(environment: Mapping[str, str]) -> bool:
    """Whether a server with this `environment` may use an accelerator. Imports torch only if there are device files."""
    if not any(True for pattern in ACCELERATOR_FILES for _ in Path("/dev").glob(pattern)):
        return False
    if any(environment.get(name) != os.environ.get(name) for name in environment if name.endswith(LATE_SUFFIX)):
        return True  # the server sees other devices than this process
    import torch

    if getattr(torch.version, "musa", None) is not None or torch.cuda.device_count() > 0:  # starts no CUDA context
        return True
    return bool(torch.accelerator.is_available())
