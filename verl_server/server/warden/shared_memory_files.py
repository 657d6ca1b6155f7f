"""Files in `/dev/shm`: which processes map them, when one is created, and their removal.

Imports the standard library only: the warden uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys

SHM_DIR = "/dev/shm/"
#: Names that torch, SGLang, NCCL, CUDA and multiprocessing give to their files. Files with other names are not removed.
SHM_NAMES = re.compile(r"^(torch_|sglang|sgl_|sem\.mp-|psm_|mp-|nccl-|cuda)")
#: Names that do not contain the process id of their creator. The warden looks for the creator at once.
SHM_NAMES_WITHOUT_PID = re.compile(rb"^(sglang|sgl_|sem\.mp-|psm_|mp-)")
#: inotify constants of linux/inotify.h.
IN_CREATE, IN_NONBLOCK, IN_CLOEXEC = 0x100, 0o4000, 0o2000000
#: Layout of `struct inotify_event`: the length of the name at byte 12, the name at byte 16.
EVENT_LENGTH_OFFSET, EVENT_HEADER_BYTES = 12, 16


def find_shared_memory(pids: list[int]) -> set[str]:
    """Names of the files in `/dev/shm` that these processes map.

    Files are compared by inode, because glibc maps a named semaphore under a temporary name before it links the final
    name.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            inodes.update(int(line.split()[4]) for line in file if SHM_DIR in line)
    found = set()
    for entry in os.scandir(SHM_DIR) if os.path.isdir(SHM_DIR) else []:
        if entry.inode() in inodes and SHM_NAMES.match(entry.name):
            found.add(entry.name)
    return found


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


def read_created_names(fd: int) -> list[bytes]:
    """Names of the files that were created since the last call. `fd` is the result of `watch_shared_memory`."""
    names = []
    with contextlib.suppress(BlockingIOError):
        while events := os.read(fd, 65536):
            offset = 0
            while offset < len(events):
                name_offset = offset + EVENT_HEADER_BYTES
                length = int.from_bytes(events[offset + EVENT_LENGTH_OFFSET : name_offset], sys.byteorder)
                names.append(events[name_offset : name_offset + length].rstrip(b"\0"))
                offset = name_offset + length
    return names


def remove_shared_memory(names: set[str], dead_pids: set[int], reader: int | None = None) -> None:
    """Remove the files `names` and the files named after `dead_pids`, except files that a living process maps.

    The process `reader` may map them: it only reads what the dead processes have written.
    """
    candidates = set(names)
    for name in os.listdir(SHM_DIR) if os.path.isdir(SHM_DIR) else []:
        numbers = {int(number) for number in re.findall(r"\d+", name)}
        if SHM_NAMES.match(name) and numbers & dead_pids and not name.startswith("sem."):
            candidates.add(name)
    if candidates:
        living = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) != reader]
        candidates -= find_shared_memory(living)
    for name in candidates:
        with contextlib.suppress(OSError):
            os.unlink(SHM_DIR + name)
