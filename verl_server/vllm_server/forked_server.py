"""A vLLM server that is forked by a forkserver (`verl_server/server/forkserver/forkserver_main.py`), on a CPU."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import time
from collections.abc import Iterator

from verl_server.vllm_server import server_main, start
from verl_server.vllm_server.start import IMPORT_VARIABLES, find_fork_refusal

PROGRAM = server_main.__file__
#: Modules that the processes of a server import. Another version of vLLM may not have all of them.
MODULES = (
    "uvloop", "orjson", "xxhash",
    "vllm.entrypoints.launchers.api_server.entry", "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker",
    "verl_server.vllm_server.forked_worker", "verl_server.vllm_server.weights",
    "verl_server.vllm_server.weights", "verl_server.vllm_server.wire.app",
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


def serve() -> None:
    """Run the server whose arguments are on standard input."""
    start.fork_processes()
    _sleep_while_waiting()
    server_main.main()


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
    """Import libraries with one thread. The workers start the threads that they need (`forked_worker.py`)."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's BLAS would start threads; torch has its own
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
