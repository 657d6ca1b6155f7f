"""A trainer that a test kills: starts an engine, then generates and pushes weights until it is ended.

The server is spawned, not forked: the tests kill the trainer at moments of a start that takes its full time.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import torch
import torch.distributed as dist
from helpers import GREEDY, MARK, mesh_of, reference_model


def main(folder: str, tp_size: int, scratch: str, mark: str, server_python: str | None = None) -> None:
    """Main function of the trainer process. All processes that it starts inherit `mark`."""
    multiprocessing.set_start_method("fork", force=True)  # the default of a program
    os.environ[MARK] = mark
    output = os.open(f"{scratch}/out", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=0, world_size=1)
    from verl_server import VerlEngine

    Path(scratch, "starting").touch()
    engine = VerlEngine(
        mesh_of(1),
        model_path=folder,
        dtype="float32",
        max_total_tokens=8192,
        tp_size=tp_size,
        log_dir=scratch,
        use_forkserver=False,
        server_python=server_python,
    )
    assert engine.adapter is not None
    Path(scratch, "url").write_text(f"{engine.adapter.base_url} {engine.adapter.pids.main}")
    model = reference_model(folder)
    Path(scratch, "working").touch()
    while True:
        engine.generate(input_ids=[1, 2, 3], sampling_params=GREEDY)
        engine.update_weights_from_tensor(model.state_dict().items())
