"""The cores on which each tensor-parallel rank computes.

SGLang binds threads with a kernel library that a plain CPU installation does not have, and only on AMX or ARM machines
(`distributed/bootstrap._init_cpu_threads_env`). torch and the operating system can do it without that library.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def available_cores() -> list[int]:
    """Numbers of the cores that this process may use, sorted."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def split_cores(ranks: int, cores: list[int] | None = None) -> str:
    """Value of `SGLANG_CPU_OMP_THREADS_BIND` for `ranks` ranks, for example "0,1|2,3". Ranks share too few cores."""
    cores = available_cores() if cores is None else cores
    share = len(cores) // ranks
    if share == 0:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return "|".join(",".join(str(core) for core in cores[rank * share : (rank + 1) * share]) for rank in range(ranks))


def parse_cores(text: str) -> set[int]:
    """Parse the cores of one rank, for example "0,1,4-7"."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def bind_threads(*, local_omp_cpuid: str, **_ignored: Any) -> None:
    """Replacement of SGLang's `_init_cpu_threads_env` that binds the threads of this rank to its cores with torch.

    `local_omp_cpuid` lists these cores. SGLang's function needs a kernel library that a plain CPU installation does not
    have. A single rank is not bound: that would only disturb the trainer and other servers.
    """
    if not os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return
    cores = parse_cores(local_omp_cpuid) & set(available_cores())
    if not cores:
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
