"""Worker processes are forked where that is safe: a spawned one imports for ten seconds what its parent has.

A fork copies one thread and every lock as it stands, so it is safe only in a process of a single thread that
is no fork itself (of a trainer whose OpenMP had threads, say: the child then waits for them). Both are asked
of the kernel at the moment of the fork. Otherwise SGLang's own way (spawn) is kept: in a trainer that runs
the in-process `Engine`, in SGLang's own HTTP adapter, which forks, where BLAS has started threads, off Linux.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

_launching = False
_trusted = False
#: Of `/proc/PID/stat`: forked, and no program executed since (linux/sched.h).
PF_FORKNOEXEC = 0x40


def launch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the functions of `Engine` that start the schedulers and the detokenizer."""
    if not can_fork():
        return original(*args, **kwargs)
    global _launching
    usual = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    _launching = True
    try:
        return original(*args, **kwargs)
    finally:
        _launching = False
        multiprocessing.set_start_method(usual, force=True)


def trust_forks() -> None:
    """Forks of this process may fork in their turn: asked when it had never had a second thread (a forkserver)."""
    global _trusted
    _trusted = True


def can_fork() -> bool:
    """Whether this process has one thread and began with a program, not with a fork (or is a forkserver's)."""
    try:
        with open("/proc/self/stat", "rb") as file:
            flags = int(file.read().rpartition(b")")[2].split()[6])
        return len(os.listdir("/proc/self/task")) == 1 and (_trusted or not flags & PF_FORKNOEXEC)
    except OSError:
        return False


def become_a_worker() -> None:
    """After any fork; in a worker: what a spawned one would have. It may start threads, so it spawns in its turn."""
    global _launching
    if _launching:
        _launching = False
        multiprocessing.set_start_method("spawn", force=True)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # SGLang's handler there ends the whole server
