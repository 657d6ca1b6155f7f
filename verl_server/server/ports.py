"""Reservation of free ports, `host:port` in URLs, and sockets that notice the loss of the other machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from verl_server.errors import BadInputError
from verl_server.validation import is_whole_number

KEEPALIVE_S = 30
"""Seconds without data before the kernel asks whether the other machine is still there, and between two questions."""
LOST_MACHINE_S = 120
"""Seconds without an answer of the other machine after which the kernel closes a connection."""


BACKLOG = 2048
"""Number of connections that wait until the server accepts them."""


class PortReservation:
    """A port that is reserved until the server binds it.

    The reservation is a bound socket that never listens. On Linux a second socket with SO_REUSEADDR may bind the same
    port as long as no socket listens on it. So the server can bind the port, and the kernel gives the port to no
    program that requests any free port. A program that requests this port number can still take it; callers then try
    another.
    """

    def __init__(self, host: str, port: int | None = None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port or 0))
        except OSError as error:
            self._socket.close()
            raise BadInputError(
                f"cannot bind {host} port {port or 'any'}: {error.strerror}. "
                "Choose another `port` (or leave it out) and a `host` of this machine."
            ) from error
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Release the port. May be called more than once."""
        self._socket.close()


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to `host`, for `listen`. `port` 0: a free port.

    Raises BadInputError for a port that is in use, and for a host that is no address of this machine.
    """
    if not is_whole_number(port) or not 0 <= port <= 65535:
        raise BadInputError(f"port must be a whole number from 0 to 65535, got {port!r}")
    with _explain_failure(host, port):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    return bound


def listen(bound: socket.socket) -> None:
    """Let a socket of `bind` listen. Raises BadInputError if another program has taken the port meanwhile."""
    host, port = bound.getsockname()[:2]
    with _explain_failure(host, port):
        bound.listen(BACKLOG)


@contextlib.contextmanager
def _explain_failure(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInputError(
            f"cannot listen on port {port} of {host}: {error.strerror or error}; choose another port (--port), 0 for a "
            "free port, or another host (--host) of this machine"
        ) from error


def join_host_port(host: str, port: int) -> str:
    """`host:port` for a URL. IPv6 addresses are put in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def notice_lost_machine(connection: socket.socket, timeout_s: float) -> None:
    """Let the kernel close a connection whose other machine answers nothing for `timeout_s` seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout_s))


def open_socket(address: tuple[Any, ...]) -> socket.socket:
    """A socket for an entry of `socket.getaddrinfo`, for example as the `socket_factory` of aiohttp's TCPConnector.

    A machine that has vanished closes no connection: without `LOST_MACHINE_S`, a call would wait for ever.
    """
    family, kind, protocol = address[:3]
    opened = socket.socket(family, kind, protocol)
    notice_lost_machine(opened, LOST_MACHINE_S)
    return opened
