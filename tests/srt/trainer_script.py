"""A trainer that a test kills: starts an engine, then generates and pushes weights until it is ended."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from helpers import GREEDY, mesh_of, reference_model


def main(folder: str, tp_size: str, scratch: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=0, world_size=1)
    from verl_server import VerlEngine

    Path(scratch, "starting").touch()
    engine = VerlEngine(
        mesh_of(1), model_path=folder, dtype="float32", max_total_tokens=8192, tp_size=int(tp_size), log_dir=scratch
    )
    Path(scratch, "url").write_text(f"{engine.adapter.base_url} {engine.adapter.asynchronous.process.pid}")
    model = reference_model(folder)
    Path(scratch, "working").touch()
    while True:
        engine.generate(input_ids=[1, 2, 3], sampling_params=GREEDY)
        engine.update_weights_from_tensor(model.state_dict().items())


if __name__ == "__main__":
    main(*sys.argv[1:])
