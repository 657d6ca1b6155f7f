"""`RayDiscovery`: finds the servers of a fleet by their Ray names, from a process of its own.

Ray ends a process that is connected to a cluster when the cluster ends, and replaces its signal handlers. A program
that has to go on without the cluster, such as a gateway, leaves Ray to a child process. The addresses and keys of the
servers travel through a pipe.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import asdict

import orjson

from verl_server.config import RemoteServer
from verl_server.errors import DeadlineError, ServerError, VerlServerError
from verl_server.types import Json

ANSWER_TIMEOUT_S = 60.0
"""Seconds for one search. The first one connects to the cluster."""
STOP_TIMEOUT_S = 10.0


class RayDiscovery:
    """Calls `verl_server.ray.discover` in a child process. May be called in any thread, one call at a time."""

    def __init__(self, namespace: str, address: str | None = None) -> None:
        """`address`: address of the cluster; None means the environment variable RAY_ADDRESS, or "auto"."""
        self._arguments = (namespace, *([] if address is None else [address]))
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        """Protects the two attributes around it."""
        self._is_closed = False

    def __call__(self) -> dict[str, RemoteServer]:
        """The servers that run now, by the name of their replica.

        Raises ServerError without a cluster, and if the child process has ended, which the next call starts again; and
        DeadlineError if Ray does not answer.
        """
        child = self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(b"\n")
            child.stdin.flush()
            reply = orjson.loads(_read_line(child.stdout.fileno()))
        except (OSError, ValueError) as error:
            self._stop()
            raise ServerError("the process that asks Ray has ended; it is started again") from error
        except DeadlineError:
            self._stop()
            raise
        if "error" in reply:
            raise ServerError(reply["error"])
        return {name: RemoteServer(**server) for name, server in reply["servers"].items()}

    def close(self) -> None:
        """End the child process. A call that waits for it ends with an error."""
        self._is_closed = True
        self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise ServerError("the search for servers was closed")
            if self._child is None or self._child.poll() is not None:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", __name__, *self._arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C in a terminal ends the caller, which then ends this process
                )
            return self._child

    def _stop(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_TIMEOUT_S)


def _read_line(fd: int) -> bytes:
    """The next line of a pipe. Raises DeadlineError, and ValueError at the end of the pipe."""
    deadline, line = time.monotonic() + ANSWER_TIMEOUT_S, b""
    while not line.endswith(b"\n"):
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise DeadlineError("Ray did not answer", operation="discover", seconds=ANSWER_TIMEOUT_S)
        if not (part := os.read(fd, 1 << 16)):
            raise ValueError("the pipe was closed")
        line += part
    return line


def main() -> None:
    """Answer each line of the standard input with the servers, until it ends."""
    from verl_server.rollout.launchers.ray_launcher import discover

    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray writes to the standard output
    namespace, address = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else os.environ.get("RAY_ADDRESS")
    for _ in sys.stdin:
        try:
            found = discover(address, namespace)
            reply: Json = {"servers": {name: asdict(server) for name, server in found.items()}}
        except VerlServerError as error:
            reply = {"error": error.message}
        replies.write(orjson.dumps(reply) + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
