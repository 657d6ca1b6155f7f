"""Worker processes are forked where that is safe: a spawned one imports for ten seconds what its parent has.

A fork copies one thread and every lock as it stands, so it is safe only in a process of a single thread, and
that is what is checked, by the kernel's own count, at the moment of the fork. Otherwise SGLang's own way
(spawn) is kept: in a trainer that runs the in-process `Engine`, where BLAS has started threads, and off Linux.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

_launching = False


def launch(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the functions of `Engine` that start the schedulers and the detokenizer."""
    if not _is_single_threaded():
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


def _is_single_threaded() -> bool:
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def become_a_worker() -> None:
    """After any fork; in a worker: what a spawned one would have. It may start threads, so it spawns in its turn."""
    global _launching
    if _launching:
        _launching = False
        multiprocessing.set_start_method("spawn", force=True)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # SGLang's handler there ends the whole server
