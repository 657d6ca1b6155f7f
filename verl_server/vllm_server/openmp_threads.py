"""The OpenMP threads that a spawned worker of vLLM would have, in a worker that was forked. It imports no vLLM.

OpenMP reads its environment variables when it is loaded, which was in the forkserver. vLLM sets the variables around
the start of each worker (`vllm/utils/ompmultiprocessing.py`), so a forked worker finds them in its environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch

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
