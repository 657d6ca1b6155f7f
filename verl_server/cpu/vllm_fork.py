"""A vLLM server that is forked by a forkserver (`verl_server/cpu/forkserver_main.py`), on a CPU.

It imports neither vLLM nor torch at module level: `load` sets environment variables first.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl_server.vllm_plugin import server_main
from verl_server.vllm_plugin.start import IMPORT_VARIABLES, TESTED_VERSION, find_version_refusal, installed_version

PROGRAM = server_main.__file__
#: Modules that the processes of a server import. Another version of vLLM may not have all of them.
MODULES = (
    "uvloop", "orjson", "xxhash",
    "vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker",
    "verl_server.cpu.vllm_worker", "verl_server.vllm_plugin.weights", "verl_server.vllm_plugin.wire.app",
)  # fmt: skip
#: Seconds between two checks of a queue between vLLM's processes.
QUEUE_POLL_S = 50e-6


def load() -> None:
    """Import what a server imports, and check that this process can fork. Exits with the reason when it cannot."""
    if (refusal := find_fork_refusal()) is not None:
        sys.exit(refusal)
    for name, value in IMPORT_VARIABLES.items():
        os.environ.setdefault(name, value)
    gc.disable()  # collections during the imports find no garbage
    with _one_thread():
        for name in MODULES:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)
        server_main.import_command_line()
    gc.enable()
    from vllm.platforms import current_platform

    if type(current_platform).__qualname__ != "CpuPlatform":
        sys.exit(f"vLLM's platform here is {type(current_platform).__qualname__}, not the one for CPUs")
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        sys.exit(f"this process has {threads} threads: it cannot fork servers")


def find_fork_refusal() -> str | None:
    """Why servers of the installed vLLM are not forked. None if they are: `fork_processes` uses an inner table."""
    found, tested = installed_version(), TESTED_VERSION.rpartition(".")[0]
    if found is None:
        return find_version_refusal()
    is_tested = found[1].startswith(f"{tested}.")
    return None if is_tested else f"{' '.join(found)} has not been tried: only {tested} is forked"


def serve() -> None:
    """Run the server whose arguments are on standard input."""
    fork_processes()
    _sleep_while_waiting()
    server_main.main(worker_cls=WORKER_CLASS)


def _sleep_while_waiting() -> None:
    """Let the processes of this server sleep between two checks of the queue for which they wait.

    vLLM's engine core and workers wait for each other in a loop that calls `sched_yield`, and so occupy two CPUs. On a
    machine with two CPUs, all other processes, such as the trainer and the server's own HTTP process, then do not run
    for up to 2.5 s (measured with Linux 6.18).
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(QUEUE_POLL_S)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Import libraries with one thread. The workers start the threads that they need (`start_threads`)."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's BLAS would start threads; torch has its own
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


# -- Start method -----------------------------------------------------------------------------------
# The engine core and the workers of a forked server are forked where that is safe.
#
# On a CPU vLLM spawns them, and each repeats seconds of imports. vLLM asks its table of environment variables
# (`vllm.envs.environment_variables`) for the start method each time that it starts processes. In a server that was
# forked by a forkserver, the entry of the table is a function of this module. vLLM is changed only in the processes of
# such a server. Spawned processes use vLLM's own values.

VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
WORKER_CLASS = "verl_server.cpu.vllm_worker.ForkedCPUWorker"
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


# -- OpenMP threads ---------------------------------------------------------------------------------
# The OpenMP threads that a spawned worker of vLLM would have, in a worker that was forked.
#
# OpenMP reads its environment variables when it is loaded, which was in the forkserver. vLLM sets the variables around
# the start of each worker (`vllm/utils/ompmultiprocessing.py`), so a forked worker finds them in its environment.

#: Variables with the CPU of each OpenMP thread: of GNU's OpenMP, and of the standard.
BINDING_VARIABLES = ("GOMP_CPU_AFFINITY", "OMP_PLACES")
#: Number of elements with which torch uses all threads.
PARALLEL_ELEMENTS = 2**20


def wanted_threads(environment: Mapping[str, str], allowed: list[int]) -> tuple[int, list[int]]:
    """The number of OpenMP threads, and the CPU of each thread; no CPUs if threads are not bound.

    `allowed`: the CPUs that the process may use, as many as OpenMP has threads by default.
    """
    cpus: list[int] = []
    for name in BINDING_VARIABLES:
        cpus = cpus or [int(number) for number in re.findall(r"\d+", environment.get(name, ""))]
    number = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return (int(number) if number.isdigit() and int(number) > 0 else len(cpus) or len(allowed)), cpus


def start_threads(number: int, cpus: list[int]) -> None:
    """Start the OpenMP threads of this process, and bind each to its CPU. The calling thread is the first of them.

    Threads that are started later have the CPU of the thread that starts them, as in a spawned worker.
    """
    import torch

    if cpus:
        os.sched_setaffinity(0, {cpus[0]})
    torch.set_num_threads(number)  # torch may start threads of its own here, which do not compute
    before = set(os.listdir("/proc/self/task"))
    torch.ones(PARALLEL_ELEMENTS).add_(1)  # OpenMP starts its threads when it needs them first
    started = sorted(map(int, set(os.listdir("/proc/self/task")) - before))
    if len(started) == number - 1 and len(cpus) == number:
        for thread, cpu in zip(started, cpus[1:], strict=True):
            os.sched_setaffinity(thread, {cpu})
    elif cpus:
        print(f"verl_server: {len(started) + 1} OpenMP threads run on any of the CPUs {cpus}", flush=True)
        for thread in map(int, os.listdir("/proc/self/task")):
            os.sched_setaffinity(thread, set(cpus))
