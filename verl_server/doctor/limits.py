"""Limits of the operating system, and the kernel's abilities that supervision and weight updates rest on."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

from verl_server.doctor.finding import Finding, fail, ok, warn

OPEN_FILES_RECOMMENDED = 65536
OPEN_FILES_MINIMUM = 4096
PROCESSES_RECOMMENDED = 4096
PROCESSES_MINIMUM = 512
UNLIMITED = resource.RLIM_INFINITY
#: The other process's part of the staging memory test.
READER = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
MESSAGE = b"weights"


def check_open_files(limit: int, hard: int = UNLIMITED) -> Finding:
    """`ulimit -n` of this shell: each request in flight is a file, in the server and in its client."""
    if limit == UNLIMITED or limit >= OPEN_FILES_RECOMMENDED:
        return ok("Open files", "unlimited" if limit == UNLIMITED else str(limit))
    symptom = "OSError: Too many open files, or connections refused, with many requests in flight"
    reachable = hard == UNLIMITED or hard >= OPEN_FILES_RECOMMENDED
    fix = (
        f"ulimit -n {OPEN_FILES_RECOMMENDED}"
        if reachable
        else f"Raise the hard limit ({hard}) in limits.conf, or start the container with --ulimit nofile="
        f"{OPEN_FILES_RECOMMENDED}."
    )
    detail = f"{limit}, recommended {OPEN_FILES_RECOMMENDED}"
    if limit < OPEN_FILES_MINIMUM:
        return fail("Open files", detail, symptom=symptom, fix=fix)
    return warn("Open files", detail, symptom=symptom, fix=fix)


def check_processes(limit: int) -> Finding:
    """`ulimit -u`: a server of several ranks has hundreds of threads, and threads count."""
    if limit == UNLIMITED or limit >= PROCESSES_RECOMMENDED:
        return ok("Processes", "unlimited" if limit == UNLIMITED else str(limit))
    symptom = "RuntimeError: can't start new thread, or Resource temporarily unavailable"
    fix = f"ulimit -u {PROCESSES_RECOMMENDED}, or raise pids limits of the container (docker run --pids-limit)"
    if limit < PROCESSES_MINIMUM:
        return fail("Processes", str(limit), symptom=symptom, fix=fix)
    return warn("Processes", str(limit), symptom=symptom, fix=fix)


def check_kernel(system: str, release: str, *, memfd: bool, pidfd: bool) -> Finding:
    """memfd_create carries weights, pidfd_open (Linux 5.3) lets the supervisor notice a death."""
    missing = [name for name, there in (("memfd_create", memfd), ("pidfd_open", pidfd)) if not there]
    if not missing:
        return ok("Kernel", f"{system} {release}, with memfd_create and pidfd_open")
    return fail(
        "Kernel",
        f"{system} {release} without {' and '.join(missing)}",
        symptom="servers do not start, or weight updates raise UnsupportedError",
        fix="Use Linux 5.3 or newer; in a sandbox, allow these system calls (seccomp).",
    )


def check_staging(problem: str) -> Finding:
    """`problem`: why another process of this user could not read our staging memory; "" when it could."""
    if not problem:
        return ok("Staging memory", "another process of this user can read it (/proc/PID/fd)")
    return fail(
        "Staging memory",
        f"another process of this user cannot open /proc/PID/fd: {problem}",
        symptom="update_weights_from_tensor fails: the server cannot open the arena",
        fix="Run trainer and server as one user in one container (or with --pid=host), with /proc mounted "
        "without hidepid, and without a sandbox that forbids it.",
    )


def probe_memfd() -> bool:
    try:
        os.close(os.memfd_create("verl_server_doctor"))
    except (AttributeError, OSError):
        return False
    return True


def probe_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def probe_staging() -> str:
    """Do what a weight update does: a second process opens our memory file by /proc/PID/fd."""
    try:
        fd = os.memfd_create("verl_server_doctor", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        return str(error)
    try:
        os.write(fd, MESSAGE)
        command = [sys.executable, "-I", "-S", "-c", READER, f"/proc/{os.getpid()}/fd/{fd}"]
        reader = subprocess.run(command, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        os.close(fd)
    words = reader.stderr.decode(errors="replace").strip().splitlines()
    return "" if reader.stdout == MESSAGE else (words[-1] if words else "it read something else")


def examine() -> list[Finding]:
    """Look at the limits of this process and at the kernel."""
    return [
        check_kernel(platform.system(), platform.release(), memfd=probe_memfd(), pidfd=probe_pidfd()),
        check_staging(probe_staging()),
        check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
    ]
