"""The key-value store (torch's TCPStore) through which the trainer and the receivers of a broadcast find each other."""

from __future__ import annotations

import datetime
import ipaddress
import json
import socket
from typing import Any

from verl_server.ranks.bounded_store import ANSWER_TIMEOUT_S, BoundedStore

FORMING_TIMEOUT_S = 60.0
"""Seconds that the members of a broadcast group have to find each other."""


def open_store(host: str, timeout_s: float) -> Any:
    """Open the store on the trainer. It listens on `host` only."""
    import torch.distributed as dist

    numeric_host = socket.getaddrinfo(host, None)[0][4][0]
    family = socket.AF_INET6 if ipaddress.ip_address(numeric_host).version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((numeric_host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        str(numeric_host),
        port,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def connect_to_store(host: str, port: int) -> BoundedStore:
    """Connect a server's TP rank to the trainer's store.

    Raises within `ANSWER_TIMEOUT_S` if the trainer is gone: the server's scheduler serves nothing in the meantime.
    """
    import torch.distributed as dist

    def connect() -> Any:
        timeout = datetime.timedelta(seconds=ANSWER_TIMEOUT_S)
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        store.set_timeout(datetime.timedelta(seconds=FORMING_TIMEOUT_S))
        return store

    return BoundedStore(connect)


def set_json(store: Any, key: str, value: Any) -> None:
    """Store a JSON value."""
    store.set(key, json.dumps(value))


def get_json(store: Any, key: str) -> Any:
    """Read a JSON value. Waits for the key until the store's timeout."""
    return json.loads(store.get(key))


def arrival_key(group_name: str, receiver: int) -> str:
    """The key that a receiver sets to the id of its machine when it is ready to join a group."""
    return f"{group_name}/arrived/{receiver}"


def cancel_key(group_name: str) -> str:
    """The key that the trainer sets when it abandons a group."""
    return f"{group_name}/cancelled"


def mirror_key(group_name: str, leader: int) -> str:
    """The key that a machine's leading receiver sets to the path of its mirror."""
    return f"{group_name}/mirror/{leader}"


def report_key(group_name: str, update_id: str, receiver: int) -> str:
    """The key that a receiver sets to its report on an update."""
    return f"{group_name}/report/{update_id}/{receiver}"
