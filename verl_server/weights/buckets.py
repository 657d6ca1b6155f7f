"""A pair of buckets: staging memory for weights that is smaller than the model.

A pair is two buckets and a block of host memory with the progress counters, the tables of the buckets, and the
reports. The buckets follow that block (`HostBucketMemory`) or are on a GPU (`DeviceBucketMemory`). The writers are
trainer ranks. Each writes its own part of every tensor, all in the same order, so all compute the same offsets. The
readers are TP ranks of servers, and the leading trainer rank, which computes checksums.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import mmap
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from verl_server.errors import BadInputError, DeadlineError, UnsupportedError, VerlServerError
from verl_server.types import Json, TensorSpec
from verl_server.weights.arena import (
    ALIGNMENT,
    CHECKSUM_BYTES,
    LARGEST_OFFSET,
    MAX_TP_RANKS,
    PAGE_BYTES,
    REPORT_BYTES,
    WORD_BYTES,
    SharedMemoryFile,
    SharedReports,
    SharedWords,
    memory_contains,
    round_up,
    tensor_bytes,
    tensor_view,
)
from verl_server.weights.device import PinnedMemory

# -- Layout -----------------------------------------------------------------------------------------
# Layout of the memory of a pair of buckets. Pure: equal arguments give equal layouts in all processes.

NUM_BUCKETS = 2
"""Number of buckets in a pair."""
DEFAULT_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class BucketsLayout:
    """Byte offsets of everything in the memory of a pair of buckets."""

    num_tensors: int
    """Number of tensors of the model."""
    table_bytes: int
    """Size of the table of one bucket."""
    bucket_bytes: int
    """Size of one bucket."""
    in_host_memory: bool
    """Whether the buckets are in the same memory. Otherwise they are on a GPU."""

    progress_offset = REPORT_BYTES * MAX_TP_RANKS
    failure_offset = progress_offset + PAGE_BYTES
    checksums_offset = failure_offset + PAGE_BYTES

    @property
    def tables_offset(self) -> int:
        return round_up(self.checksums_offset + MAX_TP_RANKS * self.num_tensors * CHECKSUM_BYTES, PAGE_BYTES)

    @property
    def buckets_offset(self) -> int:
        return round_up(self.tables_offset + NUM_BUCKETS * self.table_bytes, PAGE_BYTES)

    @property
    def size_bytes(self) -> int:
        """Size of the host memory."""
        return self.buckets_offset + (NUM_BUCKETS * self.bucket_bytes if self.in_host_memory else 0)


def plan_buckets(tensors: Mapping[str, TensorSpec], max_bytes: int | None, in_host_memory: bool) -> BucketsLayout:
    """The layout for the tensors of a model.

    `max_bytes`: maximum size of both buckets together. None: `DEFAULT_BUCKET_BYTES` each. A bucket is never larger than
    half of the model, and never smaller than the largest tensor. Raises BadInputError if the largest tensor does not
    fit.
    """
    largest = round_up(max(1, *(tensor_bytes(spec) for spec in tensors.values())), PAGE_BYTES)
    if max_bytes is None:
        bucket_bytes = max(DEFAULT_BUCKET_BYTES, largest)
    else:
        bucket_bytes = max_bytes // NUM_BUCKETS // PAGE_BYTES * PAGE_BYTES
    if bucket_bytes < largest:
        raise BadInputError(
            f"max_staging_bytes={max_bytes} is too little: the model's largest tensor has {largest} bytes, and "
            f"{NUM_BUCKETS} buckets of that size must fit; set it to {NUM_BUCKETS * largest} or more"
        )
    largest_table = [[name, LARGEST_OFFSET, spec.shape, spec.dtype] for name, spec in tensors.items()]
    table_bytes = round_up(len(json.dumps(largest_table)), PAGE_BYTES)
    model_bytes = sum(round_up(tensor_bytes(spec), ALIGNMENT) for spec in tensors.values())
    sufficient_bytes = max(largest, round_up(model_bytes // NUM_BUCKETS, PAGE_BYTES))
    return BucketsLayout(len(tensors), table_bytes, min(bucket_bytes, sufficient_bytes), in_host_memory)


# -- Bucket memory ----------------------------------------------------------------------------------


class BucketMemory(Protocol):
    """The memory of two buckets, on the host or on a GPU."""

    def view(self, bucket: int) -> Any:
        """An object for bucket 0 or 1 that lives as long as any tensor in the bucket's memory."""

    def as_tensor(self, view: Any) -> torch.Tensor:
        """The bucket of a view as a uint8 tensor, without a copy."""

    def synchronize(self) -> None:
        """Wait until all copies that were started are finished."""

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in this memory."""

    def pin(self) -> None:
        """Prepare the memory for asynchronous copies between a GPU and this memory, if it is host memory."""

    def description(self) -> Json:
        """What another process needs to open the memory, beside the memory file: nothing if it is host memory."""

    def close(self) -> None:
        """Release the memory, if this object owns it."""


class HostBucketMemory:
    """Two buckets in `memory`, which another object owns, from byte `start` on."""

    def __init__(self, memory: mmap.mmap, start: int, bucket_bytes: int) -> None:
        self._memory, self._start, self._bucket_bytes = memory, start, bucket_bytes
        self._pinned = PinnedMemory(memory)

    def view(self, bucket: int) -> memoryview:
        start = self._start + bucket * self._bucket_bytes
        return memoryview(self._memory)[start : start + self._bucket_bytes]

    def as_tensor(self, view: memoryview) -> torch.Tensor:
        return torch.frombuffer(view, dtype=torch.uint8)

    def synchronize(self) -> None:
        """Nothing to do: the writer and the readers wait for their own copies from and to a GPU."""

    def contains(self, tensor: torch.Tensor) -> bool:
        return memory_contains(self._memory, tensor)

    def pin(self) -> None:
        """Pin the memory, so that copies from and to a GPU of this process are asynchronous."""
        self._pinned.pin()

    def description(self) -> Json:
        return {}

    def close(self) -> None:
        """Unpin the memory. Its owner closes it."""
        self._pinned.unpin()


# -- Buckets in GPU memory --------------------------------------------------------------------------
# Another process of the same machine opens them by their CUDA IPC handle.
#
# The memory comes from `cudaMalloc` itself. torch's allocator hands out parts of larger blocks, its expandable segments
# have no IPC handle, and its own sharing keeps counters in /dev/shm that stay there when a process is killed.
# This section has not been run on a GPU yet.

HANDLE_BYTES = 64
"""CUDA_IPC_HANDLE_SIZE."""
ALLOCATION_BYTES = 2 << 20
"""Allocations are multiples of this size. Smaller ones share a block, which an IPC handle would open as a whole
(CUDA's guide on interprocess communication)."""


class _MemoryRange:
    """A range of device memory, described by `__cuda_array_interface__` (version 3)."""

    def __init__(self, pointer: int, size: int) -> None:
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "data": (pointer, False), "shape": (size,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip


class DeviceBucketMemory:
    """Two buckets on a GPU. `create` allocates the memory; `open` maps another process's memory.

    `device_index`: number of the GPU on which the memory is, as torch counts GPUs in this process.
    """

    def __init__(self, pointer: int, bucket_bytes: int, device_index: int, owned: bool) -> None:
        self._pointer, self._bucket_bytes, self._owned = pointer, bucket_bytes, owned
        self._device_index = device_index

    @classmethod
    def create(cls, bucket_bytes: int) -> DeviceBucketMemory:
        """Allocate two buckets on torch's current GPU.

        Raises UnsupportedError without a usable GPU, VerlServerError if its memory is full.
        """
        if not torch.cuda.is_available():
            raise UnsupportedError("the weight transport 'cuda_ipc' needs an NVIDIA GPU in the trainer and the server")
        index = torch.cuda.current_device()
        with _runtime_on(index) as runtime:
            pointer = _call(runtime.cudaMalloc, round_up(NUM_BUCKETS * bucket_bytes, ALLOCATION_BYTES))
        return cls(int(pointer), bucket_bytes, index, owned=True)

    @classmethod
    def open(cls, description: Json, bucket_bytes: int) -> DeviceBucketMemory:
        """Map the buckets that another process describes, on the GPU where they are.

        Raises UnsupportedError if this process does not see that GPU.
        """
        index = find_device(description["device_uuid"], visible_uuids())
        with _runtime_on(index) as runtime:
            ipc_handle = runtime.cudaIpcMemHandle_t()
            ctypes.memmove(ipc_handle.getPtr(), base64.b64decode(description["ipc_handle"]), HANDLE_BYTES)
            pointer = _call(runtime.cudaIpcOpenMemHandle, ipc_handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        return cls(int(pointer), bucket_bytes, index, owned=False)

    def description(self) -> Json:
        """The CUDA IPC handle, and the GPU by its UUID: it is the same in all processes, unlike the GPU's number."""
        with _runtime_on(self._device_index) as runtime:
            handle = _call(runtime.cudaIpcGetMemHandle, self._pointer)
        uuids = visible_uuids()
        return {
            "ipc_handle": base64.b64encode(ctypes.string_at(handle.getPtr(), HANDLE_BYTES)).decode(),
            "device_uuid": uuids[self._device_index],
            "num_visible": len(uuids),
        }

    def view(self, bucket: int) -> _MemoryRange:
        return _MemoryRange(self._pointer + bucket * self._bucket_bytes, self._bucket_bytes)

    def as_tensor(self, view: _MemoryRange) -> torch.Tensor:
        flat = torch.as_tensor(view, device=torch.device("cuda", self._device_index))
        if flat.data_ptr() != view.pointer:
            raise VerlServerError("torch copied the staging memory instead of mapping it")
        return flat

    def synchronize(self) -> None:
        """Wait for this GPU and for the current GPU: models load on streams of their own, also across GPUs."""
        for index in {self._device_index, torch.cuda.current_device()}:
            torch.cuda.synchronize(index)

    def contains(self, tensor: torch.Tensor) -> bool:
        end = self._pointer + NUM_BUCKETS * self._bucket_bytes
        return bool(tensor.is_cuda and self._pointer <= tensor.data_ptr() < end)

    def pin(self) -> None:
        """Nothing to do: the memory is on a GPU."""

    def close(self) -> None:
        pointer, self._pointer = self._pointer, 0
        if pointer:
            with (
                contextlib.suppress(VerlServerError),  # the driver may be gone at the end of a process
                _runtime_on(self._device_index) as runtime,
            ):
                _call(runtime.cudaFree if self._owned else runtime.cudaIpcCloseMemHandle, pointer)


def find_device(uuid: str, visible: Sequence[str]) -> int:
    """The number of the GPU with a UUID among the `visible` GPUs of this process. Raises UnsupportedError."""
    if uuid not in visible:
        raise UnsupportedError(
            f"the weights are staged on the GPU {uuid}, which this server does not see (it sees {list(visible)}): add "
            "the trainer's GPUs to the CUDA_VISIBLE_DEVICES of the server, or use the transport 'shared_memory'"
        )
    return list(visible).index(uuid)


def require_own_gpus(descriptions: Sequence[Json]) -> None:
    """Raise BadInputError if two ranks that see several GPUs have their buckets on the same GPU."""
    ranks: dict[str, int] = {}
    for rank, description in enumerate(descriptions):
        first = ranks.setdefault(description["device_uuid"], rank)
        if first != rank and description["num_visible"] > 1:
            raise BadInputError(
                f"trainer ranks {first} and {rank} have the same current GPU ({description['device_uuid']}), although "
                f"rank {rank} sees {description['num_visible']} GPUs. The transport 'cuda_ipc' stages the weights on "
                "the current GPU of each rank: call torch.cuda.set_device(local_rank) before VerlEngine"
            )


def visible_uuids() -> list[str]:
    """UUIDs of the GPUs that this process sees, by number."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


@contextlib.contextmanager
def _runtime_on(device_index: int) -> Iterator[Any]:
    """NVIDIA's bindings of the CUDA runtime, with a GPU as the current device of this thread in the body.

    Raises UnsupportedError if the bindings are not installed.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise UnsupportedError(f"the weight transport 'cuda_ipc' needs the package cuda-bindings: {error}") from error
    with torch.cuda.device(device_index):
        _call(runtime.cudaSetDevice, device_index)
        yield runtime


def _call(function: Any, *arguments: Any) -> Any:
    """Call a function of the CUDA runtime and return its result.

    Raises VerlServerError with CUDA's name of the error.
    """
    status, *results = function(*arguments)
    if int(status) != 0:
        raise VerlServerError(f"{function.__name__} failed: {status.name}")
    return results[0] if results else None


# -- Progress ---------------------------------------------------------------------------------------
# Progress counters of an update through a pair of buckets, in memory that all its processes share.
#
# Each counter is written by one process only. A counter is one word, which carries the number of the update, so
# counters of earlier updates read as zero.
#
#     bucket n         filled when every reader has emptied bucket n - 2; read when every writer has filled it
#     bucket total     the number of buckets, known when the leading writer has finished
#     failure          the message of a process that failed; all other processes then stop waiting

MAX_WRITERS = 256
"""Maximum number of trainer ranks that write one pair of buckets."""
CHECKSUM_READER = MAX_TP_RANKS
"""Index of the reader that computes checksums on the trainer. The other readers are TP ranks of servers."""

_TOTAL, _FAILED, _FILLED, _EMPTIED = 0, 1, 2, 2 + MAX_WRITERS
"""Index of the first word of each kind of counter."""
_FINISHED = 0xFFFFFFFF
"""Count of a writer that has filled all of its buckets."""


class ProgressCounters:
    """The counters of the update with number `update_number`."""

    def __init__(self, memory: mmap.mmap, layout: BucketsLayout, update_number: int) -> None:
        self._words = SharedWords(memory, layout.progress_offset, PAGE_BYTES // WORD_BYTES)
        self._failure_text = memoryview(memory)[layout.failure_offset : layout.failure_offset + PAGE_BYTES]
        self._update_number = update_number

    def _get(self, index: int) -> int:
        word = self._words[index]
        return word & _FINISHED if word >> 32 == self._update_number else 0

    def _set(self, index: int, value: int) -> None:
        self._words[index] = self._update_number << 32 | value

    # -- writers ------------------------------------------------------------------------------------

    def num_filled(self, writer: int) -> int:
        """Number of buckets that a writer has filled."""
        return self._get(_FILLED + writer)

    def set_filled(self, writer: int, count: int) -> None:
        """Record that a writer has filled `count` buckets."""
        self._set(_FILLED + writer, count)

    def finish(self, writer: int, num_buckets: int | None) -> None:
        """Record that a writer has written all of its tensors. The leading writer passes the number of buckets."""
        if num_buckets is not None:
            self._set(_TOTAL, num_buckets + 1)
        self._set(_FILLED + writer, _FINISHED)

    @property
    def num_buckets(self) -> int | None:
        """Number of buckets of the whole update. None while it is not known."""
        return self._get(_TOTAL) - 1 if self._get(_TOTAL) else None

    # -- readers ------------------------------------------------------------------------------------

    def num_emptied(self, reader: int) -> int:
        """Number of buckets that a reader has emptied."""
        return self._get(_EMPTIED + reader)

    def set_emptied(self, reader: int, count: int) -> None:
        """Record that a reader has emptied `count` buckets. A count of 0 records that the reader is present."""
        self._set(_EMPTIED + reader, count)

    def is_present(self, reader: int) -> bool:
        """Whether a reader has opened the buckets for this update."""
        return self._words[_EMPTIED + reader] >> 32 == self._update_number

    # -- failure ------------------------------------------------------------------------------------

    def fail(self, message: str) -> None:
        """Make all processes stop waiting. Only the first failure of an update is recorded."""
        if self.failure is None:
            raw = message.encode()[: PAGE_BYTES - 4]
            self._failure_text[: len(raw) + 1] = raw + b"\0"
            self._set(_FAILED, 1)

    @property
    def failure(self) -> str | None:
        """Message of the process that failed, or None."""
        if not self._get(_FAILED):
            return None
        return bytes(self._failure_text).partition(b"\0")[0].decode(errors="replace")


# -- Buckets ----------------------------------------------------------------------------------------


class Buckets:
    """One process's mapping of a pair of buckets. `create` makes the memory; `open` maps another process's memory."""

    def __init__(self, file: SharedMemoryFile, layout: BucketsLayout) -> None:
        self._file, self.layout, self._mapping, self.location = file, layout, file.memory, file.location
        self.reports = SharedReports(self._mapping, layout.checksums_offset, layout.num_tensors)
        self.memory: BucketMemory = HostBucketMemory(self._mapping, layout.buckets_offset, layout.bucket_bytes)

    @classmethod
    def create(cls, layout: BucketsLayout) -> Buckets:
        """Create a pair of buckets that this process owns, on the host or on a GPU as `layout` says.

        Raises the errors of `SharedMemoryFile.create` and of `DeviceBucketMemory.create`.
        """
        buckets = cls(SharedMemoryFile.create("buckets", layout.size_bytes), layout)
        try:
            if not layout.in_host_memory:
                buckets.memory = DeviceBucketMemory.create(layout.bucket_bytes)
        except BaseException:
            buckets.close()
            raise
        return buckets

    def description(self) -> Json:
        """What another process needs to open the buckets."""
        return {"location": self.location, **self.memory.description()}

    @classmethod
    def open(cls, location: str, layout: BucketsLayout) -> Buckets:
        """Map the buckets of another process on this machine. Raises OSError if this process cannot open it."""
        return cls(SharedMemoryFile.open(location, layout.size_bytes), layout)

    def open_buckets(self, description: Json) -> None:
        """After `open`: map the buckets, if they are on a GPU. Before, only the progress and the reports can be used.

        Raises UnsupportedError if this process does not see the GPU.
        """
        if not self.layout.in_host_memory:
            self.memory = DeviceBucketMemory.open(description, self.layout.bucket_bytes)

    def progress(self, update_number: int) -> ProgressCounters:
        """The progress counters of one update."""
        return ProgressCounters(self._mapping, self.layout, update_number)

    def write_table(self, bucket: int, rows: Sequence[Any]) -> None:
        """Write the table of bucket 0 or 1. `rows`: name, byte offset in the bucket, shape and dtype of each tensor."""
        raw = json.dumps(rows).encode().ljust(self.layout.table_bytes)
        start = self.layout.tables_offset + bucket * self.layout.table_bytes
        self._mapping[start : start + self.layout.table_bytes] = raw

    def read_table(self, bucket: int) -> list[Any]:
        """The rows that `write_table` wrote."""
        start = self.layout.tables_offset + bucket * self.layout.table_bytes
        return list(json.loads(self._mapping[start : start + self.layout.table_bytes]))

    def owner_is_alive(self) -> bool:
        """Whether the process that created the memory is alive. A zombie has no open files, so it counts as dead."""
        return self._file.exists()

    def close(self) -> None:
        """Release the buckets, the mapping and the file."""
        self.memory.close()
        self._file.close()


# -- Waiting ----------------------------------------------------------------------------------------

POLL_INTERVAL_S = 0.0002


def wait_for_progress(
    is_ready: Callable[[], bool],
    progress: ProgressCounters,
    require_peers: Callable[[], None],
    deadline: float,
    timeout_message: str,
) -> None:
    """Poll until `is_ready()` is true.

    `require_peers` raises when the other processes are gone. `deadline` is a time of `time.monotonic`. Raises
    VerlServerError with the failure that another process recorded, and DeadlineError with `timeout_message`.
    """
    while not is_ready():
        if (failure := progress.failure) is not None:
            raise VerlServerError(failure)
        require_peers()
        if time.monotonic() > deadline:
            raise DeadlineError(timeout_message, operation="buckets")
        time.sleep(POLL_INTERVAL_S)


# -- Reader -----------------------------------------------------------------------------------------

RECLAIM_TIMEOUT_S = 10.0
"""Seconds that a model may keep tensors of a bucket after it has taken all tensors of the next one.

Some models load in threads, so they keep tensors for a while.
"""


class BucketReader:
    """One reader's part of one update through a pair of buckets.

    `index` is this reader's number, `num_writers` the number of writers. `require_peers` raises when it makes no sense
    to wait longer. `deadline` is a time of `time.monotonic`.
    """

    def __init__(
        self,
        buckets: Buckets,
        update_number: int,
        index: int,
        num_writers: int,
        require_peers: Callable[[], None],
        deadline: float,
    ) -> None:
        self._buckets, self._index, self._num_writers = buckets, index, num_writers
        self._require_peers, self._deadline = require_peers, deadline
        self._progress = buckets.progress(update_number)
        self._progress.set_emptied(index, 0)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors in the order in which they are written.

        A tensor's memory is reused only when no reference to it is left. The caller may keep tensors of one bucket
        while it takes those of the next. Raises DeadlineError, VerlServerError, and RuntimeError if tensors are kept
        longer.
        """
        num_read = 0

        def leases() -> Iterator[BucketLease]:
            nonlocal num_read
            while self._wait_for_bucket(num_read):
                bucket = num_read % NUM_BUCKETS
                yield BucketLease(self._buckets.memory, bucket, self._buckets.read_table(bucket))
                num_read += 1

        yield from leased_tensors(leases(), lambda num_free: self._progress.set_emptied(self._index, num_free))
        self._buckets.memory.synchronize()
        self._progress.set_emptied(self._index, num_read)

    def _wait_for_bucket(self, bucket: int) -> bool:
        """Wait until a bucket is filled, or the update is known to end before it. Returns whether the bucket exists."""
        exists = False

        def is_known() -> bool:
            nonlocal exists
            is_filled = all(self._progress.num_filled(writer) > bucket for writer in range(self._num_writers))
            total = self._progress.num_buckets  # after the counts: a writer sets the total before its last count
            exists = total is None or bucket < total
            return not exists or is_filled

        timeout_message = f"bucket {bucket} was not filled by the trainer in time: raise Timeouts(weights_s=...)"
        wait_for_progress(is_known, self._progress, self._require_peers, self._deadline, timeout_message)
        return exists


class BucketLease:
    """The tensors of one bucket while a model loads them.

    Models keep tensors for a while: to fuse them with a later tensor, or for threads that load. A bucket is filled
    again only when nothing refers to its memory any more. A weak reference to the bucket's `view` shows that. `rows`:
    name, byte offset in the bucket, shape and dtype of each tensor.
    """

    def __init__(self, memory: BucketMemory, bucket: int, rows: Sequence[Any]) -> None:
        self._memory, self._bucket, self._rows = memory, bucket, rows
        self._view: weakref.ref[Any] | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors of the bucket, as views of its memory."""
        view = self._memory.view(self._bucket)
        self._view = weakref.ref(view)
        flat = self._memory.as_tensor(view)
        del view
        for name, offset, shape, dtype in self._rows:
            yield name, tensor_view(flat, offset, TensorSpec(tuple(shape), dtype))

    def try_reclaim(self) -> bool:
        """End the lease if no tensor of the bucket is in use any more. Returns whether that is so."""
        if self._view is not None and self._view() is not None:
            return False
        self._memory.synchronize()
        return True

    def reclaim(self) -> None:
        """Wait until no tensor of the bucket is in use. Raises RuntimeError after `RECLAIM_TIMEOUT_S` seconds."""
        deadline = time.monotonic() + RECLAIM_TIMEOUT_S
        while not self.try_reclaim():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "the model keeps tensors while it loads many others, which transports with buckets do not support: "
                    "use the transport shared_memory or distributed"
                )
            time.sleep(POLL_INTERVAL_S)


def leased_tensors(
    leases: Iterable[BucketLease], reclaimed: Callable[[int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors of buckets, one bucket after the other.

    `reclaimed(n)` is called when no tensor of the first n buckets is in use: at the latest when the caller has taken
    all tensors of the bucket after them. Raises RuntimeError if the caller keeps tensors longer.
    """
    previous: BucketLease | None = None
    for number, lease in enumerate(leases):
        for name, tensor in lease.tensors():
            yield name, tensor
            del tensor
            if previous is not None and previous.try_reclaim():
                previous = None
                reclaimed(number)
        if previous is not None:
            previous.reclaim()
            reclaimed(number)
        previous = lease


# -- Writer -----------------------------------------------------------------------------------------

READER_OPEN_TIMEOUT_S = 60.0
"""Seconds that the readers have to open the buckets after the start of an update."""


class BucketWriter:
    """One trainer rank's writing of one update into a pair of buckets.

    `update_number` counts the updates of the buckets. `index` is this writer's number. `is_lead_writer`: this
    writer writes the tables and the number of buckets. `readers`: numbers of the readers to wait for. `require_peers`
    raises when it makes no sense to wait longer. `wait_for_copies` waits for the copies into the memory that `reserve`
    returned.
    """

    def __init__(
        self,
        buckets: Buckets,
        update_number: int,
        index: int,
        is_lead_writer: bool,
        readers: Sequence[int],
        require_peers: Callable[[], None],
        wait_for_copies: Callable[[], None] = lambda: None,
    ) -> None:
        self._buckets, self._index, self._is_lead_writer = buckets, index, is_lead_writer
        self._readers, self._require_peers, self._wait_for_copies = readers, require_peers, wait_for_copies
        self._progress = buckets.progress(update_number)
        self._bucket: torch.Tensor | None = None
        """The bucket that is being filled, as bytes."""
        self._num_filled = 0
        self._used_bytes = 0
        self._rows: list[Any] = []
        """Name, byte offset, shape and dtype of each tensor in the bucket."""
        self._open_deadline = time.monotonic() + READER_OPEN_TIMEOUT_S

    def reserve(self, name: str, spec: TensorSpec, deadline: float) -> torch.Tensor:
        """Reserve memory for the next tensor and return it as a tensor.

        Waits for a free bucket until `deadline` (a time of `time.monotonic`). Raises DeadlineError, VerlServerError.
        """
        offset = round_up(self._used_bytes, ALIGNMENT)
        if self._bucket is None or offset + tensor_bytes(spec) > self._buckets.layout.bucket_bytes:
            self._publish_bucket()
            self._wait_for_free_bucket(deadline)
            memory = self._buckets.memory
            self._bucket, offset = memory.as_tensor(memory.view(self._num_filled % NUM_BUCKETS)), 0
        self._rows.append([name, offset, spec.shape, spec.dtype])
        self._used_bytes = offset + tensor_bytes(spec)
        return tensor_view(self._bucket, offset, spec)

    def finish(self) -> None:
        """Hand the last bucket to the readers. All tensors have been written."""
        self._publish_bucket()
        self._progress.finish(self._index, self._num_filled if self._is_lead_writer else None)

    def _publish_bucket(self) -> None:
        if self._bucket is None:
            return
        self._wait_for_copies()
        self._buckets.memory.synchronize()
        if self._is_lead_writer:
            self._buckets.write_table(self._num_filled % NUM_BUCKETS, self._rows)
        self._num_filled += 1
        self._progress.set_filled(self._index, self._num_filled)
        self._bucket, self._used_bytes, self._rows = None, 0, []

    def _wait_for_free_bucket(self, deadline: float) -> None:
        progress = self._progress

        def is_free() -> bool:
            if progress.num_buckets is not None and self._num_filled >= progress.num_buckets:
                raise BadInputError(
                    f"rank {self._index} pushes more tensors than rank 0; all ranks must push the same tensors"
                )
            if time.monotonic() > self._open_deadline:
                absent = [reader for reader in self._readers if not progress.is_present(reader)]
                if absent:
                    raise DeadlineError(
                        f"TP ranks {absent} did not open the staging memory within {READER_OPEN_TIMEOUT_S:g} s",
                        operation="buckets",
                    )
            num_needed = self._num_filled + 1 - NUM_BUCKETS
            return all(progress.num_emptied(reader) >= num_needed for reader in self._readers)

        timeout_message = (
            f"bucket {self._num_filled} was not emptied by the servers in time: raise Timeouts(weights_s=...)"
        )
        wait_for_progress(is_free, progress, self._require_peers, deadline, timeout_message)
