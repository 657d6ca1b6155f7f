"""Transport for servers on other machines: the arena is broadcast into a mirror on each machine.

The group has two kinds of members: the trainer, and one receiver of each machine (its leader). However many servers and
TP ranks a machine has, the bytes are sent to it once. The leader receives them into a mirror of the arena, and the
other TP ranks of the machine map that mirror. The group is formed once and used for every update.

The mirror is filled while the servers serve (`Sender.stages`): a thread of each TP rank forms the group, receives or
waits for the leader, and reports. The model is loaded when the mirrors of all machines are complete, so the pause does
not depend on the network. Reports come back through the store. `delta` broadcasts in another way, and
`distributed_buckets`, which has no mirror, broadcasts while the servers load, with the parts of this file.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import logging
import os
import socket
import threading
import time
import traceback
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import asdict, replace
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from verl_server.errors import DeadlineError, ServerError, VerlServerError
from verl_server.platforms.limits import available_memory
from verl_server.ranks.bounded_store import ANSWER_TIMEOUT_S, BoundedStore
from verl_server.ranks.placement import machine_id, own_address
from verl_server.threads import start_call
from verl_server.types import Json, ServerInfo
from verl_server.weights.arena import (
    PAGE_BYTES,
    XXH3,
    ReceivedReport,
    Report,
    SharedMemoryFile,
    SharedWords,
    byte_ranges_of,
    compute_checksum,
    error_text,
    memory_contains,
    tensor_views,
)
from verl_server.weights.device import accelerator, as_current
from verl_server.weights.transports import base
from verl_server.weights.transports.base import SenderSettings, UpdateAttempt

logger = logging.getLogger(__name__)

# -- Byte ranges ------------------------------------------------------------------------------------
# Division of the arena's tensors into the byte ranges that one broadcast sends. Pure functions.

CHUNK_BYTES = 32 << 20
"""Maximum size of one chunk."""
MAX_GAP_BYTES = 64
"""Neighbouring tensors that are closer than this share a range; the bytes in between are sent too."""


def split_into_chunks(
    tensor_ranges: Sequence[tuple[int, int]], max_bytes: int = CHUNK_BYTES, max_gap_bytes: int = MAX_GAP_BYTES
) -> list[tuple[int, int]]:
    """Ranges `(start, stop)` of at most `max_bytes` that cover all `tensor_ranges`, which are sorted.

    A chunk may end in the middle of a tensor.
    """
    merged: list[list[int]] = []
    for start, stop in tensor_ranges:
        if merged and start - merged[-1][1] < max_gap_bytes:
            merged[-1][1] = max(merged[-1][1], stop)  # an empty tensor may begin where the last one does
        else:
            merged.append([start, stop])
    return [
        (offset, min(offset + max_bytes, stop)) for start, stop in merged for offset in range(start, stop, max_bytes)
    ]


def group_whole_tensors(
    tensor_ranges: Sequence[tuple[int, int]], max_bytes: int, max_gap_bytes: int = MAX_GAP_BYTES
) -> list[tuple[int, int, int]]:
    """Ranges `(start, stop, number of tensors)` of at most `max_bytes` that contain whole tensors only.

    `tensor_ranges` are sorted. A tensor larger than `max_bytes` has a range of its own.
    """
    groups: list[tuple[int, int, int]] = []
    for start, stop in tensor_ranges:
        if groups and start - groups[-1][1] < max_gap_bytes and stop - groups[-1][0] <= max_bytes:
            groups[-1] = (groups[-1][0], max(groups[-1][1], stop), groups[-1][2] + 1)
        else:
            groups.append((start, stop, 1))
    return groups


# -- Mirror -----------------------------------------------------------------------------------------
# The mirror: a copy of the trainer's arena on a server's machine, which all TP ranks of that machine map.


class Mirror:
    """One process's mapping of a mirror and of its progress. The machine's leading receiver creates the mirror."""

    COMPLETE, FAILED = 0xFFFFFFFE, 0xFFFFFFFF
    """Progress of an update that is in the mirror, and of one that failed."""

    def __init__(self, file: SharedMemoryFile, size_bytes: int) -> None:
        self._file, self.location = file, file.location
        self.view = memoryview(file.memory)[:size_bytes]
        """All bytes of the copy, at the same offsets as in the arena."""
        self._progress = SharedWords(file.memory, size_bytes, 1)

    @classmethod
    def create(cls, size_bytes: int) -> Mirror:
        """Create a mirror of an arena of that size.

        Raises VerlServerError if that memory is not available (the kernel would kill the server while the weights
        arrive), and the errors of `SharedMemoryFile.create`.
        """
        if size_bytes > (available := available_memory()):
            raise VerlServerError(
                f"the mirror of the weights takes {size_bytes} bytes of memory, but only {available} bytes are "
                "available on the server's machine or in its container; free memory, raise the limit of the container, "
                "or use WeightsConfig(transport='distributed_buckets')"
            )
        return cls(SharedMemoryFile.create("mirror", size_bytes + PAGE_BYTES), size_bytes)

    @classmethod
    def open(cls, location: str, size_bytes: int) -> Mirror:
        """Map the mirror of another process on this machine. Raises OSError if this process cannot open it."""
        return cls(SharedMemoryFile.open(location, size_bytes + PAGE_BYTES), size_bytes)

    def exists(self) -> bool:
        """Whether the process that created the mirror is alive. A zombie has no open files, so it counts as dead."""
        return self._file.exists()

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this memory."""
        return memory_contains(self._file.memory, tensor)

    def set_progress(self, update_id: str, progress: int) -> None:
        """Record how many chunks of an update have arrived, that it is `COMPLETE`, or that it has `FAILED`."""
        self._progress[0] = zlib.crc32(update_id.encode()) << 32 | progress

    def progress(self, update_id: str) -> int:
        """`COMPLETE`, `FAILED`, or the number of chunks that have arrived."""
        word = self._progress[0]
        return word & 0xFFFFFFFF if word >> 32 == zlib.crc32(update_id.encode()) else 0

    def close(self) -> None:
        """Close the mapping and the file."""
        self._progress.release()
        with contextlib.suppress(BufferError):
            self.view.release()
        self._file.close()


# -- Store ------------------------------------------------------------------------------------------
# The key-value store (torch's TCPStore) through which the trainer and the receivers of a broadcast find each other.

FORMING_TIMEOUT_S = 60.0
"""Seconds that the members of a broadcast group have to find each other."""
LATER_S = 15.0
"""Seconds by which receivers wait longer than the trainer, which knows who is missing."""
CONSEQUENCES = ("ConnectionError", "DeadlineError", "RuntimeError", "ServerError", "TimeoutError")
"""Exceptions of a receiver that another member of the group may have caused."""


def open_store(host: str, timeout_s: float) -> Any:
    """Open the store on the trainer. It listens on `host` only."""
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

    def connect() -> Any:
        timeout = datetime.timedelta(seconds=ANSWER_TIMEOUT_S)
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        store.set_timeout(datetime.timedelta(seconds=FORMING_TIMEOUT_S))
        return store

    return BoundedStore(connect)


def arrival_key(group_name: str, receiver: int) -> str:
    """The key that a receiver sets to the id of its machine when it is ready to join a group."""
    return f"{group_name}/arrived/{receiver}"


def cancel_key(group_name: str) -> str:
    """The key that the trainer sets when it abandons a group."""
    return f"{group_name}/cancelled"


def mirror_key(group_name: str, leader: int) -> str:
    """The key that a machine's leading receiver sets to the path of its mirror."""
    return f"{group_name}/mirror/{leader}"


def failure_key(group_name: str, update_id: str) -> str:
    """The key that a receiver sets when it cannot stage an update."""
    return f"{group_name}/failed/{update_id}"


def staged_id(update_id: str) -> str:
    """The update id of the report that a receiver has staged an update."""
    return f"{update_id}/staged"


def report_key(group_name: str, update_id: str, receiver: int) -> str:
    """The key that a receiver sets to its report on an update."""
    return f"{group_name}/report/{update_id}/{receiver}"


# -- Placement --------------------------------------------------------------------------------------
# Placement of the receivers of a broadcast on machines. One receiver of each machine is its leader.

POLL_INTERVAL_S = 0.0005
STAGED_POLL_INTERVAL_S = 0.005
"""Poll interval while the servers serve: each poll takes time from them."""
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
                receivers=missing,
            )
        time.sleep(interval_s)
        interval_s = min(2 * interval_s, MAX_POLL_INTERVAL_S)
    return ReceiverPlacement([machine_id.decode() for machine_id in store.multi_get(keys)])


# -- Membership -------------------------------------------------------------------------------------
# Membership of one receiver in a broadcast group, kept from one update to the next.


def report_before_joining(message: Json, tp_rank: int, refusal: str | None) -> None:
    """Reach the trainer's store and report whether this receiver can join the group. `refusal`: why it cannot.

    The group is formed at the first load, in which the trainer takes part.
    """
    report = Report(message["update_id"], ok=refusal is None, error=refusal)
    key = report_key(message["group_name"], report.update_id, message["first_receiver"] + tp_rank)
    connect_to_store(*message["store_address"]).set(key, json.dumps({"report": asdict(report), "checksums": []}))


class Membership(ABC):
    """One receiver's membership in the group of one trainer. A process has at most one membership of each subclass.

    `message` is the loader's message, `tp_rank` the TP rank of the server.
    """

    _current: ClassVar[dict[type[Membership], Membership]] = {}

    @classmethod
    def current_or_new(cls, message: Json, tp_rank: int) -> Self:
        """The membership in the group that `message` names: that of the last update, or a new one that replaces it."""
        current = cls.of_group(message["group_name"])
        if current is None:
            cls.leave_current()
            cls._current[cls] = current = cls(message, tp_rank)
        return current

    @classmethod
    def of_group(cls, group_name: str) -> Self | None:
        """The membership in this group, if there is one."""
        current = cls._current.get(cls)
        return current if isinstance(current, cls) and current.group_name == group_name else None

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
        return wait_for_receivers(
            self.store,
            self.group_name,
            num_receivers,
            is_wanted=lambda: not self.is_cancelled(),
            timeout_s=FORMING_TIMEOUT_S + LATER_S,
        )

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

    def send_report(self, report: Report, checksums: list[int]) -> None:
        """Send the trainer this receiver's report on an update."""
        key = report_key(self.group_name, report.update_id, self.receiver)
        self.store.set(key, json.dumps({"report": asdict(report), "checksums": checksums}))

    @abstractmethod
    def leave(self) -> None:
        """Leave the group and release the memory of this membership."""


# -- Process group ----------------------------------------------------------------------------------


def form_group(device_type: str, store: Any, name: str, rank: int, size: int, address: str) -> Any:
    """Form a group for tensors on `device_type`: NCCL for "cuda", gloo for "cpu".

    It is not registered with torch, so it does not affect any other group of the process.
    """
    if device_type == "cpu":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = datetime.timedelta(seconds=FORMING_TIMEOUT_S)
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)  # type: ignore[attr-defined]
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(days=1)  # this library has its own deadlines: NCCL's would end the process
    with _without_nccl_error_handling():
        group = dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)  # type: ignore[attr-defined]
    _connect_nccl(group)
    return group


def _connect_nccl(group: Any) -> None:
    """Connect the members of an NCCL group now. By default they connect at the first broadcast, without a deadline."""
    device = torch.device("cuda", torch.cuda.current_device())

    def connect() -> None:
        with torch.cuda.device(device):
            group.eager_connect_single_device(device)

    connecting = start_call(connect, "verl-server-nccl")
    failure: BaseException | None = DeadlineError(
        f"NCCL did not connect the members of the group within {FORMING_TIMEOUT_S:g} s",
        operation="broadcast",
        seconds=FORMING_TIMEOUT_S,
    )
    if wait([connecting], FORMING_TIMEOUT_S).done:
        failure = connecting.exception()
    if failure is not None:
        group.abort()
        raise failure


@contextlib.contextmanager
def _without_nccl_error_handling() -> Iterator[None]:
    """An NCCL group that is created in the body does not end this process when another member dies."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def broadcast_memory(group: ProcessGroupGloo, memory: memoryview, timeout_s: float) -> None:
    """Broadcast the bytes of rank 0's `memory` into that of the other members, and wait until that is done.

    Raises RuntimeError when a member dies or the time is over.
    """
    start_broadcast(group, torch.frombuffer(memory, dtype=torch.uint8), timeout_s).wait()


def start_broadcast(group: Any, tensor: torch.Tensor, timeout_s: float) -> Any:
    """Start a broadcast of rank 0's tensor. Returns torch's work handle."""
    options = dist.BroadcastOptions()
    options.timeout = datetime.timedelta(seconds=timeout_s)
    return group.broadcast([tensor], options)


def wait_for_work(work: Any, deadline: float, timeout_s: float, is_wanted: Callable[[], bool]) -> None:
    """Wait until a collective operation is finished, also on the device.

    `deadline` is a time of `time.monotonic`, `timeout_s` the number of seconds from the start of the update to it.
    Raises the error of the operation, DeadlineError, or ServerError when `is_wanted()` becomes false.
    """
    while not work.is_completed():
        if not is_wanted():
            raise ServerError("the other end of the broadcast has abandoned the update")
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the broadcast of the weights was not finished within {timeout_s:g} s: "
                "raise Timeouts(weights_s=...) if the network is slow",
                operation="broadcast",
                seconds=timeout_s,
            )
        time.sleep(POLL_INTERVAL_S)
    work.wait(datetime.timedelta(seconds=10.0))  # the operation is finished: this raises its error, if there is one
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


# -- Transport --------------------------------------------------------------------------------------


class Sender(base.Sender):
    """Broadcasts the arena to the leading receiver of each machine.

    A transport that broadcasts in another way overrides `connect_group`, `leave_group` or `send`.
    """

    name = "distributed"
    stages = True

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
            "first_receiver": attempt.first_receivers[member_index],
            "num_receivers": attempt.num_receivers,
            "size_bytes": self.layout.size_bytes,
            "timeout_s": self.settings.timeout_s,
        }

    def deliver(self, attempt: UpdateAttempt, checksums: Sequence[int], is_wanted: Callable[[], bool]) -> None:
        """Broadcast the bytes. With `stages`, returns when all TP ranks have reported that they can be loaded."""

        def has_failed() -> bool:
            return bool(self.store.check([failure_key(self.group_name, attempt.id)]))

        self.sent_bytes = 0
        try:
            self._send_to_group(attempt, lambda: is_wanted() and not (self.stages and has_failed()))
            if self.stages:
                self._wait_until_staged(attempt, lambda: is_wanted() and not has_failed())
        except RuntimeError as error:
            failure = VerlServerError(f"the broadcast of the weights failed: {error}")
            raise (self._reported_error(attempt, failure) or failure) from error
        except VerlServerError as error:
            if (reported := self._reported_error(attempt, error)) is None:
                raise
            raise reported from error
        if self.stages and attempt.verify:
            self._verify_staged(attempt, checksums)

    def _send_to_group(self, attempt: UpdateAttempt, is_wanted: Callable[[], bool]) -> None:
        if self.group is None:
            try:
                placement = wait_for_receivers(self.store, self.group_name, attempt.num_receivers, is_wanted)
            except DeadlineError as error:
                ranks = list(self.receiving_ranks(attempt))
                error.details["servers"] = sorted({ranks[number].server for number in error.details["receivers"]})
                raise
            self.group = self.connect_group(placement)
        self.send(attempt, is_wanted)

    def _wait_until_staged(self, attempt: UpdateAttempt, is_wanted: Callable[[], bool]) -> None:
        """Wait for the report of each TP rank. Raises VerlServerError."""
        ranks = list(self.receiving_ranks(attempt))
        keys = [report_key(self.group_name, staged_id(attempt.id), rank.receiver) for rank in ranks]
        deadline = time.monotonic() + self.settings.timeout_s
        while not self.store.check(keys):
            if not is_wanted():
                raise VerlServerError("a server has ended, or could not stage the weights")
            if time.monotonic() > deadline:
                missing = [rank for rank, key in zip(ranks, keys, strict=True) if not self.store.check([key])]
                raise DeadlineError(
                    f"{missing[0].label} did not stage the weights within {self.settings.timeout_s:g} s",
                    operation="broadcast",
                    seconds=self.settings.timeout_s,
                    servers=sorted({rank.server for rank in missing}),
                )
            time.sleep(STAGED_POLL_INTERVAL_S)

    def _reported_error(self, attempt: UpdateAttempt, error: VerlServerError) -> VerlServerError | None:
        """The error that a TP rank has reported while it staged the weights, and of which `error` is a consequence.

        None if there is none. Then the servers that have not reported are named in `error`, if others have failed.
        """
        if not self.stages:
            return None
        ranks, staged = list(self.receiving_ranks(attempt)), replace(attempt, id=staged_id(attempt.id))
        reports = {rank: received.report for rank in ranks if (received := self.read_report(staged, rank.receiver))}
        failed = {rank: str(report.error) for rank, report in reports.items() if not report.ok}
        causes = [rank for rank, reason in failed.items() if not reason.startswith(CONSEQUENCES)]
        if causes:
            servers = sorted({rank.server for rank in causes})
            message = f"{causes[0].label} could not stage the weights: {failed[causes[0]]}"
            return VerlServerError(message, servers=servers)
        silent = sorted({rank.server for rank in ranks if rank not in reports})
        if failed and silent and not error.details.get("servers"):  # the others have waited for these
            error.details["servers"] = silent
        return None

    def _verify_staged(self, attempt: UpdateAttempt, checksums: Sequence[int]) -> None:
        """Raise VerlServerError if a mirror differs from the arena. Its leader has reported the checksums."""
        for rank in self.receiving_ranks(attempt):
            received = self.read_report(replace(attempt, id=staged_id(attempt.id)), rank.receiver)
            if received is not None and received.checksums and received.checksums != list(checksums):
                pairs = zip(attempt.names, checksums, received.checksums, strict=True)
                names = [name for name, sent, arrived in pairs if sent != arrived]
                raise VerlServerError(
                    f"the machine of {rank.label} received {len(names)} tensors that differ from what was sent, "
                    f"{names[0]!r} first",
                    servers=[rank.server],
                )

    def abandon(self, error: BaseException) -> None:
        self.leave_group()
        traceback.clear_frames(error.__traceback__)  # those of a broadcast keep the connections of the group
        self.store.set(cancel_key(self.group_name), "")

    def connect_group(self, placement: ReceiverPlacement) -> Any:
        """Form the process group of the trainer and its receivers. Raises RuntimeError or VerlServerError."""
        return form_group("cpu", self.store, self.group_name, 0, placement.group_size, self.settings.host)

    def leave_group(self) -> None:
        """Close the connections of the group."""
        self.group = None

    def send(self, attempt: UpdateAttempt, is_wanted: Callable[[], bool]) -> None:
        """Broadcast the update's bytes. Raises RuntimeError or VerlServerError."""
        memory = self.arena.memory
        for start, stop in split_into_chunks(byte_ranges_of(self.layout.table(attempt.names))):
            if not is_wanted():
                raise VerlServerError("a server has ended, or could not stage the weights")
            self.broadcast(memory[start:stop])

    def broadcast(self, memory: memoryview) -> None:
        """Broadcast one part of the bytes, and wait until the broadcast is finished."""
        broadcast_memory(self.group, memory, self.settings.timeout_s)
        self.sent_bytes += len(memory)

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
            self.mirror = Mirror.open(self.store.get(location_key).decode(), message["size_bytes"])
        else:
            self.mirror = Mirror.create(message["size_bytes"])
            try:
                self.store.set(location_key, self.mirror.location)
                address = own_address(self.trainer_host)
                self.group = self.form(
                    lambda store: form_group("cpu", store, self.group_name, group_rank, placement.group_size, address)
                )
            except BaseException:
                self.mirror.close()  # it is as large as the model
                raise
        self.base_update_id = ""
        """Id of the update whose tensors the mirror holds completely. Empty while the mirror may be inconsistent."""

    def leave(self) -> None:
        self.group = None
        self.mirror.close()


def _wait_for_end(thread: threading.Thread | None) -> None:
    if thread is not None:
        thread.join(FORMING_TIMEOUT_S)
        if thread.is_alive():
            raise TimeoutError("an earlier update still uses the mirror of the weights")


class Receiver(base.Receiver):
    """Reads the tensors from the mirror on this machine, which is complete. See `open_only`."""

    _staging: ClassVar[Receiver | None] = None
    """The update that this TP rank has staged last, or is staging now."""

    def __init__(self, message: Json, tp_rank: int) -> None:
        super().__init__(message, tp_rank)
        self._thread: threading.Thread | None = None
        """The thread that stages this update. None for the object that loads it."""
        self.member: MirrorMember
        self.rows: list[Any] = []
        staging = Receiver._staging
        if staging is not None and staging.message["update_id"] == message["update_id"]:
            self.member, self.rows = staging.member, staging.rows

    @classmethod
    def open_only(cls, message: Json, tp_rank: int) -> None:
        """Stage the update in a thread, while the server serves."""
        earlier, staging = Receiver._staging, cls(message, tp_rank)
        if earlier is not None and earlier.message["group_name"] != message["group_name"]:
            earlier = None  # it has another mirror
        staging._thread = threading.Thread(
            target=staging._stage, args=(earlier and earlier._thread,), name="verl-server-stage", daemon=True
        )
        Receiver._staging = staging
        staging._thread.start()

    def _stage(self, earlier: threading.Thread | None) -> None:
        """Fill the mirror, or wait until the leader of the machine has filled it. Reports to the trainer.

        `earlier`: the thread of the last update into the same mirror. It has sent its report, so it ends now.
        """
        update_id = self.message["update_id"]
        try:
            _wait_for_end(earlier)
            self.member = MirrorMember.current_or_new(self.message, self.tp_rank)
            table = self.member.table(self.message["table_key"])
            self.rows, self.tensor_ranges = self.member.rows(self.message["table_key"]), byte_ranges_of(table)
            self.chunks = split_into_chunks(self.tensor_ranges)
            checksums = []
            if self.member.group is None:
                self._wait_for_mirror()
            else:
                self.receive()
                if self.message["verify"] and self.message["checksum"] == XXH3:
                    checksums = [compute_checksum(tensor) for _, tensor in self.tensors()]
                self.member.mirror.set_progress(update_id, Mirror.COMPLETE)
            self.member.send_report(Report(staged_id(update_id), ok=True), checksums)
        except Exception as error:
            logger.warning("an update could not be staged; the server keeps its weights", exc_info=True)
            self._report_failure(error)

    def _report_failure(self, error: Exception) -> None:
        """Tell the trainer, and the TP ranks that wait for this machine's mirror."""
        update_id, member = self.message["update_id"], MirrorMember.of_group(self.message["group_name"])
        if member is not None:
            if member.group is not None:
                member.mirror.set_progress(update_id, Mirror.FAILED)
            MirrorMember.leave_current()  # the trainer forms a new group
        report = Report(staged_id(update_id), ok=False, error=error_text(error))
        receiver = self.message["first_receiver"] + self.tp_rank
        with contextlib.suppress(ConnectionError, RuntimeError):  # the trainer has ended
            store = connect_to_store(*self.message["store_address"])
            key = report_key(self.message["group_name"], report.update_id, receiver)
            store.set(key, json.dumps({"report": asdict(report), "checksums": []}))
            store.set(failure_key(self.message["group_name"], update_id), "")

    def receive(self) -> None:
        """On the leader: receive the bytes of the update into the mirror."""
        for num_chunks, (start, stop) in enumerate(self.chunks, 1):
            broadcast_memory(self.member.group, self.member.mirror.view[start:stop], self.message["timeout_s"])
            self.member.mirror.set_progress(self.message["update_id"], num_chunks)

    def _wait_for_mirror(self) -> None:
        """Wait until the leader of this machine has filled the mirror."""
        deadline, last = time.monotonic() + self.message["timeout_s"], 0
        mirror, update_id = self.member.mirror, self.message["update_id"]
        while (progress := mirror.progress(update_id)) != Mirror.COMPLETE:
            if progress != last:  # the deadline is that of one chunk, as on the leader
                deadline, last = time.monotonic() + self.message["timeout_s"], progress
            if progress == Mirror.FAILED:
                raise ConnectionError("the broadcast failed: see the log of the leading TP rank of this machine")
            if self.member.is_cancelled():
                raise ConnectionError("the trainer has abandoned the update")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the weights did not arrive within {self.message['timeout_s']:g} s. Raise "
                    "Timeouts(weights_s=...) if the network is slow"
                )
            if not mirror.exists():
                raise ConnectionError("the process that receives the weights for this machine has died")
            time.sleep(STAGED_POLL_INTERVAL_S)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return tensor_views(self.member.mirror.view, self.rows)

    def contains(self, tensor: torch.Tensor) -> bool:
        return self.member.mirror.contains(tensor)

    def send_report(self, report: Report, checksums: list[int]) -> None:
        self.member.send_report(report, checksums)
