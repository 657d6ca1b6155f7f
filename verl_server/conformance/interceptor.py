"""A TCP forwarder in front of a server. A case or a test can act at an exact step, for example kill a process."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from typing import Self
from urllib.parse import urlsplit

REQUEST = re.compile(rb"^(?:GET|POST|OPTIONS) (\S+) HTTP/1")


class Interceptor:
    """Forwards connections to `url`. Calls `before(path)` when a request begins, before the server receives it."""

    def __init__(self, url: str, before: Callable[[str], None]) -> None:
        self._target = (str(urlsplit(url).hostname), urlsplit(url).port)
        self._before = before
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.sent_bytes = 0
        """Number of bytes of all requests, from this forwarder to the server."""
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        self._connections += [client, server]
        threading.Thread(target=self._pump, args=(server, client), daemon=True).start()
        self._pump(client, server, watch=True)

    def _pump(self, source: socket.socket, sink: socket.socket, watch: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if watch and (found := REQUEST.match(data)) is not None:
                    self._before(found[1].decode())
                if watch:
                    self.sent_bytes += len(data)
                sink.sendall(data)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()
