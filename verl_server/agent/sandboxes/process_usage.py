"""What the processes of a sandbox use, read from `/proc`. Imports the standard library only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessUsage:
    """One process of a sandbox."""

    pid: int
    session: int
    """Process id of the leader of the process's session."""
    cpu_s: float
    """Processor seconds of the process and of its children that have ended."""
    num_threads: int
    memory_bytes: int
    """Resident memory. Pages that processes share are counted for each of them."""


def read_usage(pids: Sequence[int], proc: int) -> list[ProcessUsage]:
    """The processes of these ids that have not ended. `proc`: the open folder `/proc` in which they have the ids."""
    return [usage for pid in pids if (usage := _read_process(pid, proc)) is not None]


def _read_process(pid: int, proc: int) -> ProcessUsage | None:
    try:
        with open(os.open(f"{pid}/stat", os.O_RDONLY, dir_fd=proc), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] == b"Z":
        return None
    ticks = sum(int(field) for field in fields[11:15])
    return ProcessUsage(pid, int(fields[3]), ticks / TICKS_PER_S, int(fields[17]), int(fields[21]) * PAGE_BYTES)
