"""Asynchronous training: the trainer trains on a step while the engine generates the samples of the next step.

The program trains the policy of `calculator.py` twice from the same random weights, each time for the same number of
steps: with `max_staleness=0` (synchronous) and with `max_staleness=1` (asynchronous). The calculator answers as late as
real tools do: most calls take a part of a second, a few take several seconds. `correct_staleness` in
`grpo_training.py` corrects the loss for samples of older weights. One trainer process and one server need about
eight minutes for both settings on two CPU cores. `--png` writes a plot of the reward over the seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import calculator_task as task
from grpo_training import Trainer, parse_options, save_plot, trainer_rank
from word_policy import SERVER_ARGUMENTS, write_policy

from verl_server import RolloutManager, VerlEngine
from verl_server.agent import FunctionTool, RolloutRunner

SETTINGS = {"synchronous": 0, "asynchronous": 1}
"""`max_staleness` of each setting."""
SAMPLES_PER_STEP = task.PROMPTS_PER_STEP * task.SAMPLES_PER_PROMPT
TOOL_MEDIAN_S, TOOL_SIGMA = 0.25, 1.0
"""Log-normal distribution of the seconds of a tool call: mean 0.4 s, one call in 100 takes more than 2.5 s."""
LAST_STEPS = 5
"""Number of steps over which the reward at the end is the mean."""


LATENCIES = random.Random()


async def slow_calculate(expression: str) -> str:
    """Adds two numbers after a random delay."""
    await asyncio.sleep(LATENCIES.lognormvariate(math.log(TOOL_MEDIAN_S), TOOL_SIGMA))
    return task.calculate(expression)


class SlowCalculatorEnvironment(task.CalculatorEnvironment):
    """The environment of `calculator.py` with a slow calculator."""

    calculator = FunctionTool(slow_calculate)


@dataclass
class Curve:
    """Measurements of the training with one setting."""

    step_s: list[float] = field(default_factory=list)
    """Seconds from the start to the delivery of each step."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step."""
    staleness: list[float] = field(default_factory=list)
    """Mean number of steps between the start of a group and its delivery, for each step."""
    seconds: float = 0.0
    """Seconds of all steps, with the training of the last step."""

    @property
    def samples_per_s(self) -> float:
        """Number of trained samples per second."""
        return len(self.rewards) * SAMPLES_PER_STEP / self.seconds


async def train(fleet: RolloutManager, trainer: Trainer, max_staleness: int, steps: int, seed: int) -> Curve:
    """Train for `steps` steps."""
    runner = RolloutRunner(
        SlowCalculatorEnvironment,
        fleet,
        limits=task.LIMITS,
        sampling_params=task.SAMPLING_PARAMS,
        n=task.SAMPLES_PER_PROMPT,
        max_staleness=max_staleness,
        max_concurrency=2 * SAMPLES_PER_STEP,
    )
    curve, started = Curve(), time.perf_counter()
    async with contextlib.aclosing(runner.steps(task.endless_tasks(seed), task.PROMPTS_PER_STEP)) as rollout:
        async for step in rollout:
            curve.step_s.append(time.perf_counter() - started)
            curve.rewards.append(step.metrics["reward/mean"])
            curve.staleness.append(step.metrics["staleness/mean"])
            # In a thread, so that the event loop can run the samples of the next step meanwhile.
            gap = await asyncio.to_thread(trainer.train_step, step.index, step)
            curve.seconds = time.perf_counter() - started
            print(
                f"  step {step.index}: reward {curve.rewards[-1]:.3f}, "
                f"tool used {step.metrics['rewards/used_tool']:.3f}, staleness {curve.staleness[-1]:.2f}, "
                f"log prob gap {gap:.1e}, {step.metrics['time/wait_s']:.1f} s waited, "
                f"{curve.seconds - curve.step_s[-1]:.1f} s trained",
                flush=True,
            )
            if step.index == steps - 1:
                break
    return curve


def report(setting: str, curve: Curve) -> None:
    """Print the figures of one setting."""
    print(
        f"{setting}: {curve.seconds:.0f} s, {curve.samples_per_s:.1f} samples/s, "
        f"mean staleness {fmean(curve.staleness):.2f}, reward at the end {fmean(curve.rewards[-LAST_STEPS:]):.3f}",
        flush=True,
    )


def main() -> None:
    options = parse_options(__doc__, steps=60)
    curves: dict[str, Curve] = {}
    with tempfile.TemporaryDirectory(prefix="verl-example-") as folder:
        path = Path(folder) / "policy"
        write_policy(path, task.VOCABULARY, options.seed)
        with (
            trainer_rank(Path(folder)) as mesh,
            RolloutManager(
                1, mode="standalone", model_path=str(path), random_seed=options.seed, **SERVER_ARGUMENTS
            ) as fleet,
            VerlEngine(mesh, fleet=fleet, model_path=str(path), dtype="float32") as engine,
        ):
            for setting, max_staleness in SETTINGS.items():
                LATENCIES.seed(options.seed)
                # Running samples go on during an update of the weights: their next tokens are of the new weights.
                trainer = Trainer(path, mesh, engine, options.steps, pause_mode="in_place", flush_cache=False)
                curves[setting] = asyncio.run(train(fleet, trainer, max_staleness, options.steps, options.seed))
                report(setting, curves[setting])
    synchronous, asynchronous = (curve.samples_per_s for curve in curves.values())
    print(f"asynchronous training has {asynchronous / synchronous:.2f} times the samples/s of synchronous training")
    if options.png is not None:
        plot(curves, options.png)


def plot(curves: Mapping[str, Curve], png: Path) -> None:
    lines = {
        f"{name} (max_staleness={SETTINGS[name]})": (curve.step_s, curve.rewards) for name, curve in curves.items()
    }
    title = "The same number of training steps (GRPO)"
    save_plot(png, lines, title=title, xlabel="seconds", ylabel="mean reward", ylim=(0, None))


if __name__ == "__main__":
    main()
