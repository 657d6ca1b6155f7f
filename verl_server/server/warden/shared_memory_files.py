"""Files in `/dev/shm`: which processes map them, when one is created, and their removal.

Imports the standard library only: the warden uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterable, Mapping

from verl_server.server.warden.process_tree import is_descendant

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
