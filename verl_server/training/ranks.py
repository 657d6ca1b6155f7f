"""The process group of a training script, which runs with torchrun or alone."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

T = TypeVar("T")


@dataclass(frozen=True)
class TrainerRanks:
    """The ranks of a training script, see `trainer_ranks`."""

    rank: int
    """Number of this rank."""
    size: int
    """Number of ranks."""
    device: torch.device
    """Where this rank computes: its GPU, or the CPU."""
    mesh: DeviceMesh
    """All ranks, for `VerlEngine`."""
    device_mesh: DeviceMesh
    """All ranks, for `fully_shard` (FSDP2)."""

    def shard(self, model: PreTrainedModel) -> None:
        """Shard the parameters of a model of Hugging Face over all ranks (FSDP2). One rank keeps it whole."""
        if self.size == 1:
            return
        layers = model._no_split_modules or ()
        for module in list(model.modules()):
            if type(module).__name__ in layers:
                fully_shard(module, mesh=self.device_mesh)
        fully_shard(model, mesh=self.device_mesh)

    def broadcast(self, value: T | None) -> T:
        """The value of rank 0, on all ranks. It is pickled."""
        if self.size == 1:
            assert value is not None
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.mesh.get_group())
        assert values[0] is not None
        return values[0]

    def max(self, value: float) -> float:
        """The largest value of all ranks, NaN if one of them is NaN. All ranks call this."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.mesh.get_group())
        return math.nan if any(map(math.isnan, values)) else max(values)


@contextlib.contextmanager
def trainer_ranks(timeout_s: float = 7200.0) -> Iterator[TrainerRanks]:
    """Join the process group that torchrun describes, or make one of this process alone. Leaves it at the end.

    `timeout_s`: how long a rank waits for the others in a collective, in seconds. Rank 0 rolls out and tests meanwhile.
    """
    timeout = timedelta(seconds=timeout_s)
    has_gpu = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        size, device = dist.get_world_size(), torch.device("cuda" if has_gpu else "cpu")
        mesh = init_device_mesh("cpu", (size,))
        yield TrainerRanks(dist.get_rank(), size, device, mesh, init_device_mesh("cuda", (size,)) if has_gpu else mesh)
    finally:
        dist.destroy_process_group()
