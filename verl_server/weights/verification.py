"""What the loading code of a model does with an update: parameters that it did not write, tensors that it did not read.

Before the load, a bit pattern that no weight has (a mark) is written at both ends of rows of every float parameter: of
all rows, or of one to two thousand evenly spaced rows where a matrix has more. (The slices that models load on their
own are larger than the distance between marked rows.) In a parameter with one dimension, elements are marked in the
same way, because biases are fused, too. A mark that is still there after the load belongs to a row that
was not written. Qwen2, for example, ignores names that it does not know. Marks that a partial update leaves are
replaced by the earlier values. No tokens are generated in between.

Many models skip tensors whose names they do not know, without an error: Llama skips the biases of its MLP. Therefore
the loading code gets tensors that notice the first operation which uses their values.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from verl_server.weights.arena import CHECKSUM_BYTES

MARKS = {"bfloat16": 0x7FB5, "float16": 0x7DB5, "float32": 0x7FB55AA5}
"""Bit pattern of the mark by dtype: a signalling NaN with a payload that no computation produces."""
MIN_MARKED_ROWS = 1024
"""Minimum number of marked rows in a matrix that has more rows than that, and of marked elements in a vector."""


@dataclass
class _MarkedParameter:
    """A parameter with marks."""

    name: str
    row_ends: torch.Tensor
    """A view of the marked elements as integers, shape [..., marked rows, 2]."""
    earlier_values: torch.Tensor
    """The values of `row_ends` before the marks were written."""
    mark: int


class Coverage:
    """Marks on all float parameters of `model`, which show after a load which parameters were not written."""

    def __init__(self, model: Any) -> None:
        self._marked: list[_MarkedParameter] = []
        try:
            for name, parameter in model.named_parameters():
                if (marked := _mark(name, parameter)) is not None:
                    self._marked.append(marked)
        except BaseException:
            self.remove_marks()
            raise

    def remove_marks(self) -> list[str]:
        """Restore the earlier values where marks are left. Returns the parameters that had marks left."""
        unwritten = []
        for parameter in self._marked:
            is_mark = parameter.row_ends == parameter.mark
            if bool(is_mark.any()):
                unwritten.append(parameter.name)
                parameter.row_ends.copy_(parameter.earlier_values.where(is_mark, parameter.row_ends))
        self._marked = []
        return unwritten


class ReadTensors:
    """The tensors of one update, as the loading code gets them, and those of them that it has not read."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._read: set[str] = set()

    def watch(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, which notices that it is read. It shares the memory of `tensor`."""
        self._names.append(name)
        watched = tensor.as_subclass(_WatchedTensor)
        watched.on_read = functools.partial(self._read.add, name)
        return watched

    def unread(self) -> list[str]:
        """The names of the tensors that were not read. A rank of expert parallelism reads its own experts only."""
        read_experts = set(map(_all_experts, self._read))
        return [name for name in self._names if _all_experts(name) not in read_experts]


#: Results that describe a tensor: sizes, strides, flags, its name in errors. Everything else may hold its values.
_DESCRIPTIONS = (int, str, torch.dtype, torch.device, torch.layout)
#: Functions whose result is the value of a whole number, or where the values are.
_READS = (torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__index__, torch.Tensor.__bool__, torch.Tensor.data_ptr)


class _WatchedTensor(torch.Tensor):
    """A tensor that calls `on_read` when its values are used. The results of operations are plain tensors."""

    on_read: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, tuple) else [result]
        if func in _READS or not all(isinstance(part, _DESCRIPTIONS) for part in parts):
            for argument in tree_leaves((args, kwargs)):
                if isinstance(argument, cls):
                    argument.on_read()
        return result

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """torch refuses to copy a tensor of a class whose operations return another class."""
        return self.clone()


def _all_experts(name: str) -> str:
    """A name for the tensors that are the same part of each expert of a layer; `name` itself for other tensors."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def _mark(name: str, parameter: torch.Tensor) -> _MarkedParameter | None:
    """Write marks into a parameter. Returns None for a parameter without elements or of another dtype."""
    data = parameter.data
    mark = MARKS.get(str(data.dtype).removeprefix("torch."))
    if mark is None or data.numel() == 0:
        return None
    bits = data.view(torch.int32 if data.element_size() == 4 else torch.int16)
    if bits.dim() < 2:
        bits = bits.reshape(-1, 1)  # a vector is a matrix with rows of one element
    rows = bits[..., :: max(bits.shape[-2] // MIN_MARKED_ROWS, 1), :]
    row_ends = rows[..., :: max(rows.shape[-1] - 1, 1)]  # the first and the last element of each row
    earlier_values = row_ends.clone()
    row_ends.fill_(mark)
    return _MarkedParameter(name, row_ends, earlier_values, mark)


# -- Checksum ---------------------------------------------------------------------------------------
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
