"""Train a policy through the real Claude Code (GRPO), on a CPU.

Each sample is a run of the program `claude` in a sandbox of its own. The program acts through a gateway of its own,
which records every token of the policy. Claude Code must be on the PATH and not below `/tmp`:

    npm install --global @anthropic-ai/claude-code@2.1.197

The tiny policy first learns the format of tool calls from demonstrations (see `claude_code_task.py`). Then the reward
rises from about a third to above 0.9. 16 steps take less than 15 minutes on two CPU cores. `--png` writes a plot.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import claude_code_task as task
from grpo_training import Trainer, parse_options, save_plot, train_on_steps, trainer_rank

from verl_server import VerlEngine
from verl_server.agent import RolloutRunner

TASKS_PER_STEP, SAMPLES_PER_TASK = 5, 6
LEARNING_RATE, ENTROPY_WEIGHT = 1e-3, 0.0
FIGURES = {"reward": "reward/mean"}
"""Name of each metric that is printed, by its label."""


async def roll_out_and_train(engine: VerlEngine, trainer: Trainer, steps: int) -> list[Mapping[str, float]]:
    """Train on `steps` steps of samples. Returns the metrics of each step."""
    runner = RolloutRunner(
        task.WriteWord,
        engine,
        limits=task.LIMITS,
        sampling_params=task.SAMPLING_PARAMS,
        n=SAMPLES_PER_TASK,
        max_concurrency=task.MAX_CONCURRENCY,
    )
    rollout = runner.steps(task.endless_tasks(), TASKS_PER_STEP)
    return await train_on_steps(trainer, rollout, steps, FIGURES, task.transcript)


def train(folder: Path, steps: int, seed: int) -> list[Mapping[str, float]]:
    """Train with GRPO. Returns the metrics of each step."""
    path = folder / "policy"
    with trainer_rank(folder) as mesh:
        task.write_policy(path, seed)
        with VerlEngine(mesh, model_path=str(path), random_seed=seed, **task.SERVER_ARGUMENTS) as engine:
            trainer = Trainer(path, mesh, engine, steps, learning_rate=LEARNING_RATE, entropy_weight=ENTROPY_WEIGHT)
            return asyncio.run(roll_out_and_train(engine, trainer, steps))


def main() -> None:
    started = time.monotonic()
    options = parse_options(__doc__, steps=16)
    task.require_claude()
    with tempfile.TemporaryDirectory(prefix="verl-example-") as folder:
        metrics = train(Path(folder), options.steps, options.seed)
    print(f"the whole run took {time.monotonic() - started:.0f} s")
    if options.png is not None:
        curve = (range(len(metrics)), [figures["reward/mean"] for figures in metrics])
        title = "A policy learns a task through the real Claude Code (GRPO)"
        save_plot(options.png, {"mean reward": curve}, title=title, xlabel="step", ylim=(0, 1.02))


if __name__ == "__main__":
    main()
