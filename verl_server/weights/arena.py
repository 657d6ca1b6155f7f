"""The arena: staging memory for the whole model, its layout, and the checksums of what is in it.

Trainer ranks write it; servers on the same machine read it in place.

The arena is a memory file (see `memory_file`).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import dataclasses
import errno
import json
import math
import mmap
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from verl_server.errors import UnsupportedError, VerlServerError
from verl_server.types import Json, TensorSpec
from verl_server.weights.device import PinnedMemory

# -- Layout -----------------------------------------------------------------------------------------
# Layout of the arena: the byte offset of each tensor. Pure: equal manifests give equal layouts on every rank.
#
# offset               content
# 0                    one report of REPORT_BYTES for each TP rank of the servers (JSON, padded with zeros)
# TABLE_OFFSET         the table of the current update (JSON: name, offset, shape and dtype of each tensor)
# checksums_offset     for each TP rank: the checksum of each tensor in the table, as that rank read it
# offset of a slot     the tensor; a multiple of ALIGNMENT

REPORT_BYTES = 16384
MAX_TP_RANKS = 64
"""Maximum number of TP ranks, of all servers together, that one arena or one pair of buckets serves."""
TABLE_OFFSET = REPORT_BYTES * MAX_TP_RANKS
ALIGNMENT = 64
PAGE_BYTES = 4096
CHECKSUM_BYTES = 8
LARGEST_OFFSET = 2**53
"""Stands for an offset that is not known yet: its JSON text is at least as long as that of any real offset."""
ELEMENT_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


def tensor_bytes(spec: TensorSpec) -> int:
    """Size of one tensor in bytes."""
    return math.prod(spec.shape) * ELEMENT_BYTES[spec.dtype]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not less than `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """The memory of one tensor: its byte offset from the start of the arena, and its spec."""

    offset: int
    spec: TensorSpec


@dataclass(frozen=True)
class Layout:
    """The memory of all tensors of one model in an arena."""

    slots: Mapping[str, Slot]
    """Slot of each tensor, by Hugging Face parameter name."""
    checksums_offset: int
    """Byte offset of the checksums that the servers' TP ranks write."""
    size_bytes: int
    """Size of the whole arena in bytes."""
    _cached_table: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def table(self, names: Iterable[str]) -> bytes:
        """The JSON table from which a server finds the tensors `names`: a row of name, offset, shape and dtype each.

        The last table is cached, because most updates contain all tensors.
        """
        wanted = tuple(names)
        if self._cached_table.get("names") != wanted:
            slots = [(name, self.slots[name]) for name in wanted]
            rows = [[name, slot.offset, slot.spec.shape, slot.spec.dtype] for name, slot in slots]
            self._cached_table.update(names=wanted, table=json.dumps(rows).encode())
        table: bytes = self._cached_table["table"]
        return table

    def in_order(self, names: Sequence[str]) -> list[str]:
        """`names` sorted by the offsets of their tensors. An empty tensor has the offset of the tensor after it."""
        return sorted(names, key=lambda name: (self.slots[name].offset, tensor_bytes(self.slots[name].spec)))


def plan_arena(tensors: Mapping[str, TensorSpec]) -> Layout:
    """The layout for the tensors of a manifest, in their order."""
    largest_table = Layout({name: Slot(LARGEST_OFFSET, spec) for name, spec in tensors.items()}, 0, 0).table(tensors)
    checksums_offset = round_up(TABLE_OFFSET + len(largest_table), PAGE_BYTES)
    offset = round_up(checksums_offset + MAX_TP_RANKS * len(tensors) * CHECKSUM_BYTES, PAGE_BYTES)
    slots = {}
    for name, spec in tensors.items():
        slots[name] = Slot(offset, spec)
        offset = round_up(offset + tensor_bytes(spec), ALIGNMENT)
    return Layout(slots, checksums_offset, round_up(offset, PAGE_BYTES))


def byte_ranges_of(table: bytes) -> list[tuple[int, int]]:
    """The byte range `(start, stop)` of each tensor in a table."""
    rows = json.loads(table)
    return [(offset, offset + tensor_bytes(TensorSpec(tuple(shape), dtype))) for _, offset, shape, dtype in rows]


# -- Reports ----------------------------------------------------------------------------------------
# Reports of the servers' TP ranks on an update, in memory that they share with the trainer.
#
# The server's HTTP reply speaks for TP rank 0 only. Therefore each TP rank writes a report of its own into its report
# slot (JSON, padded with zeros), and the checksum of each tensor that it read into another part of the same memory.


@dataclass(frozen=True)
class Report:
    """The outcome of an update on one TP rank of one server."""

    update_id: str
    ok: bool
    """Whether the model's loading code ran without an exception."""
    error: str | None = None
    """Type and message of the exception, shortened."""
    trace: str | None = None
    """End of the exception's traceback."""
    num_tensors: int = 0
    """Number of tensors that the model took."""
    unwritten: list[str] = field(default_factory=list)
    """Some of the server's parameters that were not written, by the server's names."""
    num_unwritten: int = 0
    """Number of all of the server's parameters that were not written."""
    unread: list[str] = field(default_factory=list)
    """Some of the tensors of the update that the model's loading code did not read."""
    share: tuple[int, int] = (0, 1)
    """The tensors that the TP rank has verified: first position and step, see `verified_share`."""

    @classmethod
    def from_json(cls, fields: Json) -> Report:
        """The report that `dataclasses.asdict` made JSON of."""
        return cls(**{**fields, "share": tuple(fields["share"])})


@dataclass(frozen=True)
class ReceivedReport:
    """A report as the trainer reads it, with checksums."""

    report: Report
    checksums: list[int]
    """Checksum of each tensor of the TP rank's share as it read the tensor. Empty without verification."""


class SharedReports:
    """Reads and writes reports in shared memory. Each TP rank has a report slot.

    The reports are at the start of `memory`. The checksums begin at byte `checksums_offset`, with room for
    `num_tensors` checksums in each slot.
    """

    def __init__(self, memory: mmap.mmap, checksums_offset: int, num_tensors: int) -> None:
        self._memory, self._checksums_offset, self._num_tensors = memory, checksums_offset, num_tensors

    def write(self, report_slot: int, report: Report, checksums: Iterable[int]) -> None:
        """Write a TP rank's report and checksums into its slot."""
        raw_checksums = array.array("q", checksums).tobytes()
        start = self._checksums_start(report_slot)
        self._memory[start : start + len(raw_checksums)] = raw_checksums
        raw_report = json.dumps(asdict(report)).encode()
        if len(raw_report) > REPORT_BYTES:  # long names, or JSON escapes in the error text
            short = dataclasses.replace(
                report, error="see the server's log", trace=None, unwritten=[], unread=report.unread[:10]
            )
            raw_report = json.dumps(asdict(short)).encode()
        report_start = report_slot * REPORT_BYTES
        self._memory[report_start : report_start + REPORT_BYTES] = raw_report.ljust(REPORT_BYTES, b"\0")

    def read(self, report_slot: int, update_id: str, num_checksums: int) -> ReceivedReport | None:
        """The report of a slot with its checksums. None if it is not about `update_id`.

        `num_checksums`: number of tensors of the update, or 0 without verification.
        """
        raw_report = bytes(self._memory[report_slot * REPORT_BYTES : (report_slot + 1) * REPORT_BYTES]).rstrip(b"\0")
        if not raw_report:
            return None
        report = Report.from_json(json.loads(raw_report))
        if report.update_id != update_id:
            return None
        start = self._checksums_start(report_slot)
        first, step = report.share
        raw_checksums = self._memory[start : start + len(range(first, num_checksums, step)) * CHECKSUM_BYTES]
        return ReceivedReport(report, list(array.array("q", raw_checksums)))

    def _checksums_start(self, report_slot: int) -> int:
        return self._checksums_offset + report_slot * self._num_tensors * CHECKSUM_BYTES


# -- Memory file ------------------------------------------------------------------------------------
# Memory files: anonymous memory that one process creates and other processes of the same user map, and words in it.
#
# A memory file (`memfd_create`) has no name in /dev/shm, so nothing is left behind when a process is killed, and a
# small /dev/shm (64 MB in a default container) does not limit it. Other processes of the same user open it as
# `/proc/PID/fd/N` while its owner runs. A mapping stays valid after the owner has ended.

WORD_BYTES = 8
NAME_PREFIX = "verl_server_"
"""How the names of our memory files begin. SGLang's servers open no other files for a weight update."""
FORBIDDEN_ERRORS = (errno.EPERM, errno.EACCES, errno.ENOSYS)
"""Errors of `memfd_create` in a sandbox that forbids it (seccomp)."""
LOCATION_PATH = re.compile(r"/proc/\d+/fd/\d+")


class SharedMemoryFile:
    """One process's mapping of a memory file. `create` makes the file; `open` maps the file of another process.

    `location`: where other processes find the file, see `open_memory_file`.
    """

    def __init__(self, fd: int, size_bytes: int, location: str) -> None:
        self._fd, self.location = fd, location
        try:
            self.memory = mmap.mmap(fd, size_bytes)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise VerlServerError(f"cannot map {size_bytes} bytes of staging memory: {error}") from error

    @classmethod
    def create(cls, kind: str, size_bytes: int) -> SharedMemoryFile:
        """Create a file that this process owns. The machine provides a page when it is first written.

        `kind` is a part of the file's name, in which a random number follows. Raises UnsupportedError on a system or in
        a sandbox without `memfd_create`, VerlServerError if a limit forbids the file or the memory cannot be mapped.
        """
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError("staging memory for weights needs memfd_create, which only Linux has")
        name = f"{NAME_PREFIX}{kind}_{secrets.token_hex(8)}"
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC)
        except OSError as error:
            if error.errno in FORBIDDEN_ERRORS:
                raise UnsupportedError(
                    f"staging memory for weights needs memfd_create, which this sandbox forbids: {error}"
                ) from error
            raise _not_created(size_bytes, error) from error
        try:
            os.ftruncate(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise _not_created(size_bytes, error) from error
        return cls(fd, size_bytes, f"/proc/{os.getpid()}/fd/{fd}:{name}")

    @classmethod
    def open(cls, location: str, size_bytes: int) -> SharedMemoryFile:
        """Map the file of another process on this machine. Raises OSError if this process cannot open it."""
        return cls(open_memory_file(location), size_bytes, location)

    def exists(self) -> bool:
        """Whether the owner of the file runs and has not closed it."""
        path, _, name = self.location.partition(":")
        return _memory_file_name(path) == name

    def close(self) -> None:
        """Close the file. The mapping is closed when no object uses it any more."""
        with contextlib.suppress(BufferError):
            self.memory.close()
        os.close(self._fd)


def _not_created(size_bytes: int, error: OSError) -> VerlServerError:
    return VerlServerError(
        f"cannot create {size_bytes} bytes of staging memory: {error}. Check the limits of open files (`ulimit -n`), "
        "of the size of a file (`ulimit -f`) and of memory"
    )


def open_memory_file(location: str) -> int:
    """Open the memory file at a location, "PATH:NAME", and return its file descriptor.

    The path `/proc/PID/fd/N` alone says nothing: in another container, or after the process has ended, the same number
    can be another file. Therefore the name is compared. Raises OSError if this process cannot open the file, or if the
    path is another file.
    """
    path, _, name = location.partition(":")
    if not (LOCATION_PATH.fullmatch(path) and name.startswith(NAME_PREFIX)):
        raise PermissionError(f"{location!r} is not the location of a memory file of verl_server")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if _memory_file_name(f"/proc/self/fd/{fd}") != name:
        os.close(fd)
        raise FileNotFoundError(
            f"{path} is not the memory file {name}: its owner has ended, or runs in another container"
        )
    return fd


def _memory_file_name(path: str) -> str | None:
    """The name of the memory file that an entry of `/proc/PID/fd` is, or None."""
    try:
        target = os.readlink(path)
    except OSError:
        return None
    return target.removeprefix("/memfd:").removesuffix(" (deleted)") if target.startswith("/memfd:") else None


def memory_contains(memory: mmap.mmap, tensor: torch.Tensor) -> bool:
    """Whether a tensor is in this memory."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return bool(start <= tensor.data_ptr() < start + len(memory))


class SharedWords:
    """`count` words of 64 bits at `offset` in shared memory. Each word is read and written at once.

    A process that reads a word also sees everything that was written before the word. What a process has read before it
    writes a word was not yet changed by a process that waited for the word.
    """

    def __init__(self, memory: mmap.mmap, offset: int, count: int) -> None:
        self._words = memoryview(memory)[offset : offset + count * WORD_BYTES].cast("Q")

    def __getitem__(self, index: int) -> int:
        word = self._words[index]
        order_memory_accesses()
        return word

    def __setitem__(self, index: int, word: int) -> None:
        order_memory_accesses()
        self._words[index] = word

    def release(self) -> None:
        """Release the memory, so that it can be unmapped."""
        self._words.release()


def order_memory_accesses() -> None:
    """Let the processor finish all earlier reads and writes of this thread before all later ones.

    x86-64 keeps the order of writes and the order of reads. Processors with aarch64 may change it: a process could read
    a new counter, and after it the old bytes that the counter speaks of. Python has no memory barrier, but its locks
    contain one: the release of a lock is a store-release and the acquisition a load-acquire, and aarch64 does not move
    a load-acquire before an earlier store-release (Arm Architecture Reference Manual, "Barrier-ordered-before").
    """
    lock = threading.Lock()
    for _ in range(2):  # the second acquisition after the first release is the barrier
        with lock:
            pass


# -- Views ------------------------------------------------------------------------------------------
# Views of existing memory as tensors, without copies.


def tensor_view(memory: torch.Tensor, offset: int, spec: TensorSpec) -> torch.Tensor:
    """A view of `memory` (uint8, one dimension) as a tensor that begins at byte `offset`.

    `offset` is a multiple of the element size of `spec.dtype`.
    """
    dtype = getattr(torch, spec.dtype)
    storage_offset = memory.storage_offset() + offset
    shape = torch.Size(spec.shape)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    view = torch.empty(0, dtype=dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), storage_offset // view.element_size(), shape, strides)


def tensor_views(memory: memoryview, rows: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors of a table as views of `memory`. `rows`: name, byte offset, shape and dtype of each."""
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    for name, offset, shape, dtype in rows:
        yield name, tensor_view(flat, offset, TensorSpec(tuple(shape), dtype))


# -- Arena ------------------------------------------------------------------------------------------


class Arena:
    """One process's mapping of the staging memory. `create` makes the memory; `open` maps another process's memory."""

    def __init__(self, file: SharedMemoryFile, layout: Layout) -> None:
        self._file, self._layout, self._memory, self.location = file, layout, file.memory, file.location
        self._tensors: dict[str, torch.Tensor] = {}
        self._flat: torch.Tensor | None = None
        self._pinned = PinnedMemory(self._memory)
        self.reports = SharedReports(self._memory, layout.checksums_offset, len(layout.slots))

    @classmethod
    def create(cls, layout: Layout) -> Arena:
        """Create an arena that this process owns. Raises the errors of `SharedMemoryFile.create`."""
        return cls(SharedMemoryFile.create("arena", layout.size_bytes), layout)

    @classmethod
    def open(cls, location: str, layout: Layout) -> Arena:
        """Map the arena of another process on this machine. Raises OSError if this process cannot open it."""
        return cls(SharedMemoryFile.open(location, layout.size_bytes), layout)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` as a view of the arena: writing the tensor writes the arena."""
        if name in self._tensors:
            return self._tensors[name]
        if self._flat is None:
            self._flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        slot = self._layout.slots[name]
        self._tensors[name] = tensor_view(self._flat, slot.offset, slot.spec)
        return self._tensors[name]

    def write_table(self, names: list[str]) -> int:
        """Write the table of the current update. Returns its length in bytes."""
        table = self._layout.table(names)
        self._memory[TABLE_OFFSET : TABLE_OFFSET + len(table)] = table
        return len(table)

    def pin(self) -> None:
        """Pin the memory, so that copies from and to a GPU of this process are asynchronous."""
        self._pinned.pin()

    @property
    def memory(self) -> memoryview:
        """All bytes of the arena."""
        return memoryview(self._memory)

    def close(self) -> None:
        """Close the file. The mapping is closed when no tensor uses it: a trainer may keep its parameters in it."""
        self._pinned.unpin()
        self._tensors.clear()
        self._flat = None
        self._file.close()


# -- Checksums --------------------------------------------------------------------------------------
# Checksums of tensors that depend on the value and the position of every byte, and cost little more than reading them.
#
# The trainer and every TP rank of the servers compute the checksum of each tensor as they see it. Different checksums
# reveal lost, stale, moved and overwritten bytes. They do not protect against deliberate changes.
#
# There are two algorithms, and one is chosen for all updates of an engine. XXH3 is fast on a CPU. The positional sum
# adds 8-byte words that are each multiplied by a number that depends on its position. It is fast on an accelerator,
# and has the same value on a CPU.

WORDS_PER_STEP = 2**22
"""Number of words that a positional sum adds at once. Limits the temporary memory."""
MULTIPLIERS = (-7046029254386353131, -4658895280553007687)
"""Constants of the SplitMix64 generator, as signed integers."""
XXH3, POSITIONAL_SUM = "xxh3", "positional_sum"
"""Names of the algorithms."""


def choose_algorithm(*, servers_read_host_memory: bool = False) -> str:
    """The algorithm for the updates of a trainer: that of the accelerator if this process can use one.

    `servers_read_host_memory`: the servers compute the checksums on the host (vLLM), where XXH3 is 50 times as fast.
    """
    return POSITIONAL_SUM if torch.cuda.is_available() and not servers_read_host_memory else XXH3


MAX_ERROR_CHARACTERS = 1500
"""Maximum number of characters of an error message, and of its traceback, in a report."""


def error_text(error: BaseException) -> str:
    """The error of a report: the name of the exception and its message."""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]


class Checksums:
    """Checksums of tensors that are read one after the other.

    Positional sums are computed on an accelerator without waiting for it; `values` fetches all of them together.
    `device`: where positional sums of tensors in host memory are computed. None: on the CPU.
    """

    def __init__(self, algorithm: str, device: torch.device | None = None) -> None:
        self._algorithm, self._device = algorithm, device
        self._values: list[Any] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Compute the checksum of a contiguous tensor."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if self._algorithm == XXH3:
            self._values.append(_hash(data))
        elif self._algorithm == POSITIONAL_SUM:
            try:
                self._values.append(_positional_total(data, self._device or data.device))
            except torch.OutOfMemoryError:
                self._values.append(_positional_total(data.cpu(), torch.device("cpu")))
        else:
            raise ValueError(f"there is no checksum {self._algorithm!r}")

    def values(self) -> list[int]:
        """The checksums of all tensors so far, in their order, as signed 64-bit integers."""
        return [(int(value) + 2**63) % 2**64 - 2**63 for value in _on_host(self._values)]


def compute_checksum(tensor: torch.Tensor, algorithm: str = XXH3) -> int:
    """The checksum of one contiguous tensor as a signed 64-bit integer."""
    checksums = Checksums(algorithm)
    checksums.add(tensor)
    return checksums.values()[0]


def verified_share(tp_rank: int, num_sharing: int) -> tuple[int, int]:
    """The tensors that a TP rank verifies: those at the positions `first`, `first + step`, ... Returns both numbers.

    `num_sharing`: number of consecutive TP ranks that read the same staging memory. Together they verify all tensors.
    """
    return tp_rank % num_sharing, num_sharing


def shares_are_complete(shares: Sequence[tuple[int, int]]) -> bool:
    """Whether every tensor is in one of the shares."""
    positions = range(math.lcm(*(step for _, step in shares)))
    return all(any(position % step == first for first, step in shares) for position in positions)


def _on_host(values: Sequence[Any]) -> list[Any]:
    """Numbers, and tensors with one number, on the host: with one transfer from each device."""
    numbers = list(values)
    positions_by_device: dict[torch.device, list[int]] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            positions_by_device.setdefault(value.device, []).append(position)
    for positions in positions_by_device.values():
        fetched = torch.stack([values[position] for position in positions]).tolist()
        for position, number in zip(positions, fetched, strict=True):
            numbers[position] = number
    return numbers


def _hash(data: torch.Tensor) -> int:
    """XXH3 of bytes. One thread reads memory as fast as several threads: see `docs/performance.md`."""
    from xxhash import xxh3_64_intdigest

    return xxh3_64_intdigest(data.cpu().numpy().data)


def positional_sum(data: torch.Tensor) -> int:
    """The positional sum of bytes. The last word is padded with zeros."""
    return int(_positional_total(data, data.device))


def _positional_total(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The positional sum as a tensor on `device`, where it is computed.

    Computed with integers of 64 bits that overflow, so that the value is the same on every device. Each word is
    multiplied by an odd number.
    """
    padding = -data.numel() % CHECKSUM_BYTES
    if padding or data.storage_offset() % CHECKSUM_BYTES:  # torch has no unaligned views
        data = torch.cat([data, data.new_zeros(padding)])
    total = torch.zeros((), dtype=torch.int64, device=device)
    all_words = data.view(torch.int64)
    for start in range(0, len(all_words), WORDS_PER_STEP):
        words = all_words[start : start + WORDS_PER_STEP].to(device)
        factors = torch.arange(start, start + len(words), dtype=torch.int64, device=device)
        for multiplier in MULTIPLIERS:
            factors *= multiplier
            factors ^= factors >> 32
        total += (words * (factors | 1)).sum()
    return total
