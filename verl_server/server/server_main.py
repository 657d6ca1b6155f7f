"""First code of the server process: read the arguments from a pipe, become SGLang.

The arguments arrive on standard input as one JSON object, so that keys never stand on a command line.
SGLang's own subprocesses import this module again (as `__mp_main__`); hence no import at module level
but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
#: Exit code of a server that was given an argument that SGLang does not know or cannot take.
EXIT_BAD_ARGUMENT = 64


def load() -> None:
    """Import all that a server begins with. Starts no thread (`platforms/workers.py`)."""
    if platform.machine() == "x86_64":  # numpy's BLAS threads are of no use to a server (torch has its own BLAS
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # here) and would rule out `platforms/workers.py`

    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.launch_server  # noqa: F401


def serve(server_args: dict[str, Any]) -> None:
    """Be a server until killed. Dies with its warden (the kernel sees to it)."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    try:
        parsed = ServerArgs(**server_args)
    except TypeError as error:
        print(f"SGLang does not take these server arguments: {error}", flush=True)
        sys.exit(EXIT_BAD_ARGUMENT)
    run_server(parsed)


def read_arguments() -> dict[str, Any]:
    """From standard input, which is nobody's afterwards. From here on this process ends when its parent does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with open(0, "rb", closefd=False) as pipe:
        server_args: dict[str, Any] = json.loads(pipe.readline())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    return server_args


def main() -> None:
    server_args = read_arguments()
    load()
    serve(server_args)


if __name__ == "__main__":
    main()
