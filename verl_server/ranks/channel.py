"""An authenticated connection between two trainer ranks that carries JSON messages.

A frame is an 8-byte big-endian length followed by JSON. The messages are plain JSON, so nothing is unpickled. A rank
proves that it knows the key with an HMAC of a fresh challenge, so the key itself is never sent.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from verl_server.errors import BadInputError, PeerError, from_wire, to_wire
from verl_server.ranks.placement import reachable_address
from verl_server.server.launch import notice_lost_machine
from verl_server.types import Json

_HEADER = struct.Struct("!Q")
HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds that a new connection has to prove that it knows the key, in total."""
RECONNECT_S = 0.2
"""Seconds between two attempts of a rank to connect to rank 0."""
ACCEPTED = b"\x01"
"""Rank 0 sends it to a rank that has proved its key."""
MAX_HANDSHAKES = 256
"""Maximum number of connections that have not proved it yet. The oldest is closed when another one comes."""
CHALLENGE_BYTES, ANSWER_BYTES = 32, 40
"""Sizes of the two frames before a connection is authenticated: a challenge; a rank with its proof."""
RECEIVE_BYTES = 2**20
"""Maximum number of bytes that one call of `recv` asks for."""
SEND_TIMEOUT_S = 300.0
"""Seconds without an acknowledgement of sent data after which the connection is closed. The kernel of a process that is
stopped acknowledges no data when the buffers of the connection are full."""
PIECE_BYTES = 2**20
"""Maximum number of bytes that the sending thread passes to the kernel at once. Each piece is progress."""
STALL_S = 10.0
"""Seconds without progress after which `wait_until_all_sent` gives a channel up. A stopped rank does not read."""


class Channel:
    """A connection to one other trainer rank.

    `send` is thread-safe and does not wait for the other rank: messages that the other rank does not read yet are kept
    in memory. A thread passes received messages to a callback. The connection is closed when the other machine, or a
    rank that has to receive data, does not react for `SEND_TIMEOUT_S` seconds.
    """

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self._socket, self.peer = connection, peer
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        """What the kernel has not taken yet, because the buffers of the connection are full."""
        self._sending_thread: threading.Thread | None = None
        """Sends `_unsent`. None while it is empty."""
        self._progressed_at = 0.0
        """Time of `time.monotonic` when the sending thread started, or when the kernel last took a piece from it."""
        self._is_closed = False
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_lost_machine(connection, SEND_TIMEOUT_S)

    def listen(self, on_message: Callable[[int, Json], None], on_disconnect: Callable[[int], None]) -> None:
        """Start the receiving thread.

        The thread calls `on_message(peer, message)` for every message, and `on_disconnect(peer)` once, when the peer
        has closed the connection, its process has ended, or a message could not be read.
        """

        def receive_messages() -> None:
            try:
                with contextlib.suppress(OSError):
                    while (frame := receive_frame(self._socket)) is not None:
                        on_message(self.peer, orjson.loads(frame))
            finally:
                self._disconnect()  # the peer learns that nothing is received any more
                on_disconnect(self.peer)

        threading.Thread(target=receive_messages, name=f"verl-server-rank-{self.peer}", daemon=True).start()

    def send(self, message: Json) -> bool:
        """Send one message. Returns False if the connection is closed; the receiving thread notices that as well."""
        return self.send_encoded(encode_message(message))

    def send_encoded(self, encoded: bytes) -> bool:
        """`send` for the result of `encode_message`, which several channels can send.

        The kernel takes the message at once, or a thread sends what does not fit into the buffers of the connection.
        """
        try:
            with self._lock:
                if self._is_closed:
                    return False
                unsent = memoryview(encoded)
                if self._sending_thread is None:
                    with contextlib.suppress(BlockingIOError):
                        unsent = unsent[self._socket.send(unsent, socket.MSG_DONTWAIT) :]
                if unsent:
                    self._unsent.append(unsent)
                    self._start_sending_thread()
        except (OSError, RuntimeError):  # RuntimeError: no further thread can be started
            self._disconnect()
            return False
        except BaseException:  # KeyboardInterrupt: the other rank could not find the end of half a message
            self._disconnect()
            raise
        return True

    def _start_sending_thread(self) -> None:
        """Start the thread that sends `_unsent`, if it does not run. The caller holds the lock."""
        if self._sending_thread is None:
            thread = threading.Thread(target=self._send_rest, name=f"verl-server-rank-{self.peer}-send", daemon=True)
            self._progressed_at = time.monotonic()
            thread.start()
            self._sending_thread = thread
            _sending.add(self)

    def _send_rest(self) -> None:
        """Send `_unsent`, until it is empty or the connection is closed."""
        while True:
            with self._lock:
                if self._is_closed:
                    self._unsent.clear()
                if not self._unsent:
                    self._sending_thread = None
                    return
                unsent = self._unsent[0]
            num_sent = len(unsent)
            try:
                num_sent = self._socket.send(unsent[:PIECE_BYTES])
            except OSError:
                self._disconnect()
            self._progressed_at = time.monotonic()
            with self._lock:
                if num_sent == len(unsent):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = unsent[num_sent:]

    def wait_until_sent(self, started: float) -> None:
        """Wait until the kernel has taken all messages or the connection is closed, or `STALL_S` without progress.

        `started`: time of `time.monotonic` at which the wait began. This process itself may have stood still before.
        """
        with self._lock:
            thread = self._sending_thread
        while thread is not None and thread.is_alive():
            remaining_s = max(self._progressed_at, started) + STALL_S - time.monotonic()
            if remaining_s <= 0.0:
                return
            thread.join(remaining_s)

    def close(self) -> None:
        """Close the connection. Messages that the kernel has not taken yet are lost."""
        self._disconnect()
        self._socket.close()

    def _disconnect(self) -> None:
        """End the connection in both directions, which ends its threads."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def wait_until_all_sent(channels: Iterable[Channel]) -> None:
    """Wait until the kernel has taken the messages of all `channels`, except those that stall for `STALL_S` seconds."""
    started = time.monotonic()
    for channel in channels:
        channel.wait_until_sent(started)


_sending: weakref.WeakSet[Channel] = weakref.WeakSet()
"""The channels of this process whose sending thread has been started. Their messages are sent before it ends."""
atexit.register(lambda: wait_until_all_sent(list(_sending)))
os.register_at_fork(after_in_child=_sending.clear)  # the parent's threads send, and may have held locks at the fork


def encode_message(message: Json) -> bytes:
    """The frame of a message, with its length in front."""
    return _with_length(orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY))


def _with_length(frame: bytes) -> bytes:
    return _HEADER.pack(len(frame)) + frame


def send_frame(connection: socket.socket, frame: bytes) -> None:
    """Send one frame with its length in front."""
    connection.sendall(_with_length(frame))


def receive_frame(connection: socket.socket) -> bytes | None:
    """Receive one frame of a rank that knows the key. Returns None when the connection was closed."""
    header = _receive_exactly(connection, _HEADER.size)
    return None if header is None else _receive_exactly(connection, _HEADER.unpack(header)[0])


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = connection.recv(min(size - len(data), RECEIVE_BYTES))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _proof(key: bytes, challenge: bytes, rank: int) -> bytes:
    return hmac.digest(key, challenge + rank.to_bytes(8, "big"), "sha256")


class Handshake:
    """A new connection on rank 0 until it has proved that it knows the key. Never waits."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self.connection, self._key = connection, key
        self.deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        self._received = b""
        self._challenge = secrets.token_bytes(CHALLENGE_BYTES)
        connection.setblocking(False)
        connection.send(_with_length(self._challenge))  # a new connection has room for it

    def receive(self) -> int | None:
        """Read what has arrived. Returns the rank, or None while the answer is not complete.

        Raises OSError if the connection was closed or does not know the key.
        """
        size = _HEADER.size + ANSWER_BYTES
        chunk = self.connection.recv(size - len(self._received))
        self._received += chunk
        if chunk and len(self._received) < size:
            return None
        answer = self._received[_HEADER.size :]
        rank = int.from_bytes(answer[:8], "big")
        if self._received[: _HEADER.size] == _HEADER.pack(ANSWER_BYTES) and hmac.compare_digest(
            answer[8:], _proof(self._key, self._challenge, rank)
        ):
            return rank
        raise ConnectionError("the connection does not know the key")


def connect_to_rank_0(address: tuple[str, int], key: bytes, rank: int, timeout_s: float) -> Channel:
    """Connect `rank` to rank 0 at `address` and authenticate with `key`. Raises OSError if that fails.

    A connection that ends before rank 0 has accepted it is replaced by another one, for `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return Channel(_shake_hands(address, key, rank, deadline - time.monotonic()), peer=0)
        except OSError:
            if time.monotonic() + RECONNECT_S > deadline:
                raise
        time.sleep(RECONNECT_S)


def _shake_hands(address: tuple[str, int], key: bytes, rank: int, timeout_s: float) -> socket.socket:
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(address, timeout=timeout_s))
        challenge = _receive_exactly(connection, _HEADER.size + CHALLENGE_BYTES)
        if challenge is not None:
            send_frame(connection, rank.to_bytes(8, "big") + _proof(key, challenge[_HEADER.size :], rank))
            if _receive_exactly(connection, len(ACCEPTED)) is not None:
                stack.pop_all()
                return connection
    raise ConnectionError("rank 0 closed the connection before it accepted this rank")


# -- Rendezvous -------------------------------------------------------------------------------------
# Connection of the trainer ranks of one engine: rank 0 listens, and the other ranks connect with a key.


def connect_ranks(
    rank: int,
    size: int,
    broadcast_from_rank_0: Callable[[Any], Any],
    multiple_machines: bool | None,
    timeout_s: float,
) -> dict[int, Channel]:
    """Connect the ranks in a star. Returns the channels of this rank by peer.

    Rank 0 has a channel to every other rank. The other ranks have one channel, to rank 0. `broadcast_from_rank_0(x)`
    returns rank 0's `x` on every rank. With `multiple_machines`, rank 0 listens on an address that other machines can
    reach; with None (not known), it does so if it has such an address. Rank 0's value counts. Raises PeerError with the
    ranks that did not connect within `timeout_s` seconds, or that cannot reach rank 0, and, on all ranks, BadInputError
    when rank 0 does not know an address that other machines can reach.
    """
    if size == 1:
        return {}
    if rank == 0:
        try:
            host = _address_for_ranks(multiple_machines)
        except BadInputError as error:
            broadcast_from_rank_0(to_wire(error))
            raise
        key = secrets.token_bytes(32)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=size + MAX_HANDSHAKES) as listener:
            broadcast_from_rank_0([host, listener.getsockname()[1], key.hex()])
            return _accept_all(listener, key, size, timeout_s)
    address = broadcast_from_rank_0(None)
    if isinstance(address, dict):
        raise from_wire(address)
    host, port, key_hex = address
    try:
        channel = connect_to_rank_0((host, port), bytes.fromhex(key_hex), rank, timeout_s)
    except OSError as error:
        raise PeerError(f"rank {rank} cannot reach rank 0 at {host}:{port}: {error}", ranks=[0]) from error
    return {0: channel}


def _accept_all(listener: socket.socket, key: bytes, size: int, timeout_s: float) -> dict[int, Channel]:
    """Accept the connections of all other ranks. Handshakes go side by side, so that no connection delays another."""
    accepted: dict[int, socket.socket] = {}
    handshakes: dict[socket.socket, Handshake] = {}
    deadline = time.monotonic() + timeout_s
    listener.setblocking(False)
    try:
        while len(accepted) < size - 1 and time.monotonic() < deadline:
            ready = _readable([listener, *handshakes], min(deadline - time.monotonic(), 1.0))
            for connection in ready:
                if connection is listener:
                    with contextlib.suppress(OSError):  # the new connection is gone already
                        new = listener.accept()[0]
                        handshakes[new] = Handshake(new, key)
                    continue
                try:
                    rank = handshakes[connection].receive()
                except OSError:
                    handshakes.pop(connection).connection.close()
                    continue
                if rank is not None:
                    del handshakes[connection]
                    if not 0 < rank < size:
                        connection.close()
                        continue
                    if rank in accepted:  # the rank has lost this connection before it was told
                        accepted.pop(rank).close()
                    with contextlib.suppress(OSError):
                        connection.send(ACCEPTED)  # the buffer of a new connection has room
                    accepted[rank] = connection
            late = [one for one, handshake in handshakes.items() if time.monotonic() > handshake.deadline]
            for connection in late or list(handshakes)[:-MAX_HANDSHAKES]:
                handshakes.pop(connection).connection.close()
    finally:
        for connection in (*handshakes, *(accepted.values() if len(accepted) < size - 1 else ())):
            connection.close()
    if missing := sorted(set(range(1, size)) - accepted.keys()):
        raise PeerError(f"rank(s) {missing} did not connect to rank 0 within {timeout_s:g} s", ranks=missing)
    return {rank: Channel(connection, rank) for rank, connection in accepted.items()}


def _readable(sockets: list[socket.socket], timeout_s: float) -> list[socket.socket]:
    """The sockets that have something to read, after `timeout_s` seconds at most."""
    by_number = {one.fileno(): one for one in sockets}
    poll = select.poll()
    for number in by_number:
        poll.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poll.poll(1000.0 * max(timeout_s, 0.0))]


def _address_for_ranks(multiple_machines: bool | None) -> str:
    """The address on which rank 0 listens."""
    if multiple_machines is False:
        return "127.0.0.1"
    try:
        return reachable_address()
    except BadInputError:
        if multiple_machines:
            raise
        return "127.0.0.1"
