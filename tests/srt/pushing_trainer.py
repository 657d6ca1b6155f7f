"""A trainer that pushes changed weights once to a running server. A test kills it during the update."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from helpers import change_weights, mesh_of, reference_model

from verl_server import VerlEngine
from verl_server.config import RemoteServer, WeightsConfig


def push_once(folder: str, scratch: Path, transport: str, server: RemoteServer) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=0, world_size=1)
    model = reference_model(folder)
    change_weights(model, seed=77)
    weights = WeightsConfig(transport=transport, folder=scratch / "weights")
    with VerlEngine(mesh_of(1), servers=[server], model_path=folder, dtype="float32", weights=weights) as engine:
        engine.update_weights_from_tensor(model.state_dict().items())
    (scratch / "pushed").touch()
