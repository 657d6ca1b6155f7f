"""The key-value store (torch's TCPStore) through which the trainer and the receivers of a broadcast find each other."""

from __future__ import annotations

import datetime
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

FORMING_TIMEOUT_S = 60.0
"""Seconds that the members of a broadcast group have to find each other."""
TRAINER_ANSWER_TIMEOUT_S = 10.0
"""Seconds that a server waits for the trainer's store. A trainer that is alive answers at once, because it has just
called this server. The server's scheduler serves nothing in the meantime."""
CANCEL_INTERVAL_S = 0.5
"""Seconds between two looks at whether the trainer has abandoned what a server waits for."""


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


def within(timeout_s: float, call: Callable[[], Any], is_cancelled: Callable[[], bool] = lambda: False) -> Any:
    """The result of a call that waits for the trainer.

    Raises ConnectionError if the trainer does not answer in time, or soon after `is_cancelled()` becomes true.

    Torch's own deadlines are those of the store's server: a client waits for ever for a machine that has vanished. The
    call then stays in its thread.
    """
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
            outcome.set_exception(error)

    threading.Thread(target=run, name="verl-server-store", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while wait([outcome], min(CANCEL_INTERVAL_S, max(0.0, deadline - time.monotonic()))).not_done:
        if time.monotonic() >= deadline:
            raise ConnectionError(f"the trainer's machine did not answer within {timeout_s:g} s")
        if is_cancelled():
            raise ConnectionError("the trainer has abandoned the update")
    return outcome.result()


class TrainerStore:
    """The trainer's store as a server uses it: every operation has a deadline."""

    def __init__(self, torch_store: Any) -> None:
        self.torch_store = torch_store
        """Torch's own store, for process groups."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return bool(within(TRAINER_ANSWER_TIMEOUT_S, lambda: self.torch_store.check(keys)))

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        within(TRAINER_ANSWER_TIMEOUT_S, lambda: self.torch_store.set(key, value))

    def get(self, key: str) -> bytes:
        """The value of a key. Waits for the key for `FORMING_TIMEOUT_S`."""
        found: bytes = within(FORMING_TIMEOUT_S + TRAINER_ANSWER_TIMEOUT_S, lambda: self.torch_store.get(key))
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are set."""
        found: list[bytes] = within(TRAINER_ANSWER_TIMEOUT_S, lambda: self.torch_store.multi_get(keys))
        return found


def connect_to_store(host: str, port: int) -> TrainerStore:
    """Connect a server's TP rank to the trainer's store.

    Raises within `TRAINER_ANSWER_TIMEOUT_S` if the trainer is gone.
    """
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=TRAINER_ANSWER_TIMEOUT_S)
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    store.set_timeout(datetime.timedelta(seconds=FORMING_TIMEOUT_S))
    return TrainerStore(store)


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
