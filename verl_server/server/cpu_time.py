"""CPU time of a server's schedulers, read from `/proc` without a look at other processes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from verl_server.server.warden.process_tree import read_command_line, read_tree

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
