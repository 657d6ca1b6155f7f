"""The tests of `test_visible_devices.py` that need servers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from helpers import Ranks, mesh_of

from verl_server import VerlEngine
from verl_server.server.environment import (
    VISIBLE_DEVICES,
)


def _engine_of_two_ranks(rank: int, world: int, folder: str) -> tuple[str | None, set[int], set[int]] | None:
    """On rank 0: the GPUs and the cores of the server, and the cores of this rank afterwards."""
    os.environ[VISIBLE_DEVICES] = str(7 - rank)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[-1 - rank % len(cores)]})  # as srun and numactl do
    try:
        with VerlEngine(mesh_of(world), model_path=folder, max_total_tokens=4096, use_forkserver=False) as engine:
            if engine.adapter is None:
                return None
            variables = Path(f"/proc/{engine.adapter.pids.main}/environ").read_bytes().split(b"\0")
            gpus = next(value.decode() for value in variables if value.startswith(VISIBLE_DEVICES.encode()))
            return gpus, os.sched_getaffinity(engine.adapter.pids.main), os.sched_getaffinity(0)
    finally:
        del os.environ[VISIBLE_DEVICES]
        os.sched_setaffinity(0, cores)


def test_a_server_gets_the_gpus_and_the_cores_of_two_ranks(two_ranks: Ranks, tiny: Callable[..., Path]) -> None:
    last_cores = sorted(os.sched_getaffinity(0))[-2:]
    expected = (f"{VISIBLE_DEVICES}=7,6", set(last_cores), {last_cores[-1]})
    assert two_ranks.run(_engine_of_two_ranks, str(tiny("qwen3"))) == [expected, None]
