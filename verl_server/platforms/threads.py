"""Which cores each tensor-parallel rank computes on.

SGLang pins threads with a kernel library that a plain CPU installation does not have, and only on AMX
or ARM machines (`distributed/bootstrap._init_cpu_threads_env`). Torch and the operating system can do it
alone.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def available_cores() -> list[int]:
    """Cores that this process may use, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def split_cores(ranks: int, cores: list[int] | None = None) -> str:
    """`SGLANG_CPU_OMP_THREADS_BIND` for `ranks` ranks: "0,1|2,3". Ranks share when cores are too few."""
    cores = available_cores() if cores is None else cores
    share = len(cores) // ranks
    if share == 0:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return "|".join(",".join(str(core) for core in cores[rank * share : (rank + 1) * share]) for rank in range(ranks))


def parse_cores(text: str) -> set[int]:
    """One rank's part of the list: "0,1,4-7"."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def bind_threads(*, local_omp_cpuid: str, **_ignored: Any) -> None:
    """Keep this rank's threads on its cores; a single rank keeps the whole machine.

    Stands in for SGLang's function of the same place (keyword `local_omp_cpuid` is one rank's list). One
    rank alone is left to the scheduler of the operating system: pinning it would only get in the way of
    the trainer and of other servers.
    """
    if not os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return
    cores = parse_cores(local_omp_cpuid) & set(available_cores())
    if not cores:
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
