"""Frames between two trainer ranks: JSON with a length in front, over a socket that proved to know the key.

Plain JSON, so nothing is unpickled; the proof is an HMAC over a fresh challenge, so the key never travels.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import orjson

Json = dict[str, Any]
_HEADER = struct.Struct("!Q")
HANDSHAKE_S = 10.0


class Channel:
    """One connection to a peer. `send` is thread-safe; a thread hands what arrives to `on_message`."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._socket, self.peer = connection, peer
        self._lock = threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def listen(self, on_message: Callable[[int, Json], None], on_end: Callable[[int], None]) -> None:
        """Start the reading thread; `on_end` is called once, when the peer's end is closed or dead."""

        def read() -> None:
            with contextlib.suppress(OSError):
                while (frame := receive(self._socket)) is not None:
                    on_message(self.peer, orjson.loads(frame))
            on_end(self.peer)

        threading.Thread(target=read, name=f"verl-server-rank-{self.peer}", daemon=True).start()

    def send(self, message: Json) -> bool:
        """Send one message; False if the peer is gone (its reader reports that as well)."""
        try:
            with self._lock:
                transmit(self._socket, orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY))
        except OSError:
            return False
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def transmit(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(_HEADER.pack(len(frame)) + frame)


def receive(connection: socket.socket) -> bytes | None:
    """One frame, or None at the end of the stream."""
    header = _exactly(connection, _HEADER.size)
    return None if header is None else _exactly(connection, _HEADER.unpack(header)[0])


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), 2**20))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _proof(key: bytes, challenge: bytes, rank: int) -> bytes:
    return hmac.digest(key, challenge + rank.to_bytes(8, "big"), "sha256")


def admit(connection: socket.socket, key: bytes) -> int | None:
    """The hub's side of the handshake: the rank that proved to know `key`, or None for a stranger."""
    connection.settimeout(HANDSHAKE_S)
    challenge = secrets.token_bytes(32)
    try:
        transmit(connection, challenge)
        answer = receive(connection)
    except OSError:
        return None
    if answer is None or len(answer) != 40:
        return None
    rank = int.from_bytes(answer[:8], "big")
    return rank if hmac.compare_digest(answer[8:], _proof(key, challenge, rank)) else None


def join(address: tuple[str, int], key: bytes, rank: int, timeout_s: float) -> Channel:
    """The spoke's side: connect to the hub and prove to know `key`. Raises OSError if it cannot."""
    connection = socket.create_connection(address, timeout=timeout_s)
    challenge = receive(connection)
    if challenge is None:
        raise ConnectionError("the hub closed the connection")
    transmit(connection, rank.to_bytes(8, "big") + _proof(key, challenge, rank))
    return Channel(connection, peer=0)
