"""How the ranks of one engine find each other: rank 0 listens, the others join with a key."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from verl_server.errors import PeerError
from verl_server.ranks.channel import Channel, admit, join


def connect(rank: int, size: int, share: Callable[[Any], Any], reachable: bool, ranks_s: float) -> dict[int, Channel]:
    """The channels of this rank: on rank 0 one to every other, elsewhere one to rank 0.

    Raises PeerError naming the ranks that did not come within `ranks_s` seconds, or that could not.
    """
    if size == 1:
        return {}
    if rank == 0:
        host = _own_address() if reachable else "127.0.0.1"
        key = secrets.token_bytes(32)
        with socket.create_server((host, 0), backlog=size) as listener:
            share([host, listener.getsockname()[1], key.hex()])
            return _admit_all(listener, key, size, ranks_s)
    host, port, key_hex = share(None)
    try:
        channel = join((host, port), bytes.fromhex(key_hex), rank, ranks_s)
    except OSError as error:
        raise PeerError(f"rank {rank} cannot reach rank 0 at {host}:{port}: {error}", ranks=[0]) from error
    return {0: channel}


def _admit_all(listener: socket.socket, key: bytes, size: int, ranks_s: float) -> dict[int, Channel]:
    channels: dict[int, Channel] = {}
    deadline = time.monotonic() + ranks_s
    while len(channels) < size - 1:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = sorted(set(range(1, size)) - channels.keys())
            for channel in channels.values():
                channel.close()
            raise PeerError(
                f"rank(s) {missing} did not connect to rank 0 within {ranks_s:g} s", ranks=missing
            ) from None
        rank = admit(connection, key)
        if rank is None or rank in channels or not 0 < rank < size:
            connection.close()
        else:
            channels[rank] = Channel(connection, rank)
    return channels


def _own_address() -> str:
    """The address of this machine on the way to the trainer's rendezvous host (no packet is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
