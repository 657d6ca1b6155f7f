"""Python code that forbids a system call to its process and to the children of this process, as seccomp profiles do."""

from __future__ import annotations

import platform

_NUMBERS = {
    "x86_64": {"clone": 56, "sched_getaffinity": 204, "memfd_create": 319, "pidfd_open": 434},
    "aarch64": {"clone": 220, "sched_getaffinity": 123, "memfd_create": 279, "pidfd_open": 434},
}
"""Numbers of system calls, by the machine's architecture."""


def forbid(name: str) -> str:
    """Code after which the system call `name` fails with EPERM in the thread that has run the code.

    The code loads a BPF program of four instructions.
    """
    return f"""
import ctypes, struct
program = b"".join(struct.pack("HBBI", *line) for line in (
    (0x20, 0, 0, 0),           # load the number of the system call
    (0x15, 0, 1, {_NUMBERS[platform.machine()][name]}),  # if it is {name}
    (0x06, 0, 0, 0x00050001),  # return EPERM
    (0x06, 0, 0, 0x7FFF0000),  # else allow it
))
memory = ctypes.create_string_buffer(program)
filter = struct.pack("HxxxxxxQ", 4, ctypes.addressof(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, filter, 0, 0) == 0, ctypes.get_errno()
"""
