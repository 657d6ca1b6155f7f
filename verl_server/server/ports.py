"""Free ports that stay free until the server takes them."""

from __future__ import annotations

import socket

from verl_server.errors import BadInputError


class PortReservation:
    """A port held from choice to use.

    The socket is bound but never listens. On Linux a second socket with SO_REUSEADDR may bind the same
    port while none listens, so the server can take it, while the kernel gives it to nobody else who asks
    for any free port. What remains is a program that insists on exactly this number: the caller retries.
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
        """Give the port back. Safe to call twice."""
        self._socket.close()


def join_host_port(host: str, port: int) -> str:
    """`host:port` as a URL wants it; IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
