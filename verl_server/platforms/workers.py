"""SGLang's worker processes are forked where that is safe. A spawned worker repeats ten seconds of imports.

A fork copies one thread and the state of every lock. It is safe only in a process with one thread that was not forked
itself: a fork of a trainer, for example, would wait for OpenMP threads that do not exist in it. Both conditions are
read from the kernel at the moment of the fork. Otherwise workers are spawned, as SGLang does by default: in a trainer
that runs the in-process `Engine`, in SGLang's own HTTP adapter, which forks, when BLAS has started threads, and on
other systems than Linux.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

_is_launching = False
_forks_may_fork = False
#: Flag in `/proc/PID/stat`: the process was forked and has executed no program since (linux/sched.h).
PF_FORKNOEXEC = 0x40


def launch_workers(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call SGLang's `Engine` function that starts the schedulers or the detokenizer, with the start method "fork".

    A spawned worker imports all modules again. Where a fork is not safe, the start method is not changed.
    """
    if not can_fork():
        return original(*args, **kwargs)
    global _is_launching
    start_method = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    _is_launching = True
    try:
        return original(*args, **kwargs)
    finally:
        _is_launching = False
        multiprocessing.set_start_method(start_method, force=True)


def allow_forks_to_fork() -> None:
    """Allow that forks of this process fork workers. Only for a process that has never had a second thread."""
    global _forks_may_fork
    _forks_may_fork = True


def can_fork() -> bool:
    """Whether this process has one thread and was not forked. Forks of a forkserver are allowed."""
    try:
        with open("/proc/self/stat", "rb") as file:
            flags = int(file.read().rpartition(b")")[2].split()[6])
        return len(os.listdir("/proc/self/task")) == 1 and (_forks_may_fork or not flags & PF_FORKNOEXEC)
    except OSError:
        return False


def after_fork() -> None:
    """Give a forked worker the state of a spawned worker. Runs after every fork.

    A worker may start threads later, so it spawns its own processes.
    """
    global _is_launching
    if _is_launching:
        _is_launching = False
        multiprocessing.set_start_method("spawn", force=True)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # SGLang's handler there ends the whole server
