"""Servers on other machines: the arena is broadcast into a mirror on each machine (see `group`).

Loading follows the broadcast chunk by chunk. Reports come back through the group's store.
"""

from __future__ import annotations

import bisect
import json
import os
import threading
import time
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Self

from verl_server.errors import VerlServerError
from verl_server.types import Member, TensorSpec
from verl_server.weights.layout import nbytes
from verl_server.weights.reports import Received, Report
from verl_server.weights.transports import base, group
from verl_server.weights.transports.base import Json, Settings, Update
from verl_server.weights.transports.shared_memory import tensors_in

if TYPE_CHECKING:
    import torch


class Sender(base.Sender):
    name = "distributed"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._store: Any = None
        self._group: Any = None
        self._members: Sequence[Member] = ()
        self._group_name = ""
        self._table_key = ""
        self._sent = 0

    @property
    def sent_bytes(self) -> int:
        return self._sent

    def prepare(self, update: Update) -> None:
        if self._store is None:
            self._store = group.open_store(self.settings.host, self.settings.timeout_s)
        if update.members != self._members:
            self._leave()
            self._members = update.members
        if self._group is None:
            self._group_name = uuid.uuid4().hex
            self._table_key = ""
        table = self.layout.table(update.names)
        key = f"{self._group_name}/table/{zlib.crc32(table)}"
        if key != self._table_key:
            self._store.set(key, table)
            self._table_key = key

    def wire(self, update: Update, server: int) -> Json:
        return {
            "store": [self._store.host, self._store.port],
            "group": self._group_name,
            "table": self._table_key,
            "first": self.first_receiver(update, server),
            "receivers": len(list(self.receivers(update))),
            "size": self.layout.size,
            "timeout_s": self.settings.timeout_s,
        }

    def deliver(self, update: Update, loading: Callable[[], bool]) -> None:
        self._sent = 0
        try:
            if self._group is None:
                receivers = len(list(self.receivers(update)))
                members = group.wait_for_members(self._store, self._group_name, receivers, loading)
                self._group = self._form(members)
            self._send(update, loading)
        except (RuntimeError, VerlServerError) as error:
            self._leave()  # so that no receiver waits on
            self._store.set(group.cancel_key(self._group_name), "")
            if isinstance(error, VerlServerError):
                raise
            raise VerlServerError(f"the broadcast of the weights failed: {error}") from error

    def _form(self, members: group.Members) -> Any:
        return group.form(self._store, self._group_name, 0, members.size, self.settings.host)

    def _leave(self) -> None:
        """Closes the group's connections."""
        self._group = None

    def _send(self, update: Update, loading: Callable[[], bool]) -> None:
        memory = self.arena.memory
        for start, stop in group.chunks(spans(self.layout.table(update.names))):
            self._broadcast(memory[start:stop])

    def _broadcast(self, memory: memoryview) -> None:
        group.broadcast(self._group, memory, self.settings.timeout_s)
        self._sent += len(memory)

    def received(self, update: Update, receiver: int) -> Received | None:
        key = f"{self._group_name}/report/{update.id}/{receiver}"
        if not self._store.check([key]):
            return None
        raw = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return Received(Report(**raw["report"]), raw["sums"])

    def settle(self, update: Update, whole: bool) -> None:
        if not whole:
            self._leave()  # a member may have gone: the next update finds new ones

    def close(self) -> None:
        self._leave()
        self._store = None


def spans(table: bytes) -> list[tuple[int, int]]:
    """Byte ranges of a table's tensors."""
    rows = json.loads(table)
    return [(offset, offset + nbytes(TensorSpec(tuple(shape), dtype))) for _, offset, shape, dtype in rows]


class Membership(ABC):
    """One receiver among those that one trainer sends to, kept between updates: one of each kind at a time."""

    _kept: ClassVar[dict[type[Membership], Membership]] = {}

    @classmethod
    def take(cls, wire: Json, rank: int) -> Self:
        """The one in this wire's group: that of the last update, or a new one instead of it."""
        kept = cls._kept.get(cls)
        if not isinstance(kept, cls) or kept.name != wire["group"]:
            cls.give_up()
            cls._kept[cls] = kept = cls(wire, rank)
        return kept

    @classmethod
    def give_up(cls) -> None:
        """Leave the group, if this process is in one."""
        if (kept := cls._kept.pop(cls, None)) is not None:
            kept.leave()

    def __init__(self, wire: Json, rank: int) -> None:
        self.name, self.index = wire["group"], wire["first"] + rank
        self.host, port = wire["store"]
        self.store = group.join_store(self.host, port)
        self._table: tuple[str, bytes] = ("", b"")

    def meet(self, receivers: int) -> group.Members:
        """Say that this one is here, and wait for the others."""
        self.store.set(group.here_key(self.name, self.index), group.machine_id())
        return group.wait_for_members(self.store, self.name, receivers, alive=lambda: not self.is_cancelled())

    def is_cancelled(self) -> bool:
        return bool(self.store.check([group.cancel_key(self.name)]))

    def table(self, key: str) -> bytes:
        if self._table[0] != key:
            self._table = (key, self.store.get(key))
        return self._table[1]

    def report(self, update_id: str, report: Report, sums: list[int]) -> None:
        key = f"{self.name}/report/{update_id}/{self.index}"
        group.to_store(self.store, key, {"report": asdict(report), "sums": sums})

    @abstractmethod
    def leave(self) -> None:
        """Give back what it holds."""


class Seat(Membership):
    """One receiver's place in a group, kept between updates."""

    def __init__(self, wire: Json, rank: int) -> None:
        super().__init__(wire, rank)
        members = self.meet(wire["receivers"])
        number, leader = members.rank_of(self.index), members.leader_of(self.index)
        key = f"{self.name}/mirror/{leader}"
        self.group: Any = None
        if number is None:
            self.mirror = group.Mirror.open(group.from_store(self.store, key), wire["size"])
        else:
            self.mirror = group.Mirror.create(wire["size"])
            try:
                group.to_store(self.store, key, self.mirror.path)
                self.group = group.form(self.store, self.name, number, members.size, group.own_address(self.host))
            except BaseException:
                self.mirror.close()  # as large as the model
                raise
        self.base = ""
        """The update whose tensors the mirror holds, whole."""

    def leader_lives(self) -> bool:
        return os.path.exists(self.mirror.path)  # a zombie has no open files

    def leave(self) -> None:
        self.group = None
        self.mirror.close()


class Receiver(base.Receiver):
    def __init__(self, wire: Json, rank: int) -> None:
        super().__init__(wire, rank)
        self._seat = Seat.take(wire, rank)
        self._failure: BaseException | None = None
        self._table = self._seat.table(wire["table"])
        self._chunks = group.chunks(spans(self._table))
        self._thread: threading.Thread | None = None
        if self._seat.group is not None:
            self._thread = threading.Thread(target=self._lead, name="verl-server-broadcast", daemon=True)
            self._thread.start()

    def _lead(self) -> None:
        """Receive for all of this machine."""
        try:
            self._receive()
        except BaseException as error:  # noqa: BLE001 - raised where the tensors are waited for
            self._failure = error
            self._seat.mirror.advance(self.wire["update_id"], group.Mirror.FAILED)

    def _receive(self) -> None:
        for done, (start, stop) in enumerate(self._chunks, 1):
            group.broadcast(self._seat.group, self._seat.mirror.view[start:stop], self.wire["timeout_s"])
            self._seat.mirror.advance(self.wire["update_id"], done)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        starts = [start for start, _ in self._chunks]
        rows = json.loads(self._table)
        stops = [stop for _, stop in spans(self._table)]
        for stop, (name, tensor) in zip(stops, tensors_in(self._seat.mirror.view, rows), strict=True):
            self._wait_for(bisect.bisect_left(starts, stop))
            yield name, tensor

    def _wait_for(self, wanted: int) -> None:
        """Until that many chunks are there."""
        deadline = time.monotonic() + self.wire["timeout_s"]
        while (done := self._seat.mirror.progress(self.wire["update_id"])) < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"chunk {wanted} of {len(self._chunks)} did not come; {done} did")
            if not self._seat.leader_lives():
                raise ConnectionError("the process that receives for this machine has died")
            time.sleep(group.POLL_S)
        if done == group.Mirror.FAILED:
            raise ConnectionError(f"the broadcast failed: {self._failure or 'see the log of the leading rank'}")

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._seat.mirror.holds(tensor)

    def report(self, report: Report, sums: list[int]) -> None:
        self._seat.report(self.wire["update_id"], report, sums)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()  # ends: every broadcast has a deadline
