"""Runs inside each SGLang scheduler: read the tensors in place from the arena, load them, report.

SGLang calls it by its `--custom-weight-loader` hook with what `payload` made. An exception here would end
the server, so every outcome goes into this rank's report slot in the arena, where the trainer looks: the
HTTP reply speaks for rank 0 only.
"""

from __future__ import annotations

import base64
import json
import logging
import mmap
import os
import pickle
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from verl_server.weights.layout import REPORT_BYTES, TABLE_OFFSET

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Descriptor:
    """One update as the server's TP ranks are told of it; each takes the arena of its node."""

    paths: list[str]
    """The arena of each node, as `/proc/PID/fd/N`."""
    ranks_per_node: int
    size: int
    table_bytes: int
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


def _tensors(view: memoryview, table: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, offset, shape, dtype in table:
        count = 1
        for extent in shape:
            count *= extent
        flat = torch.frombuffer(view, dtype=getattr(torch, dtype), count=count, offset=offset)
        yield name, flat.view(shape)


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
        table = json.loads(memory[TABLE_OFFSET : TABLE_OFFSET + descriptor.table_bytes])
        view = memoryview(memory)
        model.load_weights(_tensors(view, table))
        view.release()  # BufferError if the model kept a tensor: it would change under its feet
        report = {"update_id": descriptor.update_id, "ok": True, "tensors": len(table)}
    except Exception as error:  # noqa: BLE001 - it goes into the report
        report["error"] = f"{type(error).__name__}: {error}"
        report["trace"] = traceback.format_exc()[-2000:]
    raw = json.dumps(report).encode()[:REPORT_BYTES]
    start = rank * REPORT_BYTES
    memory[start : start + REPORT_BYTES] = raw.ljust(REPORT_BYTES, b"\0")
