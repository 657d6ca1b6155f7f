"""Confines this process and its children with what the kernel allows: namespaces and Landlock. Standard library only.

Sources: `man 7 namespaces`, `man 7 user_namespaces`, `man 7 landlock`, `linux/landlock.h`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import re
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 0x1, 0x2, 0x4, 0x8, 0x20
MNT_DETACH = 0x2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 0x1
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION, LANDLOCK_RULE_PATH_BENEATH = 1, 1
WRITE_FILE, REFER, TRUNCATE = 1 << 1, 1 << 13, 1 << 14
MAKE_AND_REMOVE = sum(1 << bit for bit in range(4, 13))
SCOPES = 0b11
"""Abstract unix sockets and signals: only those of the sandbox (version 6 of Landlock)."""
KEYCTL = {"x86_64": 250, "aarch64": 219}
KEYCTL_JOIN_SESSION_KEYRING = 1
WRITABLE_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/ptmx")
PROC_FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC
RESERVED_PIDS = 300
"""Process ids that Linux does not use again, after the first time."""
SHARED_MEMORY_BYTES = 64 << 20
"""Size of `/dev/shm` in a sandbox, as in a container of Docker."""


def call_prctl(option: int, value: int = 1) -> None:
    """Call `prctl(2)`. Raises OSError."""
    _check(_libc.prctl(option, value, 0, 0, 0))


def enter_namespaces(with_network: bool) -> list[str]:
    """Move this process into new namespaces. Its next child is the first process of the new process namespace.

    Returns the kinds that the kernel allows: `user`, `processes`, `mounts`, and `network` unless `with_network`.
    """
    kinds = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | (0 if with_network else CLONE_NEWNET)
    names = ["processes", "mounts", *([] if with_network else ["network"])]
    user, group = os.geteuid(), os.getegid()
    with contextlib.suppress(OSError):
        _check(_libc.unshare(CLONE_NEWUSER | kinds))
        for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path(f"/proc/self/{file}").write_text(line)
        return ["user", *names]
    with contextlib.suppress(OSError):  # in a container, root may have no user namespaces but the other kinds
        _check(_libc.unshare(kinds))
        return names
    return []


def enter_process_namespace(namespace: int | None) -> None:
    """Let later children of this process start in an open process namespace. None: in a new one. Raises OSError."""
    _check(_libc.unshare(CLONE_NEWPID) if namespace is None else _libc.setns(namespace, CLONE_NEWPID))


def mount_own_processes(max_processes: int) -> None:
    """Mount the `/proc` of this process's namespace read-only, and bound its processes. Raises OSError."""
    _libc.umount2(b"/proc", MNT_DETACH)  # that of an earlier namespace, if there is one
    _mount("proc", "/proc", "proc", PROC_FLAGS)
    if kernel_version() >= (6, 14):  # older kernels have one value for the whole machine
        with contextlib.suppress(OSError):
            Path("/proc/sys/kernel/pid_max").write_text(str(RESERVED_PIDS + max_processes))
    _mount("", "/proc", "", MS_REMOUNT | MS_BIND | MS_RDONLY | PROC_FLAGS)


def hide_processes() -> int:
    """Take the last mount of `/proc` away from this process and its children. Returns its open folder."""
    proc = os.open("/proc", os.O_RDONLY)
    _check(_libc.umount2(b"/proc", MNT_DETACH))
    return proc


def kernel_version() -> tuple[int, int]:
    """The two first numbers of the version of Linux."""
    major, minor = platform.release().split(".")[:2]
    return int(major), int(re.sub(r"\D.*", "", minor))


def mount_private_folders(work: str, temporary: str, *, hides_sockets: bool) -> list[str]:
    """Mount `temporary` as `/tmp`, and a new `/proc`, `/dev/shm` and `/dev/pts`. `work` keeps its path.

    `hides_sockets`: mount an empty `/run`, which has the sockets of daemons, for example Docker's. Returns the folders
    that commands may write, which are private now. Raises OSError if the kernel or a security module refuses.
    """
    folders = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in (work, temporary)]
    try:
        _mount("none", "/", "", MS_REC | MS_PRIVATE)
        _mount("proc", "/proc", "proc", PROC_FLAGS)
        _mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"size={SHARED_MEMORY_BYTES},mode=1777")
        if hides_sockets and os.path.isdir("/run"):
            _mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0755")
        _mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
        _mount("/dev/pts/ptmx", "/dev/ptmx", "", MS_BIND)
        _mount(f"/proc/self/fd/{folders[1]}", "/tmp", "", MS_BIND)
        os.makedirs(work, exist_ok=True)  # if the folder of the sandbox is below the /tmp of the machine
        _mount(f"/proc/self/fd/{folders[0]}", work, "", MS_BIND)
    finally:
        for folder in folders:
            os.close(folder)
    return [work, "/tmp", "/dev/shm", "/dev/pts"]


def mount_read_only(writable: Sequence[str]) -> bool:
    """Make all mounts read-only except those at these folders. Returns whether the kernel can (Linux 5.12).

    Landlock alone does not restrict changes of permissions and times.
    """
    try:
        _set_mount("/", AT_RECURSIVE, MOUNT_ATTR_RDONLY, 0)
        for folder in writable:
            _set_mount(folder, 0, 0, MOUNT_ATTR_RDONLY)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return False
    return True


def start_loopback() -> None:
    """Start the loopback interface of a new network namespace. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        flags = fcntl.ioctl(opened, SIOCGIFFLAGS, struct.pack("16sH14s", b"lo", 0, b""))
        (value,) = struct.unpack_from("H", flags, 16)
        fcntl.ioctl(opened, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", value | IFF_UP, b""))


def restrict_writes(paths: Sequence[str]) -> bool:
    """Let this process and its children write below these folders and to these devices only.

    Returns whether the kernel has Landlock. Reading and executing are not restricted.
    """
    version = _libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_CREATE_RULESET_VERSION)
    if version < 1:
        return False
    file_rights = WRITE_FILE | (TRUNCATE if version >= 3 else 0)
    rights = file_rights | MAKE_AND_REMOVE | (REFER if version >= 2 else 0)
    attributes = struct.pack("Q", rights) if version < 6 else struct.pack("QQQ", rights, 0, SCOPES)
    ruleset = _check(_libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
    try:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                _allow(ruleset, path, rights, file_rights)
        _check(_libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


def leave_keyring() -> None:
    """Use a new session keyring: that of the trainer may have keys, for example of Kerberos."""
    if number := KEYCTL.get(platform.machine()):
        _libc.syscall(number, KEYCTL_JOIN_SESSION_KEYRING, None)  # a kernel without keyrings refuses


def drop_privileges() -> None:
    """Prevent children from gaining capabilities, also as root and by a program with set-user-id."""
    call_prctl(PR_SET_NO_NEW_PRIVS)
    for capability in range(64):
        try:
            call_prctl(PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EPERM):  # the last capability, or a process without privileges
                return
            raise


def _allow(ruleset: int, path: str, folder_rights: int, file_rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", folder_rights if os.path.isdir(path) else file_rights, opened)
        _check(_libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(opened)


def _set_mount(path: str, flags: int, added: int, removed: int) -> None:
    attributes = struct.pack("QQQQ", added, removed, 0, 0)
    _check(_libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, ctypes.c_size_t(len(attributes))))


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [text.encode() for text in (source, target, kind, options)]
    _check(_libc.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[3]))


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
