"""Agentic RL from scratch: a policy with random weights learns to call a calculator and to read its result (GRPO).

Two trainer ranks (FSDP2) train on samples of two turns, which two replicas behind a router generate. Rank 0 runs the
agents. Each rank trains on half of the batch. After each step both replicas get the new weights. 100 steps take about
seven minutes on two CPU cores. `--png` writes a plot of the reward and of the fraction of samples that use the tool.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import calculator_task as task
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from calculator_training import (
    LIMITS,
    PROMPTS_PER_STEP,
    SAMPLES_PER_PROMPT,
    SAMPLING_PARAMS,
    SERVER_ARGUMENTS,
    Trainer,
)
from torch.distributed.device_mesh import init_device_mesh
from word_policy import write_policy

from verl_server import RolloutManager, VerlEngine
from verl_server.agent import RolloutRunner

NUM_RANKS, NUM_REPLICAS = 2, 2


async def roll_out_and_train(
    fleet: RolloutManager, trainer: Trainer, steps: int, seed: int
) -> list[tuple[float, float]]:
    """The loop of rank 0. Returns the mean reward and the fraction of samples that used the tool, for each step."""
    runner = RolloutRunner(
        task.CalculatorEnvironment,
        fleet,
        limits=LIMITS,
        sampling_params=SAMPLING_PARAMS,
        n=SAMPLES_PER_PROMPT,
    )
    curves: list[tuple[float, float]] = []
    async with contextlib.aclosing(runner.steps(task.endless_tasks(seed), PROMPTS_PER_STEP)) as rollout:
        async for step in rollout:
            gap = await asyncio.to_thread(trainer.train_step, step.index, step)
            curves.append((step.metrics["reward/mean"], step.metrics["rewards/used_tool"]))
            print(
                f"step {step.index}: reward {curves[-1][0]:.3f}, tool used {curves[-1][1]:.3f}, "
                f"log prob gap {gap:.1e}, {step.metrics['time/wait_s']:.1f} s rolled out",
                flush=True,
            )
            if step.index % 10 == 9:
                print("   ", task.transcript(step.samples[0]), flush=True)
            if step.index == steps - 1:
                break
    return curves


def train(rank: int, folder: Path, steps: int, seed: int, png: Path | None) -> None:
    """Train with GRPO. Runs in the process of each trainer rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    path = folder / "policy"
    if rank == 0:
        write_policy(path, task.VOCABULARY, seed)
    dist.barrier()
    with (
        RolloutManager(NUM_REPLICAS, model_path=str(path), random_seed=seed, **SERVER_ARGUMENTS)
        if rank == 0
        else contextlib.nullcontext() as fleet,
        VerlEngine(mesh, fleet=fleet, model_path=str(path), dtype="float32") as engine,
    ):
        trainer = Trainer(path, mesh, engine, steps)
        if fleet is None:
            for index in range(steps):
                trainer.train_step(index, None)
        else:
            curves = asyncio.run(roll_out_and_train(fleet, trainer, steps, seed))
            if png is not None:
                plot(curves, png)
    dist.destroy_process_group()


def plot(curves: Sequence[tuple[float, float]], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([reward for reward, _ in curves], label="mean reward")
    axes.plot([used for _, used in curves], label="fraction of samples that used the tool")
    axes.set(xlabel="step", ylim=(0, 1.02), title="A policy learns to call a calculator (GRPO, from random weights)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(png, dpi=120)
    print(f"curves: {png}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # more threads do not make operations on tiny matrices faster
    with tempfile.TemporaryDirectory(prefix="verl-example-") as folder:
        arguments = (Path(folder), options.steps, options.seed, options.png)
        mp.spawn(train, arguments, nprocs=NUM_RANKS)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
