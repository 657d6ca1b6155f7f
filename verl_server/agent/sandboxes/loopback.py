"""A listening socket on the loopback interface of a sandbox, for a server in the process of the trainer.

A local sandbox has a network namespace of its own: its commands reach no port of the machine. A socket belongs to the
network namespace in which it was made, and any process can hold it. So a command in the sandbox makes the socket and
sends it to the trainer through a Unix socket in the folder of the sandbox (`SCM_RIGHTS`, `man 7 unix`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from verl_server.agent.sandboxes.sandbox import Sandbox
from verl_server.errors import InfrastructureError

SEND_SOCKET = """
import socket, sys
with socket.create_server(("127.0.0.1", 0), backlog=128) as listener, socket.socket(socket.AF_UNIX) as client:
    client.connect(sys.argv[1])
    socket.send_fds(client, [b"1"], [listener.fileno()])
"""
RECEIVE_TIMEOUT_S = 10.0


async def listen_in(sandbox: Sandbox, folder: Path) -> socket.socket:
    """A socket that listens on a free port of `127.0.0.1` in the sandbox. `folder`: that in which commands start.

    Raises InfrastructureError if the sandbox cannot make the socket.
    """
    name = f".listen-{secrets.token_hex(8)}"
    try:
        with _opened(folder) as opened, socket.socket(socket.AF_UNIX) as inbox:
            inbox.bind(f"/proc/self/fd/{opened}/{name}")  # the path of a Unix socket has at most 107 characters
            try:
                inbox.listen(1)
                result = await sandbox.run([os.path.realpath(sys.executable), "-I", "-c", SEND_SOCKET, name])
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=opened)
            if result.exit_code:
                raise InfrastructureError(f"the sandbox cannot listen on its loopback interface: {result.text}")
            inbox.settimeout(RECEIVE_TIMEOUT_S)  # the connection waits already
            with inbox.accept()[0] as connection:
                connection.settimeout(RECEIVE_TIMEOUT_S)
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    except OSError as error:
        raise InfrastructureError(f"the sandbox has sent no socket: {error}") from error
    if not descriptors:
        raise InfrastructureError("the sandbox has sent no socket")
    os.set_inheritable(descriptors[0], False)  # a child of the trainer would keep the port
    return socket.socket(fileno=descriptors[0])


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
