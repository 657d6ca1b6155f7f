"""First code of a warden process: `python -I .../warden_main.py`.

The option `-I` keeps the current folder, PYTHONPATH and user packages out of a process that must not fail. The package
is then found by the location of this file, whether or not it is installed.

The program forks. Its child is the warden; the program itself only waits for it. A worker of Ray that ends kills its
children with SIGKILL, so a warden that was a child of the worker could not remove the files of its server.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread that started this process may block signals
    parent = os.getpid()
    warden = os.fork()
    if warden:
        _wait(warden)
    # SIGTERM lets the warden end the tree of its server.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        return  # the parent ended before the kernel was asked to report that
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, os.path.normpath(os.path.join(here, "..", "..", "..")))  # the folder of `verl_server`
    import verl_server  # noqa: F401 - later imports of its modules do not use sys.path

    del sys.path[0]  # it must not hide modules of the standard library
    from verl_server.server.warden import warden as program

    program.main()


def _wait(warden: int) -> None:
    """Wait until the warden has ended, and end with its exit code. Holds none of the warden's pipes meanwhile."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they come from a terminal, on which the trainer decides
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    _, status = os.waitpid(warden, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
