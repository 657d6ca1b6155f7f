"""Runs inside each SGLang scheduler: read the tensors in place from the arena, load them, report.

SGLang calls it by its `--custom-weight-loader` hook with what `payload` made. An exception here would end
the server, so every outcome goes into this rank's report slot in the arena, where the trainer looks: the
HTTP reply speaks for rank 0 only.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import mmap
import os
import pickle
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from verl_server.weights.checksum import checksum, put
from verl_server.weights.coverage import Coverage
from verl_server.weights.layout import REPORT_BYTES, TABLE_OFFSET, WORD_BYTES

logger = logging.getLogger(__name__)

#: How much of an error, and how many names, fit into a report.
WORDS, NAMED = 1500, 5


@dataclass(frozen=True)
class Descriptor:
    """One update as the server's TP ranks are told of it; each takes the arena of its node."""

    paths: list[str]
    """The arena of each node, as `/proc/PID/fd/N`."""
    ranks_per_node: int
    size: int
    table_bytes: int
    sums_at: int
    slots: int
    """Tensors of the whole model, which is the room that each rank has for its checksums."""
    verify: bool
    update_id: str


def named_tensors_of(descriptor: Descriptor) -> list[tuple[str, torch.Tensor]]:
    """`descriptor` in the form in which SGLang takes tensors: one name, and one empty tensor."""
    return [(json.dumps(asdict(descriptor)), torch.empty(0, dtype=torch.uint8))]


def payload(descriptor: Descriptor) -> str:
    """The same for `/update_weights_from_tensor`, which wants it pickled, in base64.

    Plain pickle, no shared memory: it can be sent again, and no patch of torch's reductions matters.
    """
    return base64.b64encode(pickle.dumps(named_tensors_of(descriptor))).decode()


class _Mapping:
    """The arena mapped once and kept between updates: mapping a gigabyte anew costs its page faults."""

    def __init__(self) -> None:
        self._key: tuple[str, int] | None = None
        self._memory: mmap.mmap | None = None

    def get(self, path: str, size: int) -> mmap.mmap:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            key = (path, os.fstat(fd).st_ino)
            if self._memory is None or key != self._key:
                if self._memory is not None:
                    self._memory.close()
                self._memory, self._key = mmap.mmap(fd, size), key
            return self._memory
        finally:
            os.close(fd)


_mapping = _Mapping()


def _tensors(view: memoryview, table: list[Any], sums: list[int] | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in place. With `sums`, the checksum of each, taken when its bytes are about to be needed."""
    for name, offset, shape, dtype in table:
        kind = getattr(torch, dtype)
        count = math.prod(shape)
        if sums is not None:
            sums.append(checksum(view, offset, count * kind.itemsize))
        yield name, torch.frombuffer(view, dtype=kind, count=count, offset=offset).view(shape)


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """SGLang's custom weight loader: `fn(model, named_tensors)`. Never raises."""
    try:
        _load(model, Descriptor(**json.loads(named_tensors[0][0])))
    except Exception:  # raising would end the server; the trainer misses the report and looks into the log
        logger.exception("the staged weights could not be reached")


def _load(model: Any, descriptor: Descriptor) -> None:
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    rank = get_tensor_model_parallel_rank()
    memory = _mapping.get(descriptor.paths[rank // descriptor.ranks_per_node], descriptor.size)
    report: dict[str, Any] = {"update_id": descriptor.update_id, "ok": False}
    try:
        report = {**report, "ok": True, **_load_from(memory, model, descriptor, rank)}
    except Exception as error:  # noqa: BLE001 - it goes into the report
        report["error"] = f"{type(error).__name__}: {error}"[:WORDS]
        report["trace"] = traceback.format_exc()[-WORDS:]
    raw = json.dumps(report).encode()
    if len(raw) > REPORT_BYTES:  # words that JSON escapes
        raw = json.dumps({**report, "error": "see the server's log", "trace": None, "unwritten": []}).encode()
    start = rank * REPORT_BYTES
    memory[start : start + REPORT_BYTES] = raw.ljust(REPORT_BYTES, b"\0")


def _load_from(memory: mmap.mmap, model: Any, descriptor: Descriptor, rank: int) -> dict[str, Any]:
    """Load what the table says; with `verify`, leave checksums in the arena and tell what was not written."""
    table = json.loads(memory[TABLE_OFFSET : TABLE_OFFSET + descriptor.table_bytes])
    coverage = Coverage(model) if descriptor.verify else None
    sums: list[int] | None = [] if descriptor.verify else None
    view = memoryview(memory)
    unwritten: list[str] = []
    try:
        model.load_weights(_tensors(view, table, sums))
    finally:
        if coverage is not None:
            unwritten = coverage.unwritten()  # takes the marks away: none may stay when the load fails
    view.release()  # BufferError if the model kept a tensor: it would change under its feet
    if sums is not None:
        put(memory, descriptor.sums_at + rank * descriptor.slots * WORD_BYTES, sums)
    return {"unwritten": unwritten[:NAMED], "unwritten_count": len(unwritten)}
