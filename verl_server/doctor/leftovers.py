"""Checks for processes and shared memory files that ended servers and trainers left on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_server.doctor.finding import Finding, gib, ok, warn
from verl_server.server.warden.shared_memory_files import SHM_DIR, SHM_NAMES, find_shared_memory

#: Maximum number of file names in a finding.
MAX_NAMES = 8
#: Seconds since the last write. A younger file can belong to a program that has not mapped it yet.
LEFTOVER_AGE_S = 600.0
#: Seconds after which an orphan must still live. The processes of a server that is being stopped end within this time.
ORPHAN_RECHECK_S = 1.0
#: `/proc/self/ns/pid` of a process that sees all processes of the machine (PROC_PID_INIT_INO of the kernel).
INITIAL_PID_NAMESPACE = "pid:[4026531836]"
#: Programs that become the parent of orphaned processes, at any depth of the process tree.
INIT_PROGRAMS = ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan")
#: Programs that start servers. As PID 1 of a container they are the launcher, so their children are not orphans.
LAUNCHERS = ("python", "sglang", "vllm", "VLLM::", "verl", "ray", "torchrun")
#: How the titles of the processes begin that SGLang's and vLLM's launchers start. The launchers have other titles.
SGLANG_TITLES, VLLM_TITLES = ("sglang::",), ("VLLM::EngineCore", "VLLM::Worker", "VLLM::DPCoordinator")


@dataclass(frozen=True)
class Process:
    """One process of this machine."""

    pid: int
    parent: int
    """PID of the parent process."""
    name: str
    """Program name: the first word of the command line, without its folder."""


def check_orphans(processes: list[Process]) -> Finding:
    """Check for processes of SGLang and vLLM whose launcher has ended. They hold memory until a user ends them.

    The launcher starts these processes as its children. The kernel makes them children of an init program when the
    launcher has ended; from then on no process sends them requests. vLLM's workers are children of its engine.
    """
    names = {process.pid: process.name for process in processes}
    orphans = _orphans(processes)
    if not orphans:
        return ok("Orphaned servers", "none")
    pids = " ".join(str(process.pid) for process in orphans)
    parents = sorted({_describe_parent(process, names) for process in orphans} - {""})
    engines = " and ".join(sorted({process.name.partition("::")[0] + "::" for process in orphans}))
    # vLLM's processes end at SIGTERM, and their resource tracker then removes their files in shared memory.
    only_vllm = all(process.name.startswith(VLLM_TITLES) for process in orphans)
    return warn(
        "Orphaned servers",
        f"{len(orphans)} {engines} processes whose launcher has ended, because their parent is now "
        f"{', '.join(parents)}: {pids}",
        symptom="memory stays in use although no server runs; the next start ends with CUDA out of memory",
        fix=f"kill {pids}; if they live after 10 s, kill -9 {pids}" if only_vllm else f"kill -9 {pids}",
    )


def _describe_parent(process: Process, names: dict[int, str]) -> str:
    """Name and PID of the parent. Empty if the parent is a process of the same server."""
    name = names.get(process.parent, "")
    return "" if _is_of_server(name) else f"{name} (PID {process.parent})"


def _orphans(processes: list[Process]) -> list[Process]:
    by_pid = {process.pid: process for process in processes}
    return [process for process in processes if _is_of_server(process.name) and _has_no_launcher(process, by_pid)]


def _is_of_server(name: str) -> bool:
    return name.startswith((*SGLANG_TITLES, *VLLM_TITLES))


def _has_no_launcher(process: Process, by_pid: dict[int, Process]) -> bool:
    """Whether an init program is the parent of the topmost process of a server."""
    while (parent := by_pid.get(process.parent)) is not None and _is_of_server(parent.name):
        process = parent
    return _is_init(process.parent, "" if parent is None else parent.name)


def _is_init(pid: int, name: str) -> bool:
    return name in INIT_PROGRAMS or (pid == 1 and not name.startswith(LAUNCHERS))


def check_leftovers(files: dict[str, int], *, uninspected: int = 0, in_container: bool = False) -> Finding:
    """Check for files in shared memory that no process uses. `files` maps names to bytes.

    `uninspected`: number of processes that may use the files and could not be inspected. `in_container`: whether
    processes of the machine may be invisible to this process.
    """
    if not files:
        return ok("Leftover files", "none in /dev/shm")
    names = sorted(files, key=lambda name: -files[name])
    paths = " ".join(SHM_DIR + name for name in names[:MAX_NAMES])
    detail = (
        f"{len(names)} in /dev/shm, {gib(sum(files.values()))}: not written for {LEFTOVER_AGE_S / 60:.0f} minutes, and "
        "no inspected process maps them or has them open"
        + (f"; {uninspected} processes could not be inspected" if uninspected else "")
        + (f"; the fix names the {MAX_NAMES} largest" if len(names) > MAX_NAMES else "")
    )
    fix = f"rm {paths}"
    if uninspected:
        fix = f"Find out as root whether a process uses them (fuser -v {paths}). If no process does, remove them."
    elif in_container:
        fix = f"If no other container shares this /dev/shm (--ipc=host): {fix}"
    symptom = "free memory shrinks with every run, until an error says: No space left on device"
    return warn("Leftover files", detail, symptom=symptom, fix=fix)


def processes() -> list[Process]:
    """All processes that this user can see and that have not ended."""
    found = []
    for process in psutil.process_iter(["pid", "ppid", "name", "cmdline", "status"]):
        info = process.info
        if info["status"] == psutil.STATUS_ZOMBIE:
            continue
        title = (info["cmdline"] or [info["name"] or ""])[0].split(" ")[0]
        found.append(Process(info["pid"], info["ppid"] or 0, title.rpartition("/")[2]))
    return found


def leftovers(folder: Path = Path(SHM_DIR)) -> tuple[dict[str, int], int]:
    """Files of this user that torch, SGLang or multiprocessing created and that no process uses, with bytes.

    A process uses a file that it maps or has open. The second result is the number of processes that may use the files
    and could not be inspected.
    """
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
    opened, uninspected = find_open_files(pids) if old else (set(), 0)
    used = find_shared_memory(pids).keys() | opened if old else set()
    files = {name: size for name, size in old.items() if name not in used and not _owner_is_running(name, pids)}
    return files, uninspected


def find_open_files(pids: Iterable[int]) -> tuple[set[str], int]:
    """Names of the files in `/dev/shm` that these processes have open, and the number of processes that could not be
    inspected although they may open files of this user.
    """
    found: set[str] = set()
    uninspected = 0
    for pid in pids:
        try:
            for entry in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    found.add(os.readlink(f"/proc/{pid}/fd/{entry}"))
        except PermissionError:
            with contextlib.suppress(OSError):
                uninspected += os.stat(f"/proc/{pid}").st_uid == os.getuid()
        except OSError:  # the process has ended
            continue
    return {path.removeprefix(SHM_DIR) for path in found if path.startswith(SHM_DIR)}, uninspected


def _owner_is_running(name: str, pids: set[int]) -> bool:
    """torch puts the PID of the owner into the file name. The owner may not have mapped the file yet."""
    owner = re.match(r"torch_(\d+)_", name)
    return owner is not None and int(owner[1]) in pids


def is_in_container(namespace: str = "/proc/self/ns/pid") -> bool:
    """Whether processes of the machine may be invisible to this process. True when the kernel does not tell it."""
    try:
        return os.readlink(namespace) != INITIAL_PID_NAMESPACE
    except OSError:  # a container without access to the link
        return True


def examine() -> list[Finding]:
    """Check for leftover files and processes. Takes a second longer when there are orphans."""
    (files, uninspected), found = leftovers(), processes()
    if _orphans(found):
        time.sleep(ORPHAN_RECHECK_S)
        first_pids = {process.pid for process in found}
        found = [process for process in processes() if process.pid in first_pids]
    return [check_leftovers(files, uninspected=uninspected, in_container=is_in_container()), check_orphans(found)]
