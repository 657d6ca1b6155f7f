"""Transport for servers on other machines: the arena is broadcast into a mirror on each machine.

The group has two kinds of members: the trainer, and one receiver of each machine (its leader). However many servers and
TP ranks a machine has, the bytes are sent to it once. The leader receives them into a mirror of the arena, and the
other TP ranks of the machine map that mirror. The group is formed once and used for every update.

The model loads each tensor as soon as the chunks with its bytes have arrived. Reports come back through the store.
"""

from __future__ import annotations

import bisect
import json
import threading
import time
import traceback
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from verl_server.errors import VerlServerError
from verl_server.ranks.placement import own_address
from verl_server.types import Json, ServerInfo
from verl_server.weights.arena import ReceivedReport, Report, byte_ranges_of, tensor_views
from verl_server.weights.broadcast import (
    POLL_INTERVAL_S,
    Membership,
    Mirror,
    ReceiverPlacement,
    broadcast_memory,
    cancel_key,
    form_gloo_group,
    get_json,
    mirror_key,
    open_store,
    report_before_joining,
    report_key,
    set_json,
    split_into_chunks,
    wait_for_receivers,
)
from verl_server.weights.transports import base
from verl_server.weights.transports.base import SenderSettings, UpdateAttempt


class Sender(base.Sender):
    """Broadcasts the arena to the leading receiver of each machine.

    A transport that broadcasts in another way overrides `connect_group`, `leave_group` or `send`.
    """

    name = "distributed"

    def __init__(self, settings: SenderSettings) -> None:
        super().__init__(settings)
        self.store: Any = None
        """Torch's key-value store that the trainer and all receivers share. None before the first update."""
        self.group: Any = None
        """The process group of the broadcasts. None before it is formed, and after a failure."""
        self._group_members: Sequence[ServerInfo] = ()
        self.group_name = ""
        """Name of the group. It begins the group's keys in the store."""
        self._table_key = ""
        self.num_sent_bytes = 0
        """Number of bytes that the current update has broadcast."""

    @property
    def sent_bytes(self) -> int:
        return self.num_sent_bytes

    def prepare(self, attempt: UpdateAttempt) -> None:
        """Put the table into the store. Abandons the group if the members have changed since the last update."""
        if self.store is None:
            self.store = open_store(self.settings.host, self.settings.timeout_s)
        if attempt.members != self._group_members:
            self.leave_group()
            self._group_members = attempt.members
        if self.group is None:
            self.group_name = uuid.uuid4().hex
            self._table_key = ""
        table = self.layout.table(attempt.names)
        table_key = f"{self.group_name}/table/{zlib.crc32(table)}"
        if table_key != self._table_key:
            self.store.set(table_key, table)
            self._table_key = table_key

    def loader_message(self, attempt: UpdateAttempt, member_index: int) -> Json:
        return {
            "store_address": [self.store.host, self.store.port],
            "group_name": self.group_name,
            "table_key": self._table_key,
            "first_receiver": self.first_receiver(attempt, member_index),
            "num_receivers": attempt.num_receivers,
            "size_bytes": self.layout.size_bytes,
            "timeout_s": self.settings.timeout_s,
        }

    def deliver(self, attempt: UpdateAttempt, is_loading: Callable[[], bool]) -> None:
        self.num_sent_bytes = 0
        try:
            if self.group is None:
                placement = wait_for_receivers(self.store, self.group_name, attempt.num_receivers, is_loading)
                self.group = self.connect_group(placement)
            self.send(attempt, is_loading)
        except RuntimeError as error:
            raise VerlServerError(f"the broadcast of the weights failed: {error}") from error

    def abandon(self, error: BaseException) -> None:
        self.leave_group()
        traceback.clear_frames(error.__traceback__)  # those of a broadcast keep the connections of the group
        self.store.set(cancel_key(self.group_name), "")

    def connect_group(self, placement: ReceiverPlacement) -> Any:
        """Form the process group of the trainer and its receivers. Raises RuntimeError or VerlServerError."""
        return form_gloo_group(self.store, self.group_name, 0, placement.group_size, self.settings.host)

    def leave_group(self) -> None:
        """Close the connections of the group."""
        self.group = None

    def send(self, attempt: UpdateAttempt, is_loading: Callable[[], bool]) -> None:
        """Broadcast the update's bytes. Raises RuntimeError or VerlServerError."""
        memory = self.arena.memory
        for start, stop in split_into_chunks(byte_ranges_of(self.layout.table(attempt.names))):
            self.broadcast(memory[start:stop])

    def broadcast(self, memory: memoryview) -> None:
        """Broadcast one part of the bytes, and wait until the broadcast is finished."""
        broadcast_memory(self.group, memory, self.settings.timeout_s)
        self.num_sent_bytes += len(memory)

    def read_report(self, attempt: UpdateAttempt, receiver: int) -> ReceivedReport | None:
        key = report_key(self.group_name, attempt.id, receiver)
        if not self.store.check([key]):
            return None
        raw = json.loads(self.store.get(key))
        self.store.delete_key(key)
        return ReceivedReport(Report.from_json(raw["report"]), raw["checksums"])

    def finish(self, attempt: UpdateAttempt, succeeded: bool) -> None:
        if not succeeded:
            self.leave_group()  # a member may be gone: the next update forms a new group

    def close(self) -> None:
        self.leave_group()
        self.store = None


class MirrorMember(Membership):
    """A receiver that reads its machine's mirror. The leader of the machine is a member of the group and fills it."""

    def __init__(self, message: Json, tp_rank: int) -> None:
        super().__init__(message, tp_rank)
        placement = self.announce_and_wait(message["num_receivers"])
        group_rank, leader = placement.group_rank_of(self.receiver), placement.leader_of(self.receiver)
        location_key = mirror_key(self.group_name, leader)
        self.group: Any = None
        """The process group, on the leader only."""
        if group_rank is None:
            self.mirror = Mirror.open(get_json(self.store, location_key), message["size_bytes"])
        else:
            self.mirror = Mirror.create(message["size_bytes"])
            try:
                set_json(self.store, location_key, self.mirror.location)
                address = own_address(self.trainer_host)
                self.group = self.form(
                    lambda store: form_gloo_group(store, self.group_name, group_rank, placement.group_size, address)
                )
            except BaseException:
                self.mirror.close()  # it is as large as the model
                raise
        self.base_update_id = ""
        """Id of the update whose tensors the mirror holds completely. Empty while the mirror may be inconsistent."""

    def leader_is_alive(self) -> bool:
        """Whether the leader's process is alive."""
        return self.mirror.exists()

    def leave(self) -> None:
        self.group = None
        self.mirror.close()


class Receiver(base.Receiver):
    """Reads the tensors from the mirror on this machine. On the leader, a thread fills the mirror."""

    def __init__(self, message: Json, tp_rank: int) -> None:
        super().__init__(message, tp_rank)
        self.member = MirrorMember.current_or_new(message, tp_rank)
        self._failure: BaseException | None = None
        self.rows = self.member.rows(message["table_key"])
        self.tensor_ranges = byte_ranges_of(self.member.table(message["table_key"]))
        self.chunks = split_into_chunks(self.tensor_ranges)
        self._thread: threading.Thread | None = None
        if self.member.group is not None:
            self._thread = threading.Thread(target=self._fill_mirror, name="verl-server-broadcast", daemon=True)
            self._thread.start()

    @classmethod
    def open_only(cls, message: Json, tp_rank: int) -> None:
        report_before_joining(message, tp_rank, None)

    def _fill_mirror(self) -> None:
        """On the leader: receive the weights for all TP ranks of this machine."""
        try:
            self.receive()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for the tensors
            self._failure = error
            self.member.mirror.set_progress(self.message["update_id"], Mirror.FAILED)

    def receive(self) -> None:
        """On the leader: receive the bytes of the update into the mirror. Called in a thread."""
        mirror = self.member.mirror
        for num_chunks, (start, stop) in enumerate(self.chunks, 1):
            broadcast_memory(self.member.group, mirror.view[start:stop], self.message["timeout_s"])
            mirror.set_progress(self.message["update_id"], num_chunks)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        chunk_starts = [start for start, _ in self.chunks]
        named_tensors = tensor_views(self.member.mirror.view, self.rows)
        for (_, stop), (name, tensor) in zip(self.tensor_ranges, named_tensors, strict=True):
            self._wait_for_chunks(bisect.bisect_left(chunk_starts, stop))
            yield name, tensor

    def _wait_for_chunks(self, num_needed: int) -> None:
        """Wait until that many chunks are in the mirror."""
        deadline = time.monotonic() + self.message["timeout_s"]
        while (num_chunks := self.member.mirror.progress(self.message["update_id"])) < num_needed:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"chunk {num_needed} of {len(self.chunks)} did not arrive within {self.message['timeout_s']:g} s; "
                    f"{num_chunks} chunks arrived. Raise Timeouts(weights_s=...) if the network is slow"
                )
            if not self.member.leader_is_alive():
                raise ConnectionError("the process that receives the weights for this machine has died")
            time.sleep(POLL_INTERVAL_S)
        if num_chunks == Mirror.FAILED:
            raise ConnectionError(f"the broadcast failed: {self._failure or 'see the log of the leading TP rank'}")

    def contains(self, tensor: torch.Tensor) -> bool:
        return self.member.mirror.contains(tensor)

    def send_report(self, report: Report, checksums: list[int]) -> None:
        self.member.send_report(self.message["update_id"], report, checksums)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()  # it ends, because every broadcast has a deadline
