"""Measures what asynchronous training gains: training steps with `max_staleness` 0 and 1 on a standalone fleet.

The agents are those of `bench_agent_loop.py`: turns of a real server and tools with long-tailed latencies. After each
step the trainer really trains on the batch (forward, backward, optimizer) on one core, and pushes the weights. With
`max_staleness=0` the trainer and the engine wait for each other, and every step waits for its slowest sample. With
`max_staleness=1` the samples of the next step are generated meanwhile. The variants alternate. The limit is a run
without training and updates, whose steps wait for nothing but samples.

The trainer has one core and the fleet with the agents another core, in all variants: a standalone fleet has hardware of
its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from agent_workload import CONTEXT_LENGTH, SERVER_ARGUMENTS, TOOL_MESSAGE, draw_tool_latencies
from agent_workload import Plan as WorkloadPlan
from common import (
    CONSOLE,
    Options,
    Target,
    environment,
    parse_options,
    show_table,
    show_targets,
    summarize,
    write_result,
)
from plots import COLOURS, grouped_bars, new_figure, save_figure

from verl_server.types import Json

if TYPE_CHECKING:
    from verl_server import RolloutManager, VerlEngine
    from verl_server.agent import AgentLoop, RolloutStep, Task

NAME = "bench_async"
SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous, staleness 1"
NO_TRAINING = "asynchronous, no training"
VARIANTS = (SYNCHRONOUS, ASYNCHRONOUS, NO_TRAINING)


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurement."""

    rounds: int = 3
    steps: int = 6
    """Training steps of a run. The first step begins with an idle engine in all variants."""
    groups_per_step: int = 8
    samples_per_group: int = 4
    turns_per_sample: int = 12
    tokens_per_turn: int = 12
    epochs: int = 4
    """Passes of the trainer over the batch of a step."""


class Trainer:
    """A policy, its optimizer and the engine that pushes its weights."""

    def __init__(self, model: Path, engine: VerlEngine, plan: Plan, core: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._engine, self._plan, self._core = engine, plan, core
        self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-5)

    def train(self, step: RolloutStep) -> None:
        """Train on all samples of a step and push the weights. Runs in a thread."""
        import torch

        os.sched_setaffinity(0, {self._core})
        batch = step.batch()
        mask = torch.cat([torch.zeros(batch["prompts"].shape), batch["response_mask"].float()], dim=1)[:, 1:]
        for _ in range(self._plan.epochs):
            for start in range(0, len(mask), 8):
                rows = slice(start, start + 8)
                logits = self.policy(
                    input_ids=batch["input_ids"][rows], attention_mask=batch["attention_mask"][rows]
                ).logits
                chosen = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][rows, 1:, None]).squeeze(-1)
                (-(chosen * mask[rows]).sum() / mask[rows].sum()).backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
        self._engine.update_weights_from_tensor(
            self.policy.state_dict().items(), pause_mode="in_place", flush_cache=False
        )


def make_loop(plan: Plan) -> AgentLoop:
    """An agent whose tool has the latencies of `bench_agent_loop.py`."""
    from verl_server.agent import AgentLoop, Episode

    sessions = plan.groups_per_step * plan.samples_per_group
    latencies = draw_tool_latencies(WorkloadPlan(num_sessions=sessions, turns_per_session=plan.turns_per_sample))
    numbers = itertools.count()

    class SlowToolLoop(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.generate()
            for latency_s in latencies[next(numbers) % sessions]:
                await asyncio.sleep(latency_s)
                await episode.generate([TOOL_MESSAGE])

    return SlowToolLoop()


def endless_tasks() -> Iterator[Task]:
    from verl_server.agent import Task

    for number in itertools.count():
        yield Task(f"t{number}", [{"role": "user", "content": f"question {number}"}])


async def run_steps(fleet: RolloutManager, trainer: Trainer, plan: Plan, variant: str) -> Json:
    """One run. Returns its seconds, and per step the seconds of waiting and training, and the age of the samples."""
    from verl_server.agent import RolloutLimits, RolloutRunner

    limits = RolloutLimits(max_response_tokens=CONTEXT_LENGTH - 64, max_turns=plan.turns_per_sample)
    params = {"temperature": 1.0, "max_new_tokens": plan.tokens_per_turn, "ignore_eos": True}
    runner = RolloutRunner(
        make_loop(plan), fleet, limits=limits, sampling_params=params, n=plan.samples_per_group,
        max_staleness=0 if variant == SYNCHRONOUS else 1,
    )  # fmt: skip
    found: Json = {"wait_s": [], "train_s": [], "staleness": []}
    started = time.perf_counter()
    async with contextlib.aclosing(runner.steps(endless_tasks(), plan.groups_per_step)) as steps:
        async for step in steps:
            begin = time.perf_counter()
            if variant != NO_TRAINING:
                await asyncio.to_thread(trainer.train, step)
            found["train_s"].append(time.perf_counter() - begin)
            found["wait_s"].append(step.metrics["time/wait_s"])
            found["staleness"].append(step.metrics["staleness/max"])
            if errors := [sample.error for sample in step.samples if sample.error]:
                raise RuntimeError(f"a sample failed: {errors[0]}")
            if step.index == plan.steps - 1:
                found["seconds"] = time.perf_counter() - started
                break
    return found


def measure(fleet: RolloutManager, engine: VerlEngine, model: Path, plan: Plan, trainer_core: int) -> Json:
    """Run all variants in each round, after a run that is not counted. Returns the runs of each variant."""
    trainer = Trainer(model, engine, plan, trainer_core)
    found: Json = {variant: [] for variant in VARIANTS}
    asyncio.run(run_steps(fleet, trainer, replace(plan, steps=1), SYNCHRONOUS))
    for index in range(plan.rounds):
        for variant in [*VARIANTS[index % 3 :], *VARIANTS[: index % 3]]:
            found[variant].append(asyncio.run(run_steps(fleet, trainer, plan, variant)))
        durations = ", ".join(f"{variant} {runs[-1]['seconds']:.1f} s" for variant, runs in found.items())
        CONSOLE.print(f"round {index + 1}: {durations}", style="dim")
    return found


def report(options: Options, machine: Json, plan: Plan, found: Json) -> None:
    """Print the tables and the targets, and write the result file and the plot."""
    samples = plan.steps * plan.groups_per_step * plan.samples_per_group
    rates = {variant: [samples / run["seconds"] for run in found[variant]] for variant in VARIANTS}
    rows = [
        [
            variant,
            f"{summarize(rates[variant]).median:.2f}",
            f"{summarize([value for run in found[variant] for value in run['wait_s']]).median:.1f}",
            f"{summarize([value for run in found[variant] for value in run['train_s']]).median:.1f}",
            f"{max(value for run in found[variant] for value in run['staleness']):.0f}",
        ]
        for variant in VARIANTS
    ]
    title = f"{plan.steps} steps of {plan.groups_per_step} groups of {plan.samples_per_group} samples"
    show_table(title, ["variant", "samples/s", "wait of a step, s", "training of a step, s", "largest age"], rows)

    def ratio(variant: str, baseline: str) -> float:
        return summarize([a / b for a, b in zip(rates[variant], rates[baseline], strict=True)]).median

    targets = [
        Target("throughput over synchronous training", ratio(ASYNCHRONOUS, SYNCHRONOUS), 1.4, True),
        Target("throughput over no training", ratio(ASYNCHRONOUS, NO_TRAINING), 0.7, True),
    ]
    show_targets(targets)
    figures = {"samples_per_s": {variant: asdict(summarize(rates[variant])) for variant in VARIANTS}}
    write_result(options, NAME, machine, settings=asdict(plan), figures=figures, targets=targets, samples=found)
    figure, (axis,) = new_figure(1, f"{title}, {machine['cores']} cores")
    grouped_bars(
        axis,
        [""],
        {variant: [summarize(rates[variant])] for variant in VARIANTS},
        title="Trained samples per second (median; whiskers: quartiles)",
        ylabel="samples/s",
        colours=dict(zip(VARIANTS, (COLOURS[0], COLOURS[2], COLOURS[1]), strict=True)),
    )
    axis.legend(fontsize=8, frameon=False)
    save_figure(figure, options.png)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, help="number of rounds (default: 3, quick: 1)")


def main() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from verl_server import RolloutManager, VerlEngine
    from verl_server.tiny import make_model

    options = parse_options(NAME, "Measures asynchronous training of agents that wait for tools.", _add_options)
    plan = Plan(rounds=1, steps=2, groups_per_step=2, turns_per_sample=3) if options.quick else Plan()
    if options.extra.rounds:
        plan = replace(plan, rounds=options.extra.rounds)
    machine = environment()
    torch.set_num_threads(1)
    trainer_core, fleet_core = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {fleet_core})  # the processes of the fleet inherit it
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as scratch:
        model = make_model(Path(scratch) / "model", "qwen3", context_length=CONTEXT_LENGTH)
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        with (
            RolloutManager(1, mode="standalone", model_path=str(model), **SERVER_ARGUMENTS) as fleet,
            VerlEngine(mesh, fleet=fleet, model_path=str(model), dtype="float32") as engine,
        ):
            found = measure(fleet, engine, model, plan, trainer_core)
        dist.destroy_process_group()
    report(options, machine, plan, found)


if __name__ == "__main__":
    main()
