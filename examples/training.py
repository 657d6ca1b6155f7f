"""Shared by the examples of fleets: a trainer of one rank with a tiny random policy, and the memory use of a fleet."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM

from verl_server import RolloutManager
from verl_server.tiny import make_model

MB = 1 << 20


@dataclass
class Trainer:
    """A minimal trainer of one rank."""

    mesh: DeviceMesh
    folder: Path
    """Temporary directory for checkpoints."""
    model_path: str
    """Checkpoint of the policy."""
    policy: Any
    """The policy as a `transformers` model in float32."""

    def step(self) -> None:
        """Change all weights slightly. Stands for the loss, the backward pass and the optimizer step."""
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))


@contextlib.contextmanager
def trainer() -> Iterator[Trainer]:
    """Make a tiny policy and a process group of one rank. Both are removed at the end of the context."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="verl-example-") as name:
        folder = Path(name)
        path = str(make_model(folder / "policy", hidden_size=256, layers=4, intermediate_size=1024))
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
            yield Trainer(mesh, folder, path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        finally:
            dist.destroy_process_group()


def memory_mb(fleet: RolloutManager) -> float:
    """Memory in MiB that only the servers of the fleet use (unique set size of all their processes)."""
    total = 0
    for replica in fleet.replicas:
        pids = replica.pids
        assert pids is not None
        total += sum(psutil.Process(pid).memory_full_info().uss for pid in (pids.main, *pids.workers))
    return total / MB
