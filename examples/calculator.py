"""Agentic RL from scratch: a policy with random weights learns to call a calculator and to read its result (GRPO).

Two trainer ranks (FSDP2) train on samples of two turns, which two replicas behind a router generate. Rank 0 runs the
agents. Each rank trains on half of the batch. After each step both replicas get the new weights. 100 steps take about
six minutes on two CPU cores. `--png` writes a plot of the reward and of the fraction of samples that use the tool.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import calculator_task as task
import torch.multiprocessing as mp
from grpo_training import Trainer, parse_options, save_plot, train_on_steps, trainer_rank
from word_policy import SERVER_ARGUMENTS, write_policy

from verl_server import RolloutManager, VerlEngine
from verl_server.agent import RolloutRunner

NUM_RANKS, NUM_REPLICAS = 2, 2
CURVES = {"reward/mean": "mean reward", "rewards/used_tool": "fraction of samples that used the tool"}
"""Label of each metric in the plot."""
FIGURES = {"reward": "reward/mean", "tool used": "rewards/used_tool"}
"""Name of each metric that is printed, by its label."""


async def roll_out_and_train(
    fleet: RolloutManager, trainer: Trainer, steps: int, seed: int
) -> list[Mapping[str, float]]:
    """The loop of rank 0. Returns the metrics of each step."""
    runner = RolloutRunner(
        task.CalculatorEnvironment,
        fleet,
        limits=task.LIMITS,
        sampling_params=task.SAMPLING_PARAMS,
        n=task.SAMPLES_PER_PROMPT,
    )
    rollout = runner.steps(task.endless_tasks(seed), task.PROMPTS_PER_STEP)
    return await train_on_steps(trainer, rollout, steps, FIGURES, task.transcript)


def train(rank: int, folder: Path, steps: int, seed: int, png: Path | None) -> None:
    """Train with GRPO. Runs in the process of each trainer rank."""
    path = folder / "policy"
    with (
        trainer_rank(folder, rank, NUM_RANKS) as mesh,
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
            metrics = asyncio.run(roll_out_and_train(fleet, trainer, steps, seed))
            if png is not None:
                plot(metrics, png)


def plot(metrics: Sequence[Mapping[str, float]], png: Path) -> None:
    curves = {label: (range(len(metrics)), [figures[name] for figures in metrics]) for name, label in CURVES.items()}
    title = "A policy learns to call a calculator (GRPO, from random weights)"
    save_plot(png, curves, title=title, xlabel="step", ylim=(0, 1.02))


def main() -> None:
    options = parse_options(__doc__, steps=100)
    with tempfile.TemporaryDirectory(prefix="verl-example-") as folder:
        write_policy(Path(folder) / "policy", task.VOCABULARY, options.seed)
        arguments = (Path(folder), options.steps, options.seed, options.png)
        mp.spawn(train, arguments, nprocs=NUM_RANKS)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
