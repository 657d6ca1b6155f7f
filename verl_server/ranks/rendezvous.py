"""Connection of the trainer ranks of one engine: rank 0 listens, and the other ranks connect with a key."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from verl_server.errors import BadInputError, PeerError, from_wire, to_wire
from verl_server.ranks.channel import ACCEPTED, MAX_HANDSHAKES, Channel, Handshake, connect_to_rank_0
from verl_server.ranks.machine import reachable_address


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
