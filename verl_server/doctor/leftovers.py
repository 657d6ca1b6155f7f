"""Checks for processes and shared memory files that ended servers and trainers left on this machine."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_server.doctor.finding import Finding, gib, ok, warn
from verl_server.server.warden.shared_memory_files import SHM_DIR, SHM_NAMES, find_shared_memory

#: Maximum number of file names in a finding.
MAX_NAMES = 8
#: Seconds since the last write. A younger file can belong to a program that has not mapped it yet.
LEFTOVER_AGE_S = 600.0
#: Programs that become the parent of orphaned processes, at any depth of the process tree.
INIT_PROGRAMS = ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan")
#: Programs that start servers. As PID 1 of a container they are the launcher, so their children are not orphans.
LAUNCHERS = ("python", "sglang", "verl", "ray", "torchrun")


@dataclass(frozen=True)
class Process:
    """One process of this machine."""

    pid: int
    parent: int
    """PID of the parent process."""
    name: str
    """Program name: the first word of the command line, without its folder."""


def check_orphans(processes: list[Process]) -> Finding:
    """Check for SGLang processes whose launcher has ended. Such processes hold memory until a user ends them."""
    names = {process.pid: process.name for process in processes}
    orphans = [
        process.pid
        for process in processes
        if process.name.startswith("sglang::") and _is_init(process.parent, names.get(process.parent, ""))
    ]
    if not orphans:
        return ok("Orphaned servers", "none")
    pids = " ".join(map(str, orphans))
    return warn(
        "Orphaned servers",
        f"{len(orphans)} sglang:: processes whose launcher has ended: {pids}",
        symptom="memory stays in use although no server runs; the next start ends with CUDA out of memory",
        fix=f"kill -9 {pids}",
    )


def _is_init(pid: int, name: str) -> bool:
    return name in INIT_PROGRAMS or (pid == 1 and not name.startswith(LAUNCHERS))


def check_leftovers(files: dict[str, int]) -> Finding:
    """Check for files in shared memory that no running process uses. `files` maps names to bytes."""
    if not files:
        return ok("Leftover files", "none in /dev/shm")
    names = sorted(files, key=lambda name: -files[name])
    limited = f"; the fix names the {MAX_NAMES} largest" if len(names) > MAX_NAMES else ""
    return warn(
        "Leftover files",
        f"{len(names)} in /dev/shm that no process uses, {gib(sum(files.values()))}{limited}",
        symptom="free memory shrinks with every run, until an error says: No space left on device",
        fix=f"rm {' '.join(SHM_DIR + name for name in names[:MAX_NAMES])}",
    )


def processes() -> list[Process]:
    """All processes that this user can see."""
    found = []
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline"]):
        info = process.info
        title = (info["cmdline"] or [info["name"] or ""])[0].split(" ")[0]
        found.append(Process(info["pid"], info["ppid"] or 0, title.rpartition("/")[2]))
    return found


def leftovers(folder: Path = Path(SHM_DIR)) -> dict[str, int]:
    """Files of this user that torch, SGLang or multiprocessing created and that no process has mapped, with bytes."""
    old: dict[str, int] = {}
    for path in folder.iterdir() if folder.is_dir() else []:
        try:
            status = path.stat()
        except OSError:
            continue
        mine = status.st_uid == os.getuid()
        if mine and SHM_NAMES.match(path.name) and time.time() - status.st_mtime > LEFTOVER_AGE_S:
            old[path.name] = status.st_blocks * 512
    pids = set(psutil.pids())
    used = find_shared_memory(sorted(pids)) if old else set()
    return {name: size for name, size in old.items() if name not in used and not _owner_is_running(name, pids)}


def _owner_is_running(name: str, pids: set[int]) -> bool:
    """torch puts the PID of the owner into the file name. The owner may not have mapped the file yet."""
    owner = re.match(r"torch_(\d+)_", name)
    return owner is not None and int(owner[1]) in pids


def examine() -> list[Finding]:
    """Check for leftover files and processes."""
    return [check_leftovers(leftovers()), check_orphans(processes())]
