"""Memory files: anonymous memory that one process creates and other processes of the same user map, and words in it.

A memory file (`memfd_create`) has no name in /dev/shm, so nothing is left behind when a process is killed, and a small
/dev/shm (64 MB in a default container) does not limit it. Other processes of the same user open it as `/proc/PID/fd/N`
while its owner runs. A mapping stays valid after the owner has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import secrets
import threading
from typing import TYPE_CHECKING

from verl_server.errors import UnsupportedError, VerlServerError

if TYPE_CHECKING:
    import torch

WORD_BYTES = 8
NAME_PREFIX = "verl_server_"
"""How the names of our memory files begin. SGLang's servers open no other files for a weight update."""
FORBIDDEN_ERRORS = (errno.EPERM, errno.EACCES, errno.ENOSYS)
"""Errors of `memfd_create` in a sandbox that forbids it (seccomp)."""
LOCATION_PATH = re.compile(r"/proc/\d+/fd/\d+")


class SharedMemoryFile:
    """One process's mapping of a memory file. `create` makes the file; `open` maps the file of another process.

    `location`: where other processes find the file, see `open_memory_file`.
    """

    def __init__(self, fd: int, size_bytes: int, location: str) -> None:
        self._fd, self.location = fd, location
        try:
            self.memory = mmap.mmap(fd, size_bytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise VerlServerError(f"cannot map {size_bytes} bytes of staging memory: {error}") from error

    @classmethod
    def create(cls, kind: str, size_bytes: int) -> SharedMemoryFile:
        """Create a file that this process owns. The machine provides a page when it is first written.

        `kind` is a part of the file's name, in which a random number follows. Raises UnsupportedError on a system or in
        a sandbox without `memfd_create`, VerlServerError if a limit forbids the file or the memory cannot be mapped.
        """
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError("staging memory for weights needs memfd_create, which only Linux has")
        name = f"{NAME_PREFIX}{kind}_{secrets.token_hex(8)}"
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC)
        except OSError as error:
            if error.errno in FORBIDDEN_ERRORS:
                raise UnsupportedError(
                    f"staging memory for weights needs memfd_create, which this sandbox forbids: {error}"
                ) from error
            raise _not_created(size_bytes, error) from error
        try:
            os.ftruncate(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise _not_created(size_bytes, error) from error
        return cls(fd, size_bytes, f"/proc/{os.getpid()}/fd/{fd}:{name}")

    @classmethod
    def open(cls, location: str, size_bytes: int) -> SharedMemoryFile:
        """Map the file of another process on this machine. Raises OSError if this process cannot open it."""
        return cls(open_memory_file(location), size_bytes, location)

    def exists(self) -> bool:
        """Whether the owner of the file runs and has not closed it."""
        path, _, name = self.location.partition(":")
        return _memory_file_name(path) == name

    def close(self) -> None:
        """Close the file. The mapping is closed when no object uses it any more."""
        with contextlib.suppress(BufferError):
            self.memory.close()
        os.close(self._fd)


def _not_created(size_bytes: int, error: OSError) -> VerlServerError:
    return VerlServerError(
        f"cannot create {size_bytes} bytes of staging memory: {error}. Check the limits of open files (`ulimit -n`), "
        "of the size of a file (`ulimit -f`) and of memory"
    )


def open_memory_file(location: str) -> int:
    """Open the memory file at a location, "PATH:NAME", and return its file descriptor.

    The path `/proc/PID/fd/N` alone says nothing: in another container, or after the process has ended, the same number
    can be another file. Therefore the name is compared. Raises OSError if this process cannot open the file, or if the
    path is another file.
    """
    path, _, name = location.partition(":")
    if not (LOCATION_PATH.fullmatch(path) and name.startswith(NAME_PREFIX)):
        raise PermissionError(f"{location!r} is not the location of a memory file of verl_server")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if _memory_file_name(f"/proc/self/fd/{fd}") != name:
        os.close(fd)
        raise FileNotFoundError(
            f"{path} is not the memory file {name}: its owner has ended, or runs in another container"
        )
    return fd


def _memory_file_name(path: str) -> str | None:
    """The name of the memory file that an entry of `/proc/PID/fd` is, or None."""
    try:
        target = os.readlink(path)
    except OSError:
        return None
    return target.removeprefix("/memfd:").removesuffix(" (deleted)") if target.startswith("/memfd:") else None


def memory_contains(memory: mmap.mmap, tensor: torch.Tensor) -> bool:
    """Whether a tensor is in this memory."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return bool(start <= tensor.data_ptr() < start + len(memory))


class SharedWords:
    """`count` words of 64 bits at `offset` in shared memory. Each word is read and written at once.

    A process that reads a word also sees everything that was written before the word. What a process has read before it
    writes a word was not yet changed by a process that waited for the word.
    """

    def __init__(self, memory: mmap.mmap, offset: int, count: int) -> None:
        self._words = memoryview(memory)[offset : offset + count * WORD_BYTES].cast("Q")

    def __getitem__(self, index: int) -> int:
        word = self._words[index]
        order_memory_accesses()
        return word

    def __setitem__(self, index: int, word: int) -> None:
        order_memory_accesses()
        self._words[index] = word

    def release(self) -> None:
        """Release the memory, so that it can be unmapped."""
        self._words.release()


def order_memory_accesses() -> None:
    """Let the processor finish all earlier reads and writes of this thread before all later ones.

    x86-64 keeps the order of writes and the order of reads. Processors with aarch64 may change it: a process could read
    a new counter, and after it the old bytes that the counter speaks of. Python has no memory barrier, but its locks
    contain one: the release of a lock is a store-release and the acquisition a load-acquire, and aarch64 does not move
    a load-acquire before an earlier store-release (Arm Architecture Reference Manual, "Barrier-ordered-before").
    """
    lock = threading.Lock()
    for _ in range(2):  # the second acquisition after the first release is the barrier
        with lock:
            pass
