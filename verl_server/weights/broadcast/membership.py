"""Membership of one receiver in a broadcast group, kept from one update to the next."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, Self

from verl_server.ranks.bounded_store import ANSWER_TIMEOUT_S
from verl_server.ranks.machine import machine_id
from verl_server.types import Json
from verl_server.weights.broadcast.placement import ReceiverPlacement, wait_for_receivers
from verl_server.weights.broadcast.store import (
    FORMING_TIMEOUT_S,
    arrival_key,
    cancel_key,
    connect_to_store,
    report_key,
    set_json,
)
from verl_server.weights.device.streams import accelerator, as_current
from verl_server.weights.reports import Report


def report_before_joining(message: Json, tp_rank: int, refusal: str | None) -> None:
    """Reach the trainer's store and report whether this receiver can join the group. `refusal`: why it cannot.

    The group is formed at the first load, in which the trainer takes part.
    """
    report = Report(message["update_id"], ok=refusal is None, error=refusal)
    key = report_key(message["group_name"], report.update_id, message["first_receiver"] + tp_rank)
    set_json(connect_to_store(*message["store_address"]), key, {"report": asdict(report), "checksums": []})


class Membership(ABC):
    """One receiver's membership in the group of one trainer. A process has at most one membership of each subclass.

    `message` is the loader's message, `tp_rank` the TP rank of the server.
    """

    _current: ClassVar[dict[type[Membership], Membership]] = {}

    @classmethod
    def current_or_new(cls, message: Json, tp_rank: int) -> Self:
        """The membership in the group that `message` names: that of the last update, or a new one that replaces it."""
        current = cls._current.get(cls)
        if not isinstance(current, cls) or current.group_name != message["group_name"]:
            cls.leave_current()
            cls._current[cls] = current = cls(message, tp_rank)
        return current

    @classmethod
    def leave_current(cls) -> None:
        """Leave the group of this process's membership, if there is one."""
        if (current := cls._current.pop(cls, None)) is not None:
            current.leave()

    def __init__(self, message: Json, tp_rank: int) -> None:
        self.group_name: str = message["group_name"]
        self.receiver: int = message["first_receiver"] + tp_rank
        """Number of this receiver among the TP ranks of all servers."""
        self._address: tuple[str, int] = message["store_address"]
        self.trainer_host = self._address[0]
        self.store = connect_to_store(*self._address)
        self._table_key = ""
        self._table = b""

    def announce_and_wait(self, num_receivers: int) -> ReceiverPlacement:
        """Announce this receiver, and wait until all receivers have announced themselves."""
        self.store.set(arrival_key(self.group_name, self.receiver), machine_id())
        return wait_for_receivers(self.store, self.group_name, num_receivers, is_wanted=lambda: not self.is_cancelled())

    def form(self, form_group: Callable[[Any], Any]) -> Any:
        """The process group that `form_group(store)` forms. Raises ConnectionError if the trainer does not form it."""
        device = accelerator()

        def form(store: Any) -> Any:  # in the thread of the store
            with as_current(device):
                return form_group(store)

        forming = connect_to_store(*self._address)  # a connection that waits for a key answers nothing else
        return forming.call(form, FORMING_TIMEOUT_S + ANSWER_TIMEOUT_S, self.is_cancelled)

    def is_cancelled(self) -> bool:
        """Whether the trainer has abandoned the group."""
        return bool(self.store.check([cancel_key(self.group_name)]))

    def table(self, key: str) -> bytes:
        """The update's table of tensors, which is in the store under `key`. The last table is cached."""
        if self._table_key != key:
            self._table_key, self._table = key, self.store.get(key)
        return self._table

    def rows(self, key: str) -> list[Any]:
        """The rows of a table: name, byte offset, shape and dtype of each tensor."""
        rows: list[Any] = json.loads(self.table(key))
        return rows

    def send_report(self, update_id: str, report: Report, checksums: list[int]) -> None:
        """Send the trainer this receiver's report on an update."""
        key = report_key(self.group_name, update_id, self.receiver)
        set_json(self.store, key, {"report": asdict(report), "checksums": checksums})

    @abstractmethod
    def leave(self) -> None:
        """Leave the group and release the memory of this membership."""
