"""The server main as the warden sees it, and its start as a new program. Imports the standard library only."""

from __future__ import annotations

import contextlib
import subprocess
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the warden itself imports the standard library only
    from verl_server.types import Json


class ServerMain(Protocol):
    """The main process of a server: the part of `subprocess.Popen` that the warden uses."""

    @property
    def pid(self) -> int: ...

    @property
    def stdout(self) -> IO[bytes] | None:
        """Standard output and standard error of the process."""

    def wait(self, timeout: float | None = None) -> int: ...

    def poll(self) -> int | None: ...


def spawn_server(spec: Json) -> ServerMain:
    """Start the server main as a new program."""
    server = subprocess.Popen(
        spec["argv"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=spec["env"],
        cwd=spec["scratch"],
    )
    assert server.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process has already ended; the warden's loop reports its exit
        server.stdin.write(spec["payload"].encode())
        server.stdin.close()
    return server
