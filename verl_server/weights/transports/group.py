"""The trainer and one receiver on each of the servers' machines, as a group that broadcasts.

However many TP ranks and servers a machine has, the bytes travel to it once: the first of them (its leader)
receives into a mirror of the trainer's arena, and all others on the machine map that mirror. Who is where is
found through a key-value store that the trainer serves; the group is made once and used for every update.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import ipaddress
import json
import mmap
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from verl_server.errors import DeadlineError, ServerError
from verl_server.weights.layout import PAGE

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroupGloo

CHUNK_BYTES = 32 << 20
POLL_S = 0.0005
#: How long the members may take to find each other.
FORMING_S = 60.0
#: A trainer that has just called this server answers at once, unless it died. The server stands still meanwhile.
TRAINER_ANSWERS_S = 10.0


def machine_id() -> str:
    """Equal for processes that can open each other's files in /proc: one boot, one pid namespace, one user."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}:{os.getuid()}"


def own_address(peer: str) -> str:
    """This machine's address on the way to `peer`; a datagram socket is connected, nothing is sent."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def open_store(host: str, timeout_s: float) -> Any:
    """On the trainer: a store that listens on `host` alone."""
    import torch.distributed as dist

    numeric = socket.getaddrinfo(host, None)[0][4][0]
    family = socket.AF_INET6 if ipaddress.ip_address(numeric).version == 6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((numeric, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        str(numeric),
        port,
        is_master=True,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def join_store(host: str, port: int) -> Any:
    """On a server: the trainer's store. Raises within `TRAINER_ANSWERS_S` when the trainer has gone."""
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=TRAINER_ANSWERS_S)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
    store.set_timeout(datetime.timedelta(seconds=FORMING_S))
    return store


def form(store: Any, name: str, rank: int, size: int, address: str) -> ProcessGroupGloo:
    """A gloo group apart from torch's default one, so that it disturbs nobody's."""
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = datetime.timedelta(seconds=FORMING_S)
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)  # type: ignore[attr-defined]


def form_on(kind: str, store: Any, name: str, rank: int, size: int, address: str) -> Any:
    """A group for tensors on that kind of device: NCCL between GPUs, gloo between hosts."""
    if kind == "cpu":
        return form(store, name, rank, size, address)
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(days=1)  # the deadlines are ours: NCCL's own end the process
    with _nobody_dies_with_a_peer():
        formed = dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)  # type: ignore[attr-defined]
    _connect(formed)
    return formed


def _connect(formed: Any) -> None:
    """Let a group of NCCL connect now: by itself it does so at its first broadcast, without any deadline."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    failures: list[BaseException] = []

    def connect() -> None:
        try:
            with torch.cuda.device(device):
                formed.eager_connect_single_device(device)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failures.append(error)

    thread = threading.Thread(target=connect, name="verl-server-nccl", daemon=True)
    thread.start()
    thread.join(FORMING_S)
    if thread.is_alive() or failures:
        formed.abort()
        raise (
            failures[0]
            if failures
            else DeadlineError(
                f"NCCL did not connect its members within {FORMING_S:g} s", operation="broadcast", seconds=FORMING_S
            )
        )


@contextlib.contextmanager
def _nobody_dies_with_a_peer() -> Iterator[None]:
    """A group of NCCL that is made in the body does not end this process when another member dies."""
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


def wait_for_work(work: Any, deadline: float, alive: Callable[[], bool]) -> None:
    """Until a collective is done, also on the device. Raises what went wrong with it."""
    import torch

    while not work.is_completed():
        if not alive():
            raise ServerError("the other end of the broadcast has given up")
        if time.monotonic() > deadline:
            raise DeadlineError("a broadcast was not done in time", operation="broadcast")
        time.sleep(POLL_S)
    work.wait(datetime.timedelta(seconds=10.0))  # it is done: raises what went wrong
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def broadcast(group: ProcessGroupGloo, memory: memoryview, timeout_s: float) -> None:
    """The bytes of rank 0 into everybody's `memory`. Raises RuntimeError when a member dies or the time is over."""
    import torch
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.timeout = datetime.timedelta(seconds=timeout_s)
    group.broadcast([torch.frombuffer(memory, dtype=torch.uint8)], options).wait()  # type: ignore[attr-defined]


def chunks(spans: Sequence[tuple[int, int]], limit: int = CHUNK_BYTES, gap: int = 64) -> list[tuple[int, int]]:
    """Byte ranges of at most `limit` that cover the `spans` (sorted), neighbours closer than `gap` together."""
    merged: list[list[int]] = []
    for start, stop in spans:
        if merged and start - merged[-1][1] < gap:
            merged[-1][1] = stop
        else:
            merged.append([start, stop])
    return [(at, min(at + limit, stop)) for start, stop in merged for at in range(start, stop, limit)]


def parcels(spans: Sequence[tuple[int, int]], limit: int, gap: int = 64) -> list[tuple[int, int, int]]:
    """The `spans` (sorted) in ranges of at most `limit` bytes that cut none: `(start, stop, how many spans)`.

    Neighbours closer than `gap` share a range. A span above the limit has one of its own.
    """
    found: list[tuple[int, int, int]] = []
    for start, stop in spans:
        if found and start - found[-1][1] < gap and stop - found[-1][0] <= limit:
            found[-1] = (found[-1][0], stop, found[-1][2] + 1)
        else:
            found.append((start, stop, 1))
    return found


class Members:
    """Who the receivers are and on which machine each runs. All of them compute the same from the store."""

    def __init__(self, machines: Sequence[str]) -> None:
        self._machines = machines
        self._hosts = list(dict.fromkeys(machines))

    @property
    def receivers(self) -> int:
        """All of them, on all machines."""
        return len(self._machines)

    @property
    def size(self) -> int:
        """Members of the group: the trainer and one leader for each machine."""
        return 1 + len(self._hosts)

    def rank_of(self, receiver: int) -> int | None:
        """The group rank of a receiver, or None if it follows another one."""
        machine = self._machines[receiver]
        return 1 + self._hosts.index(machine) if self._machines.index(machine) == receiver else None

    def leader_of(self, receiver: int) -> int:
        """The receiver whose mirror this one maps."""
        return self._machines.index(self._machines[receiver])


def here_key(name: str, receiver: int) -> str:
    return f"{name}/here/{receiver}"


def cancel_key(name: str) -> str:
    """Set when the trainer gives this group up."""
    return f"{name}/cancelled"


def wait_for_members(
    store: Any, name: str, receivers: int, alive: Callable[[], bool], limit_s: float = FORMING_S
) -> Members:
    """Wait until every receiver has said where it is. Raises DeadlineError, or ServerError when `alive` is false."""
    keys = [here_key(name, receiver) for receiver in range(receivers)]
    deadline = time.monotonic() + limit_s
    while not store.check(keys):
        if not alive():
            raise ServerError("the update was given up before all servers were ready to receive")
        if time.monotonic() > deadline:
            missing = [receiver for receiver, key in enumerate(keys) if not store.check([key])]
            raise DeadlineError(
                f"receivers {missing} of {receivers} did not come to the broadcast within {limit_s:g} s",
                operation="broadcast",
                seconds=limit_s,
            )
        time.sleep(POLL_S)
    return Members([store.get(key).decode() for key in keys])


class Mirror:
    """A copy of the trainer's arena on a server's machine, and how far it has come."""

    def __init__(self, fd: int, size: int, path: str) -> None:
        self._fd, self.path = fd, path
        try:
            self.memory = mmap.mmap(fd, size + PAGE)
        except (OSError, ValueError):
            os.close(fd)
            raise
        self.view = memoryview(self.memory)[:size]
        self._progress = memoryview(self.memory)[size : size + 8].cast("Q")

    @classmethod
    def create(cls, size: int) -> Mirror:
        fd = os.memfd_create("verl_server_mirror", os.MFD_CLOEXEC)
        os.ftruncate(fd, size + PAGE)
        return cls(fd, size, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str, size: int) -> Mirror:
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), size, path)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lives in this memory."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        return bool(start <= tensor.data_ptr() < start + len(self.memory))

    FAILED = 0xFFFFFFFF

    def advance(self, update_id: str, done: int) -> None:
        """`done` chunks of this update are there. One word, written at once: readers never see half of it."""
        self._progress[0] = zlib.crc32(update_id.encode()) << 32 | done

    def progress(self, update_id: str) -> int:
        """Chunks of this update that are there."""
        word = self._progress[0]
        return word & 0xFFFFFFFF if word >> 32 == zlib.crc32(update_id.encode()) else 0

    def close(self) -> None:
        self._progress.release()
        with contextlib.suppress(BufferError):
            self.view.release()
            self.memory.close()
        os.close(self._fd)


def to_store(store: Any, key: str, value: Any) -> None:
    store.set(key, json.dumps(value))


def from_store(store: Any, key: str) -> Any:
    return json.loads(store.get(key))
