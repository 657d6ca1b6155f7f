"""Checks of operating system limits and of the kernel features that supervision and weight updates need."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import tempfile

from verl_server.doctor.finding import Finding, fail, ok, warn
from verl_server.server.warden.process_watch import has_pidfds

OPEN_FILES_RECOMMENDED = 65536
OPEN_FILES_MINIMUM = 4096
PROCESSES_RECOMMENDED = 4096
PROCESSES_MINIMUM = 512
UNLIMITED = resource.RLIM_INFINITY
#: Program of the second process in the test of the staging memory.
READER = "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())"
MESSAGE = b"weights"


def check_open_files(limit: int, hard: int = UNLIMITED) -> Finding:
    """Check `ulimit -n`. Each request in flight uses one open file in the server and one in the client.

    `limit` and `hard` are the soft and the hard limit.
    """
    if limit == UNLIMITED or limit >= OPEN_FILES_RECOMMENDED:
        return ok("Open files", "unlimited" if limit == UNLIMITED else str(limit))
    symptom = "with many requests in flight: OSError: Too many open files, or refused connections"
    can_be_raised = hard == UNLIMITED or hard >= OPEN_FILES_RECOMMENDED
    fix = (
        f"ulimit -n {OPEN_FILES_RECOMMENDED}"
        if can_be_raised
        else f"Raise the hard limit, now {hard}, in limits.conf, or start the container with --ulimit nofile="
        f"{OPEN_FILES_RECOMMENDED}."
    )
    detail = f"{limit}, recommended {OPEN_FILES_RECOMMENDED}"
    if limit < OPEN_FILES_MINIMUM:
        return fail("Open files", detail, symptom=symptom, fix=fix)
    return warn("Open files", detail, symptom=symptom, fix=fix)


def check_processes(limit: int) -> Finding:
    """Check `ulimit -u`, which counts threads. A server with several ranks has hundreds of threads."""
    if limit == UNLIMITED or limit >= PROCESSES_RECOMMENDED:
        return ok("Processes", "unlimited" if limit == UNLIMITED else str(limit))
    symptom = "RuntimeError: can't start new thread, or Resource temporarily unavailable"
    fix = f"ulimit -u {PROCESSES_RECOMMENDED}; in a container also raise its limit (docker run --pids-limit)"
    if limit < PROCESSES_MINIMUM:
        return fail("Processes", str(limit), symptom=symptom, fix=fix)
    return warn("Processes", str(limit), symptom=symptom, fix=fix)


def check_kernel(system: str, release: str, *, memfd: bool, pidfd: bool) -> Finding:
    """Check for memfd_create, which weight updates use, and pidfd_open (Linux 5.3), which reports ended processes."""
    missing = [name for name, there in (("memfd_create", memfd), ("pidfd_open", pidfd)) if not there]
    if not missing:
        return ok("Kernel", f"{system} {release}, with memfd_create and pidfd_open")
    detail = f"{system} {release} without {' and '.join(missing)}"
    fix = (
        "Use Linux 5.3 or newer, and a Python that was built for it. In a sandbox, allow these system calls in its "
        "seccomp profile."
    )
    if memfd:
        symptom = "every server is started as a new program, which takes 15 s and more on a CPU instead of 2 s"
        return warn("Kernel", detail, symptom=symptom, fix=fix)
    return fail("Kernel", detail, symptom="weight updates raise UnsupportedError", fix=fix)


def check_staging(problem: str) -> Finding:
    """Check that a server can read the trainer's staging memory.

    `problem` is the error of another process of this user that opened it, or "" if the process could read it.
    """
    if not problem:
        return ok("Staging memory", "another process of this user can read it (/proc/PID/fd)")
    return fail(
        "Staging memory",
        f"another process of this user cannot open /proc/PID/fd: {problem}",
        symptom="update_weights_from_tensor fails: the server cannot open the arena",
        fix="Run the trainer and the server as the same user in the same container (or with --pid=host). Mount /proc "
        "without hidepid. In a sandbox, allow access to /proc/PID/fd.",
    )


def check_temporary_folder(folder: str, problem: str) -> Finding:
    """Check that each server can have a folder for temporary files.

    `folder` is the folder of this process. `problem` is the error of a test, or "" if a file could be written.
    """
    if not problem:
        return ok("Temporary files", folder)
    return fail(
        "Temporary files",
        problem,
        symptom="every start of a server raises StartupError",
        fix="Set TMPDIR to a writable folder. In a container with a read-only root, add one (docker run --tmpfs /tmp).",
    )


def probe_temporary_folder() -> tuple[str, str]:
    """The folder for temporary files, and the error of writing a file there, "" if that worked."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(MESSAGE)
    except OSError as error:
        return "", str(error)
    return tempfile.gettempdir(), ""


def probe_memfd() -> bool:
    try:
        os.close(os.memfd_create("verl_server_doctor"))
    except (AttributeError, OSError):
        return False
    return True


def probe_staging() -> str:
    """Let a second process read a memory file of this process through /proc/PID/fd, as a weight update does.

    Returns the error, or "" if the second process could read the file.
    """
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
    if reader.stdout == MESSAGE:
        return ""
    lines = reader.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "the process read other bytes"


def examine() -> list[Finding]:
    """Check the limits of this process and the kernel."""
    return [
        check_kernel(platform.system(), platform.release(), memfd=probe_memfd(), pidfd=has_pidfds()),
        check_staging(probe_staging()),
        check_temporary_folder(*probe_temporary_folder()),
        check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        check_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
    ]
