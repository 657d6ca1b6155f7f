"""Transport for slow links: after a complete broadcast, only the elements that changed are sent.

It costs a copy of the last weights on the trainer, and finding the changes takes the time of reading both copies. The
checksums cover the complete result, not only the patch. All tensors are sent when more than half of their bytes
would have to be sent, or when the mirrors may differ after a failure.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from verl_server.types import Json
from verl_server.weights.arena import ELEMENT_BYTES, tensor_bytes
from verl_server.weights.transports import distributed
from verl_server.weights.transports.base import SenderSettings, UpdateAttempt
from verl_server.weights.transports.distributed import broadcast_memory, split_into_chunks

# -- Patches ----------------------------------------------------------------------------------------
# Encoding of the changes between two versions of the same tensors. Pure functions.
#
# A patch begins with a header for each tensor: the number of changed elements, and the size of its gaps in bytes (two
# int32). Then follow, for each tensor, the gaps between the changed elements (uint16, or uint32 if a gap is too large)
# and the new values of the changed elements.

HEADER = np.dtype([("count", "<u4"), ("gap_bytes", "<u4")])
CHUNK_ELEMENTS = 1 << 22
"""Number of elements that are compared at the same time: positions need 8 bytes each."""
_UNSIGNED_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def as_unsigned(memory: memoryview, element_bytes: int) -> npt.NDArray[np.unsignedinteger]:
    """A tensor's memory as unsigned integers of its element size. Equal bits compare as equal, also for NaN."""
    return np.frombuffer(memory, dtype=_UNSIGNED_TYPES[element_bytes])


def encode(tensors: Iterable[tuple[memoryview, memoryview, int]], max_bytes: int) -> bytes | None:
    """The patch for the old memory, new memory and element size in bytes of each tensor.

    Returns None if the patch would be longer than `max_bytes`. Needs memory for about twice the patch.
    """
    headers, parts, length = [], [], 0
    for old_memory, new_memory, element_bytes in tensors:
        length += HEADER.itemsize
        max_count = (max_bytes - length) // (2 + element_bytes)
        found = _find_changes(as_unsigned(old_memory, element_bytes), as_unsigned(new_memory, element_bytes), max_count)
        if found is None:
            return None
        gaps, values = found
        gap_bytes = 2 if not len(gaps) or int(gaps.max()) <= np.iinfo(np.uint16).max else 4
        headers.append((len(gaps), gap_bytes))
        length += len(gaps) * (gap_bytes + element_bytes)
        if length > max_bytes:
            return None
        parts += [gaps.astype(_UNSIGNED_TYPES[gap_bytes]).tobytes(), values.tobytes()]
    return b"".join([np.array(headers, dtype=HEADER).tobytes(), *parts])


def _find_changes(
    old: npt.NDArray[np.unsignedinteger], new: npt.NDArray[np.unsignedinteger], max_count: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.unsignedinteger]] | None:
    """The gaps between the changed elements, and their new values. None if more than `max_count` elements changed."""
    gaps: list[npt.NDArray[np.uint32]] = [np.empty(0, dtype=np.uint32)]
    values = [new[:0]]
    count = last = 0
    for start in range(0, len(new), CHUNK_ELEMENTS):
        chunk = new[start : start + CHUNK_ELEMENTS]
        changed = np.flatnonzero(old[start : start + CHUNK_ELEMENTS] != chunk)
        count += len(changed)
        if count > max_count:
            return None
        if len(changed):
            gaps.append(np.diff(changed, prepend=last - start).astype(np.uint32))
            values.append(chunk[changed])
            last = start + int(changed[-1])
    return np.concatenate(gaps), np.concatenate(values)


def apply(patch: memoryview, tensors: Sequence[tuple[memoryview, int]]) -> None:
    """Apply a patch to the memory of each tensor, given with its element size in bytes.

    Raises ValueError if the patch does not fit the tensors.
    """
    headers = np.frombuffer(patch[: len(tensors) * HEADER.itemsize], dtype=HEADER)
    offset = len(tensors) * HEADER.itemsize
    for (memory, element_bytes), header in zip(tensors, headers, strict=True):
        count, gap_bytes = int(header["count"]), int(header["gap_bytes"])
        gaps = np.frombuffer(patch[offset : offset + count * gap_bytes], dtype=_UNSIGNED_TYPES[gap_bytes])
        offset += count * gap_bytes
        values = np.frombuffer(patch[offset : offset + count * element_bytes], dtype=_UNSIGNED_TYPES[element_bytes])
        offset += count * element_bytes
        target = as_unsigned(memory, element_bytes)
        last = 0
        for start in range(0, count, CHUNK_ELEMENTS):
            positions = np.cumsum(gaps[start : start + CHUNK_ELEMENTS], dtype=np.int64)
            positions += last
            last = int(positions[-1])
            if last >= len(target):
                raise ValueError("the patch changes elements after the end of a tensor")
            target[positions] = values[start : start + CHUNK_ELEMENTS]
    if offset != len(patch):
        raise ValueError(f"the patch has {len(patch)} bytes, but its headers describe {offset} bytes")


# -- Delta ------------------------------------------------------------------------------------------

MAX_PATCH_FRACTION = 0.5
"""Maximum size of a patch as a fraction of the tensors' size. Above it, the tensors themselves are sent."""


class Sender(distributed.Sender):
    """Broadcasts a patch to the mirrors, or all tensors where a patch does not pay off."""

    name = "delta"

    def __init__(self, settings: SenderSettings) -> None:
        super().__init__(settings)
        self._base: memoryview | None = None
        """The tensors of the last successful update, at the same offsets as in the arena."""
        self._base_update_id = ""
        """Id of the last update if it succeeded, else empty."""
        self._patch: bytes | None = None

    def prepare(self, attempt: UpdateAttempt) -> None:
        super().prepare(attempt)  # leaves the group if its members have changed
        self._patch = None
        if self.group is None:  # the mirrors of a new group are empty
            self._base, self._base_update_id = None, ""
        if self._base_update_id and self._base is not None:
            size = sum(tensor_bytes(self.layout.slots[name].spec) for name in attempt.names)
            self._patch = encode(self._memory_pairs(self._base, attempt), int(MAX_PATCH_FRACTION * size))

    def _memory_pairs(self, base: memoryview, attempt: UpdateAttempt) -> Iterator[tuple[memoryview, memoryview, int]]:
        """For each tensor: its memory in the base, its memory in the arena, and its element size in bytes."""
        for name in attempt.names:
            slot = self.layout.slots[name]
            byte_range = slice(slot.offset, slot.offset + tensor_bytes(slot.spec))
            yield base[byte_range], self.arena.memory[byte_range], ELEMENT_BYTES[slot.spec.dtype]

    def loader_message(self, attempt: UpdateAttempt, member_index: int) -> Json:
        message = super().loader_message(attempt, member_index)
        if self._patch is not None:
            message |= {"base_update_id": self._base_update_id, "patch_bytes": len(self._patch)}
        return message

    def send(self, attempt: UpdateAttempt, is_wanted: Callable[[], bool]) -> None:
        if self._patch is None:
            super().send(attempt, is_wanted)
            return
        memory = memoryview(bytearray(self._patch))
        for start, stop in split_into_chunks([(0, len(memory))]):
            self.broadcast(memory[start:stop])

    def deliver(self, attempt: UpdateAttempt, checksums: Sequence[int], is_wanted: Callable[[], bool]) -> None:
        """Take the tensors over into the base when all mirrors have them: before the pause, because it takes time."""
        self._base_update_id = ""  # a failure or an interrupt leaves parts of two updates in the base or in mirrors
        super().deliver(attempt, checksums, is_wanted)
        if self._base is None:
            self._base = memoryview(mmap.mmap(-1, self.layout.size_bytes))
        if self._patch is not None:
            targets = [(old, element_bytes) for old, _, element_bytes in self._memory_pairs(self._base, attempt)]
            apply(memoryview(self._patch), targets)
        else:
            for old, new, _ in self._memory_pairs(self._base, attempt):
                old[:] = new
        self._patch, self._base_update_id = None, attempt.id

    def finish(self, attempt: UpdateAttempt, succeeded: bool) -> None:
        super().finish(attempt, succeeded)
        if not succeeded:
            self._base_update_id = ""

    def close(self) -> None:
        super().close()
        self._base = None


class Receiver(distributed.Receiver):
    """Applies the patch to the mirror on this machine."""

    def receive(self) -> None:
        if "base_update_id" in self.message:
            self._receive_patch()
        else:
            super().receive()
        self.member.base_update_id = self.message["update_id"]

    def _receive_patch(self) -> None:
        member = self.member
        patch = memoryview(bytearray(self.message["patch_bytes"]))
        for start, stop in split_into_chunks([(0, len(patch))]):
            broadcast_memory(member.group, patch[start:stop], self.message["timeout_s"])
        if member.base_update_id != self.message["base_update_id"]:
            raise ValueError("this machine's copy of the weights is not the version that the patch starts from")
        targets = [
            (member.mirror.view[start:stop], ELEMENT_BYTES[dtype])
            for (start, stop), (_, _, _, dtype) in zip(self.tensor_ranges, self.rows, strict=True)
        ]
        member.base_update_id = ""
        apply(patch, targets)
