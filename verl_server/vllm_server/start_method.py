"""How a vLLM server starts its processes: the engine core and the workers are forked where that is safe.

On a CPU vLLM spawns them, and each repeats seconds of imports. vLLM asks its table of environment variables
(`vllm.envs.environment_variables`) for the start method each time that it starts processes. In a server that was forked
by a forkserver, the entry of the table is a function of this module. vLLM is changed here and in `forked_server.py`
(processes sleep while they wait), and only in the processes of such a server. Spawned processes use vLLM's own values.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
WORKER_CLASS = "verl_server.vllm_server.forked_worker.ForkedCPUWorker"
#: Begin of the names of ZeroMQ's threads. They hold locks of ZeroMQ's own contexts only, which a fork does not use.
ZMQ_THREADS = "ZMQbg"
#: Seconds that a new thread may need on a busy machine until it has its name.
NAMING_TIMEOUT_S, NAMING_POLL_S = 3.0, 0.002
#: Runtimes of OpenMP whose settings cannot be changed after they were loaded, in LD_PRELOAD.
OTHER_OPENMP = ("libiomp", "libomp")

_is_forking = False
_has_forked = False
"""Whether this process has started a process."""
_must_spawn = False
"""Whether this process must not fork. It is never asked again: a start uses one method only."""


def fork_processes() -> None:
    """Let vLLM fork the processes of this server. For a process that a forkserver has forked."""
    from vllm import envs

    global _is_forking
    _is_forking = True
    envs.environment_variables[VARIABLE] = _choose
    os.register_at_fork(after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def is_forking() -> bool:
    """Whether this process, and no spawned process above it, belongs to a server that a forkserver has forked."""
    return _is_forking


def stop_forking() -> None:
    """From here on this process spawns processes, if it starts any."""
    global _must_spawn
    _must_spawn = True


def _choose() -> str:
    """The start method. vLLM also asks when it has started its processes, and keeps the answer."""
    if not _must_spawn and (reason := _find_obstacle()) is not None:
        stop_forking()
        if not _has_forked:
            print(f"verl_server: vLLM's processes are spawned, because {reason}", flush=True)
    return "spawn" if _must_spawn else "fork"


def _find_obstacle() -> str | None:
    """Why a fork of this process is not safe, or would not be what a spawned process is. None if it is."""
    deadline = time.monotonic() + (0.0 if _has_forked else NAMING_TIMEOUT_S)
    while (others := find_other_threads()) and time.monotonic() < deadline:
        time.sleep(NAMING_POLL_S)
    if others:
        return f"it has the threads {', '.join(others)}, whose locks a fork would keep"
    libraries = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    if any(name in os.path.basename(library) for library in libraries for name in OTHER_OPENMP):
        return "LD_PRELOAD has another OpenMP than GNU's, whose threads a fork cannot bind"
    if missing := find_missing_libraries(libraries):
        return f"LD_PRELOAD has libraries that the forkserver has not loaded: {', '.join(missing)}"
    return None


def find_other_threads() -> list[str]:
    """Names of the threads of this process without its main thread and without those of ZeroMQ."""
    names = []
    for task in os.listdir("/proc/self/task"):
        if int(task) != os.getpid():
            name = _read(f"/proc/self/task/{task}/comm").strip()  # empty: the thread has ended
            if name and not name.startswith(ZMQ_THREADS):
                names.append(name)
    return names


def find_missing_libraries(libraries: list[str]) -> list[str]:
    """Those of these libraries that this process has not mapped. vLLM sets LD_PRELOAD for the processes it starts."""
    mapped = {line.split(maxsplit=5)[5] for line in _read("/proc/self/maps").splitlines() if "/" in line}
    return [path for path in libraries if path not in mapped and os.path.realpath(path) not in mapped]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _after_fork_in_parent() -> None:
    global _has_forked
    _has_forked = True


def _after_fork_in_child() -> None:
    """The signals of a fork must not wake the event loop of the API server, whose socket the fork has, too."""
    global _has_forked
    _has_forked = False
    signal.set_wakeup_fd(-1)
