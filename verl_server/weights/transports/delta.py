"""Transport for slow links: after a complete broadcast, only the elements that changed are sent (see `patches`).

It costs a copy of the last weights on the trainer, and finding the changes takes the time of reading both copies. The
checksums cover the complete result, not only the patch. All tensors are sent when more than half of their bytes
would have to be sent, or when the mirrors may differ after a failure.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

from verl_server.types import Json
from verl_server.weights.broadcast.byte_ranges import split_into_chunks
from verl_server.weights.broadcast.process_group import broadcast_memory
from verl_server.weights.layout import ELEMENT_BYTES, tensor_bytes
from verl_server.weights.transports import distributed, patches
from verl_server.weights.transports.base import SenderSettings, UpdateAttempt

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
            self._patch = patches.encode(self._memory_pairs(self._base, attempt), int(MAX_PATCH_FRACTION * size))

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

    def send(self, attempt: UpdateAttempt, is_loading: Callable[[], bool]) -> None:
        if self._patch is None:
            super().send(attempt, is_loading)
            return
        memory = memoryview(bytearray(self._patch))
        for start, stop in split_into_chunks([(0, len(memory))]):
            self.broadcast(memory[start:stop])

    def finish(self, attempt: UpdateAttempt, succeeded: bool) -> None:
        """Take the tensors over into the base."""
        super().finish(attempt, succeeded)
        self._base_update_id = ""  # an interrupt leaves parts of two updates in the base
        if not succeeded:
            return
        if self._base is None:
            self._base = memoryview(mmap.mmap(-1, self.layout.size_bytes))
        if self._patch is not None:
            targets = [(old, element_bytes) for old, _, element_bytes in self._memory_pairs(self._base, attempt)]
            patches.apply(memoryview(self._patch), targets)
        else:
            for old, new, _ in self._memory_pairs(self._base, attempt):
                old[:] = new
        self._patch, self._base_update_id = None, attempt.id

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
        patches.apply(patch, targets)
        member.mirror.set_progress(self.message["update_id"], len(self.chunks))
