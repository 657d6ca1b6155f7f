"""Transport for a trainer and servers on one machine, with staging memory that is smaller than the model.

The tensors go through a pair of buckets in host memory. Loading begins before the last tensor is known. Therefore a bad
tensor in the middle of a generator is found part-way and leaves the weights torn. A dict or a list is checked
completely before generation is paused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from verl_server.types import Json
from verl_server.weights.arena import Report
from verl_server.weights.buckets import BucketReader, Buckets, BucketsLayout
from verl_server.weights.transports import base

_opened: dict[str, Buckets] = {}
"""The last pair of buckets, by location. It is kept because a new mapping costs its page faults, and because a
GPU's IPC handle should be opened only once."""


class Receiver(base.Receiver):
    """Reads the tensors from a pair of buckets."""

    def __init__(self, message: Json, tp_rank: int) -> None:
        super().__init__(message, tp_rank)
        self._receiver = message["first_receiver"] + tp_rank
        descriptions = message["buckets"]
        self._buckets = self._open(descriptions[self._receiver % len(descriptions)], BucketsLayout(**message["layout"]))
        self._reader = BucketReader(
            self._buckets,
            message["update_number"],
            index=self._receiver,
            num_writers=message["num_writers"],
            require_peers=self._require_trainer,
            deadline=time.monotonic() + message["timeout_s"],
        )

    def _open(self, description: Json, layout: BucketsLayout) -> Buckets:
        key = description["location"]
        if key not in _opened:
            while _opened:
                _opened.popitem()[1].close()
            buckets = Buckets.open(key, layout)
            try:
                buckets.open_buckets(description)
            except Exception as error:
                report = Report(self.message["update_id"], ok=False, error=f"{type(error).__name__}: {error}"[:1500])
                buckets.reports.write(self._receiver, report, [])
                buckets.close()
                raise
            _opened[key] = buckets
        return _opened[key]

    def _require_trainer(self) -> None:
        if not self._buckets.owner_is_alive():
            raise ConnectionError("the trainer's process has ended")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._reader.tensors()

    def tensors_to_copy(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._buckets.memory.pin()
        return self.tensors()

    @property
    def num_sharing(self) -> int:
        return int(self.message["tp_size"]) if self._buckets.layout.in_host_memory else 1

    def contains(self, tensor: torch.Tensor) -> bool:
        return self._buckets.memory.contains(tensor)

    def send_report(self, report: Report, checksums: list[int]) -> None:
        self._buckets.reports.write(self._receiver, report, checksums)
        if not report.ok:
            progress = self._buckets.progress(self.message["update_number"])
            progress.fail(f"a TP rank of a server could not load the weights: {report.error}")
