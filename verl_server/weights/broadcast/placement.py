"""Placement of the receivers of a broadcast on machines. One receiver of each machine is its leader."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from verl_server.errors import DeadlineError, ServerError
from verl_server.weights.broadcast.store import FORMING_TIMEOUT_S, arrival_key

POLL_INTERVAL_S = 0.0005
MAX_POLL_INTERVAL_S = 0.05
"""Upper limit of the poll interval while the receivers arrive. Each poll of a receiver asks for all keys, in the one
thread of the store."""


class ReceiverPlacement:
    """The machine of each receiver. All receivers and the trainer compute the same placement from the store.

    `machine_ids`: the id of each receiver's machine, by the receiver's number.
    """

    def __init__(self, machine_ids: Sequence[str]) -> None:
        self._machine_ids = machine_ids
        self._machines = list(dict.fromkeys(machine_ids))

    @property
    def num_receivers(self) -> int:
        """Number of receivers on all machines."""
        return len(self._machine_ids)

    @property
    def group_size(self) -> int:
        """Number of members of the group: the trainer and one leader for each machine."""
        return 1 + len(self._machines)

    def group_rank_of(self, receiver: int) -> int | None:
        """The rank of a receiver in the group. None for a receiver that is not the leader of its machine."""
        machine = self._machine_ids[receiver]
        return 1 + self._machines.index(machine) if self._machine_ids.index(machine) == receiver else None

    def leader_of(self, receiver: int) -> int:
        """The receiver whose mirror this receiver maps."""
        return self._machine_ids.index(self._machine_ids[receiver])


def wait_for_receivers(
    store: Any,
    group_name: str,
    num_receivers: int,
    is_wanted: Callable[[], bool],
    timeout_s: float = FORMING_TIMEOUT_S,
) -> ReceiverPlacement:
    """Wait until every receiver has set its arrival key.

    Raises DeadlineError with the receivers that are missing, or ServerError when `is_wanted()` becomes false.
    """
    keys = [arrival_key(group_name, receiver) for receiver in range(num_receivers)]
    deadline = time.monotonic() + timeout_s
    interval_s = POLL_INTERVAL_S
    while not store.check(keys):
        if not is_wanted():
            raise ServerError("the update was abandoned before all servers were ready to receive it")
        if time.monotonic() > deadline:
            missing = [receiver for receiver, key in enumerate(keys) if not store.check([key])]
            raise DeadlineError(
                f"receivers {missing} of {num_receivers} did not join the broadcast within {timeout_s:g} s",
                operation="broadcast",
                seconds=timeout_s,
            )
        time.sleep(interval_s)
        interval_s = min(2 * interval_s, MAX_POLL_INTERVAL_S)
    return ReceiverPlacement([machine_id.decode() for machine_id in store.multi_get(keys)])
