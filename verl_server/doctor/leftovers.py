"""What dead servers and trainers left behind: processes that hold memory, files in shared memory."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_server.doctor.finding import Finding, gib, ok, warn
from verl_server.server.warden import SHM_DIR, SHM_NAMES, shared_memory_of

#: File names shown at most.
SHOWN = 8
#: A younger file may belong to a program that has not mapped it yet.
LEFTOVER_AGE_S = 600.0
#: Who adopts orphans, wherever they stand in the tree.
INITS = ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan")
#: Programs that start servers; as pid 1 of a container they are launchers, not adopters.
LAUNCHERS = ("python", "sglang", "verl", "ray", "torchrun")


@dataclass(frozen=True)
class Process:
    """A process as /proc shows it."""

    pid: int
    parent: int
    name: str
    """First word of its title."""


def check_orphans(processes: list[Process]) -> Finding:
    """Processes of SGLang whose launcher is gone: they hold memory until somebody ends them."""
    names = {process.pid: process.name for process in processes}
    orphans = [
        process.pid
        for process in processes
        if process.name.startswith("sglang::") and _adopts(process.parent, names.get(process.parent, ""))
    ]
    if not orphans:
        return ok("Orphaned servers", "none")
    pids = " ".join(map(str, orphans))
    return warn(
        "Orphaned servers",
        f"{len(orphans)} sglang:: processes whose launcher is gone: {pids}",
        symptom="memory (of the GPU, too) is held though no server runs; CUDA out of memory at the next start",
        fix=f"kill -9 {pids}",
    )


def _adopts(pid: int, name: str) -> bool:
    return name in INITS or (pid == 1 and not name.startswith(LAUNCHERS))


def check_leftovers(files: dict[str, int]) -> Finding:
    """Files in shared memory, name to bytes, that no living process uses."""
    if not files:
        return ok("Leftover files", "none in /dev/shm")
    names = sorted(files, key=lambda name: -files[name])
    most = f"; the {SHOWN} largest first" if len(names) > SHOWN else ""
    return warn(
        "Leftover files",
        f"{len(names)} files in /dev/shm that no process uses, {gib(sum(files.values()))}{most}",
        symptom="memory shrinks from run to run; No space left on device",
        fix=f"rm {' '.join(SHM_DIR + name for name in names[:SHOWN])}",
    )


def processes() -> list[Process]:
    """All that this user may see."""
    found = []
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline"]):
        info = process.info
        title = (info["cmdline"] or [info["name"] or ""])[0].split(" ")[0]
        found.append(Process(info["pid"], info["ppid"] or 0, title.rpartition("/")[2]))
    return found


def leftovers(folder: Path = Path(SHM_DIR)) -> dict[str, int]:
    """Our user's files with names of torch, SGLang or multiprocessing that nobody has mapped."""
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
    used = shared_memory_of(sorted(pids)) if old else set()
    return {name: size for name, size in old.items() if name not in used and not _owner_lives(name, pids)}


def _owner_lives(name: str, pids: set[int]) -> bool:
    """torch names its files after their owner, who may not have mapped one that is on its way."""
    owner = re.match(r"torch_(\d+)_", name)
    return owner is not None and int(owner[1]) in pids


def examine() -> list[Finding]:
    """Look for what is left."""
    return [check_leftovers(leftovers()), check_orphans(processes())]
