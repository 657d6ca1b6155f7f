"""A coding agent from scratch: sandboxes, a compaction and several rewards, from random weights (GRPO).

One trainer rank and one server. Each sample runs its programs in a sandbox of its own and has two segments, before and
after the compaction (see `coding_task.py`). Both segments are trained with the advantage of their sample. 60 steps take
about eight minutes on two CPU cores, and the last programs then pass 0.99 of their hidden tests. `--png` writes a plot
of the rewards.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import coding_task as task
from grpo_training import Trainer, parse_options, save_plot, train_on_steps, trainer_rank
from word_policy import SERVER_ARGUMENTS, write_policy

from verl_server import VerlEngine
from verl_server.agent import RolloutRunner

TASKS_PER_STEP, SAMPLES_PER_TASK = 2, 32
LEARNING_RATE, ENTROPY_WEIGHT = 2e-3, 0.04
MAX_CONCURRENCY = 4
"""Samples that run at a time, and as many others start or close their sandboxes. More do not help two cores."""
CURVES = {
    "rewards/tests_pass": "fraction of hidden tests that pass",
    "rewards/visible_test_passes": "fraction of first programs that pass the visible test",
    "rewards/summary_is_right": "fraction of correct summaries",
    "rewards/similarity": "fraction of words that agree with the solution",
}
"""Label of each metric in the plot."""
FIGURES = {
    "tests passed": "rewards/tests_pass",
    "visible tests": "rewards/visible_test_passes",
    "summaries": "rewards/summary_is_right",
    "similarity": "rewards/similarity",
}
"""Name of each metric that is printed, by its label."""


async def roll_out_and_train(engine: VerlEngine, trainer: Trainer, steps: int) -> list[Mapping[str, float]]:
    """Train on `steps` steps of samples. Returns the metrics of each step."""
    runner = RolloutRunner(
        task.CodingEnvironment,
        engine,
        limits=task.LIMITS,
        sampling_params=task.SAMPLING_PARAMS,
        n=SAMPLES_PER_TASK,
        max_concurrency=MAX_CONCURRENCY,
    )
    rollout = runner.steps(task.endless_tasks(), TASKS_PER_STEP)
    return await train_on_steps(trainer, rollout, steps, FIGURES, task.transcript)


def train(folder: Path, steps: int, seed: int) -> list[Mapping[str, float]]:
    """Train with GRPO. Returns the metrics of each step."""
    path = folder / "policy"
    write_policy(path, task.VOCABULARY, seed)
    with (
        trainer_rank(folder) as mesh,
        VerlEngine(mesh, model_path=str(path), random_seed=seed, **SERVER_ARGUMENTS) as engine,
    ):
        trainer = Trainer(path, mesh, engine, steps, learning_rate=LEARNING_RATE, entropy_weight=ENTROPY_WEIGHT)
        return asyncio.run(roll_out_and_train(engine, trainer, steps))


def print_times(metrics: Sequence[Mapping[str, float]], total_s: float) -> None:
    """Print where the time went: the mean seconds of a sample in each phase, and of a step."""
    names = [f"time/{phase}_s" for phase in ("queue", "setup", "generate", "tool", "reward")]
    phases = ", ".join(f"{name[5:-2]} {sum(m[name] for m in metrics) / len(metrics):.2f} s" for name in names)
    waited = sum(m["time/wait_s"] for m in metrics)
    print(f"a sample: {phases}; all steps: {waited:.0f} s rolled out of {total_s:.0f} s with the start")


def plot(metrics: Sequence[Mapping[str, float]], png: Path) -> None:
    curves = {label: (range(len(metrics)), [figures[name] for figures in metrics]) for name, label in CURVES.items()}
    title = "A policy learns to write programs (GRPO, from random weights)"
    save_plot(png, curves, title=title, xlabel="step", ylim=(0, 1.02))


def main() -> None:
    started = time.monotonic()
    options = parse_options(__doc__, steps=60)
    with tempfile.TemporaryDirectory(prefix="verl-example-") as folder:
        metrics = train(Path(folder), options.steps, options.seed)
    print_times(metrics, time.monotonic() - started)
    if options.png is not None:
        plot(metrics, options.png)


if __name__ == "__main__":
    main()
