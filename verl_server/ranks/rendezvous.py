"""Connection of the trainer ranks of one engine: rank 0 listens, and the other ranks connect with a key."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from verl_server.errors import BadInputError, PeerError, from_wire, to_wire
from verl_server.ranks.channel import Channel, accept_rank, connect_to_rank_0
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
        with socket.create_server((host, 0), family=family, backlog=size) as listener:
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
    channels: dict[int, Channel] = {}
    deadline = time.monotonic() + timeout_s
    while len(channels) < size - 1:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = sorted(set(range(1, size)) - channels.keys())
            for channel in channels.values():
                channel.close()
            raise PeerError(
                f"rank(s) {missing} did not connect to rank 0 within {timeout_s:g} s", ranks=missing
            ) from None
        rank = accept_rank(connection, key)
        if rank is None or rank in channels or not 0 < rank < size:
            connection.close()
        else:
            channels[rank] = Channel(connection, rank)
    return channels


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
