"""A trainer that pushes changed weights once into a server that runs already. A test kills it on the way."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from helpers import change_weights, mesh_of, reference_model

from verl_server import VerlEngine
from verl_server.config import RemoteServer, WeightsConfig


def main(folder: str, scratch: str, transport: str, url: str) -> None:
    keys = sys.stdin.read().split()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=0, world_size=1)
    model = reference_model(folder)
    change_weights(model, seed=77)
    weights = WeightsConfig(transport=transport, folder=f"{scratch}/weights")
    with VerlEngine(
        mesh_of(1), servers=[RemoteServer(url, *keys)], model_path=folder, dtype="float32", weights=weights
    ) as engine:
        engine.update_weights_from_tensor(model.state_dict().items())
    print("pushed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
