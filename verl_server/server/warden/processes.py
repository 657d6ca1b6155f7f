"""Processes and their files in shared memory: trees, watching, removal. Standard library only.

Imports the standard library only: the warden uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import sys
from collections.abc import Callable, Iterable, Mapping

# -- Process tree -----------------------------------------------------------------------------------
# Processes below a process, read from `/proc`. Imports the standard library only: the warden uses it.


def list_descendants(root: int) -> list[int]:
    """Process ids of the tree below `root`, parents first. Zombies are left out; processes below a zombie are not.

    A killed process is a zombie as soon as its first thread has ended. Its children stay its children until its last
    thread has ended.
    """
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        state, parent = fields[0], int(fields[1])
        if state == b"Z":
            zombies.add(int(entry))
        children.setdefault(parent, []).append(int(entry))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return [pid for pid in found if pid not in zombies]


def read_tree(root: int) -> list[int]:
    """Process ids of the tree below `root`, parents first. Looks at the processes of the tree only.

    `list_descendants` reads all of `/proc` instead. It misses no process; here a process that ends meanwhile may hide
    another one.
    """
    if not os.path.exists(f"/proc/{root}/task/{root}/children"):
        return list_descendants(root)  # a kernel without these files, or the process has ended
    found = _read_children(root)
    for pid in found:  # grows while it is read
        found += _read_children(pid)
    return found


def _read_children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process or one of its threads has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += [int(child) for child in file.read().split()]
    return found


def is_descendant(pid: int, root: int) -> bool:
    """Whether a living process is in the tree below `root`."""
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return False
        if pid == root:
            return True
    return False


def read_command_line(pid: int) -> bytes:
    """The command line of a process, with arguments separated by NUL bytes. Empty when the process has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def is_cleanup_helper(pid: int) -> bool:
    """Whether a process is a helper that removes shared memory after its owner has ended."""
    command_line = read_command_line(pid)
    return b"resource_tracker" in command_line or b"torch_shm_manager" in command_line


def worker_name(pid: int, prefix: str) -> str | None:
    """Name of an engine's worker, for example `sglang::scheduler`. None for other processes.

    `prefix`: how the names of the engine's workers begin. A server cannot work without one of its workers. A program
    that a worker starts is no worker: between `fork` and `exec` it has the name of the worker.
    """
    name = _title(pid)
    return name if name.startswith(prefix) and name != _title(_parent(pid)) else None


def _title(pid: int) -> str:
    """The first argument of a process, which is its name if it has set one."""
    return read_command_line(pid).partition(b"\0")[0].decode("utf-8", "replace")


def _parent(pid: int) -> int:
    """Process id of the parent. 0 when the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


# -- Process watch ----------------------------------------------------------------------------------
# Notice of the end of processes, with or without pidfds. Imports the standard library only: the warden uses it.
#
# A pidfd becomes readable when its process ends. Some systems have none: a Python that was built for old kernels lacks
# `os.pidfd_open`, and the seccomp profiles of some containers forbid the system call. Then `/proc/PID/stat` is read
# several times a second.

#: Seconds between two looks at the processes that have no pidfd.
POLL_S = 0.1


def open_pidfd(pid: int) -> int | None:
    """A pidfd of the process. None where this system has none. Raises ProcessLookupError if the process has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None


def has_pidfds() -> bool:
    """Whether this Python, this kernel and this container let processes open pidfds."""
    pidfd = open_pidfd(os.getpid())
    if pidfd is None:
        return False
    os.close(pidfd)
    return True


def start_time(pid: int) -> bytes | None:
    """Start time of a process, which tells it from a later process with the same id. None when the process has ended.

    A process whose first thread has ended is a zombie, but it lives as long as it has other threads.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    state, num_threads = fields[0], int(fields[17])
    return None if state in (b"Z", b"X") and num_threads <= 1 else fields[19]


class ProcessWatch:
    """Reports the end of processes through a selector. `poll` must be called for processes without a pidfd."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._polled: dict[int, tuple[bytes, str]] = {}
        """Start time and end message of each process without a pidfd."""

    def add(self, pid: int, message: str) -> bool:
        """Report `message` when the process ends. Returns False when it has already ended.

        The selector's data of a pidfd is a function that returns the message.
        """
        try:
            pidfd = open_pidfd(pid)
        except ProcessLookupError:
            return False
        if pidfd is not None:
            report: Callable[[], str] = lambda: message  # noqa: E731 - typed, for the selector's data
            self._selector.register(pidfd, selectors.EVENT_READ, report)
            return True
        started = start_time(pid)
        if started is None:
            return False
        self._polled[pid] = (started, message)
        return True

    def poll(self) -> str | None:
        """The message of a process without a pidfd that has ended, or None."""
        for pid, (started, message) in self._polled.items():
            if start_time(pid) != started:
                return message
        return None

    def max_wait_s(self, timeout_s: float) -> float:
        """The seconds for which a caller that wants to wait `timeout_s` may wait until it calls `poll` again."""
        return min(timeout_s, POLL_S) if self._polled else timeout_s


# -- Shared memory files ----------------------------------------------------------------------------

SHM_DIR = "/dev/shm/"
#: Names that torch, SGLang, vLLM, NCCL, CUDA and multiprocessing give to their files. Files with other
#: names are not removed.
SHM_NAMES = re.compile(r"^(torch_|sglang|sgl_|vllm|sem\.mp-|psm_|mp-|nccl-|cuda)")
#: Names that do not contain the process id of their creator.
SHM_NAMES_WITHOUT_PID = re.compile(r"^(sglang|sgl_|vllm|sem\.mp-|psm_|mp-|nccl-)")
#: inotify constants of linux/inotify.h.
IN_CREATE, IN_NONBLOCK, IN_CLOEXEC = 0x100, 0o4000, 0o2000000
#: Layout of `struct inotify_event`: the length of the name at byte 12, the name at byte 16.
EVENT_LENGTH_OFFSET, EVENT_HEADER_BYTES = 12, 16
#: Longer numbers in names are no process ids (Linux: at most 4194304).
MAX_PID_DIGITS = 8


def find_shared_memory(pids: Iterable[int]) -> dict[str, int]:
    """The files in `/dev/shm` that these processes map: the inode of each name.

    Files are compared by inode, because glibc maps a named semaphore under a temporary name before it links the final
    name.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            inodes.update(int(line.split()[4]) for line in file if SHM_DIR in line)
    if not inodes or not os.path.isdir(SHM_DIR):
        return {}
    with os.scandir(SHM_DIR) as entries:
        return {
            entry.name: entry.inode() for entry in entries if entry.inode() in inodes and SHM_NAMES.match(entry.name)
        }


def created_since(name: str, started: float) -> bool:
    """Whether a file is this user's and is not older than `started` (`time.time`).

    Processes also map files of others, and containers can share `/dev/shm`.
    """
    try:
        status = os.stat(SHM_DIR + name)
    except OSError:
        return False
    return status.st_uid == os.geteuid() and status.st_ctime >= started


def watch_shared_memory() -> int | None:
    """A file descriptor that is readable when a file is created in `/dev/shm` (inotify). None when unavailable."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.inotify_init1(IN_NONBLOCK | IN_CLOEXEC))
    if fd < 0:
        return None
    if libc.inotify_add_watch(fd, SHM_DIR.encode(), IN_CREATE) < 0:
        os.close(fd)
        return None
    return fd


def read_created_names(fd: int) -> list[str]:
    """Names of the files that were created since the last call. `fd` is the result of `watch_shared_memory`."""
    names = []
    with contextlib.suppress(BlockingIOError):
        while events := os.read(fd, 65536):
            offset = 0
            while offset < len(events):
                name_offset = offset + EVENT_HEADER_BYTES
                length = int.from_bytes(events[offset + EVENT_LENGTH_OFFSET : name_offset], sys.byteorder)
                names.append(os.fsdecode(events[name_offset : name_offset + length].rstrip(b"\0")))
                offset = name_offset + length
    return names


def may_belong_to_tree(name: str, root: int) -> bool:
    """Whether a process below `root` may have created the file, as far as the name tells the creator."""
    if not SHM_NAMES.match(name):
        return False
    if SHM_NAMES_WITHOUT_PID.match(name):
        return True
    return any(is_descendant(int(number), root) for number in re.findall(r"\d+", name) if len(number) < MAX_PID_DIGITS)


def remove_shared_memory(files: Mapping[str, int], reader: int | None = None) -> set[str]:
    """Remove files: the inode of each name, as `find_shared_memory` returned them. Returns the names that are left.

    A file that a living process maps is left. The process `reader` may map the files: it only reads what the dead
    processes have written. A name that another file has now does not count.
    """
    present = {name for name, inode in files.items() if _inode(name) == inode}
    if not present:
        return set()
    living = (int(pid) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != reader)
    mapped = present & find_shared_memory(living).keys()
    for name in present - mapped:
        with contextlib.suppress(OSError):
            os.unlink(SHM_DIR + name)
    return mapped


def _inode(name: str) -> int | None:
    try:
        return os.stat(SHM_DIR + name).st_ino
    except OSError:
        return None
