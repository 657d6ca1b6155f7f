"""What processes use: memory, open files, and files in shared memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_server.server.warden.shared_memory_files import SHM_DIR, find_shared_memory


@dataclass(frozen=True)
class Footprint:
    """Resources of several processes together."""

    resident_bytes: int
    """Anonymous resident memory, without shared memory."""
    open_files: int
    """Number of file descriptors."""
    shared_memory_files: int
    """Number of files in `/dev/shm` that the processes map or that carry the id of one of them."""

    @classmethod
    def of(cls, pids: Sequence[int]) -> Footprint:
        """The resources that these processes use now."""
        files = set(find_shared_memory(pids))
        if os.path.isdir(SHM_DIR):
            marks = tuple(f"_{pid}_" for pid in pids)
            files |= {name for name in os.listdir(SHM_DIR) if any(mark in name for mark in marks)}
        return cls(sum(map(_resident_bytes, pids)), sum(map(_open_files, pids)), len(files))


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def _open_files(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0
