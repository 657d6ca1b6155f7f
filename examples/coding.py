"""A coding agent from scratch: sandboxes, a compaction and several rewards, from random weights (GRPO).

One trainer rank and one server. Each sample runs its programs in a sandbox of its own and has two segments, before and
after the compaction (see `coding_task.py`). Both segments are trained with the advantage of their sample. `--png`
writes a plot of the rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import coding_task as task
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from word_policy import CONTEXT_LENGTH, write_policy

from verl_server import VerlEngine
from verl_server.agent import RolloutLimits, RolloutRunner, RolloutStep
from verl_server.demo import grpo, policy

TASKS_PER_STEP, SAMPLES_PER_TASK = 2, 32
EPOCHS, MINIBATCHES = 2, 4
LEARNING_RATE, CLIP, ENTROPY_WEIGHT = 1e-3, 0.2, 0.08
LIMITS = RolloutLimits(max_response_tokens=32, max_turns=3)
MAX_CONCURRENCY = 4
"""Samples that run at a time, and as many others start or close their sandboxes. More do not help two cores."""
CURVES = {
    "rewards/tests_pass": "fraction of hidden tests that pass",
    "rewards/summary_is_right": "fraction of correct summaries",
    "rewards/has_format": "fraction of words of the correct kind",
    "rewards/first_passes": "fraction of first programs that are correct",
}


def make_batch(step: RolloutStep) -> tuple[grpo.Batch, Mapping[str, torch.Tensor]]:
    """The batch for GRPO with a row for each segment, and the inputs of the model for the same rows.

    The rows of a sample have its advantage. The weight of a segment is in the mask, so that a segment with the weight
    0.5 counts half in the loss.
    """
    if failures := [sample.error for sample in step.samples if sample.error is not None]:
        raise RuntimeError(f"{len(failures)} samples failed: {failures[0]}")
    fields = step.batch()
    rewards = [float(sample.reward or 0.0) for sample in step.samples]
    advantages = torch.tensor(grpo.group_advantages(rewards, SAMPLES_PER_TASK), dtype=torch.float32)
    prompt_zeros = torch.zeros(fields["prompts"].shape)
    batch = grpo.Batch(
        tokens=fields["input_ids"],
        mask=torch.cat([prompt_zeros, fields["response_mask"] * fields["loss_weight"][:, None]], dim=1),
        rollout_logprobs=torch.cat([prompt_zeros, fields["rollout_log_probs"]], dim=1),
        advantages=advantages[fields["group_index"] * SAMPLES_PER_TASK + fields["sample_index"]],
    )
    return batch, {name: fields[name] for name in ("input_ids", "attention_mask", "position_ids")}


class Trainer:
    """The policy, its optimizer and the engine that gets its weights."""

    def __init__(self, model: Any, engine: VerlEngine, steps: int) -> None:
        self._model, self._engine, self._steps = model, engine, steps
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        engine.update_weights_from_tensor(policy.named_weights(model))

    def train_step(self, step: RolloutStep) -> float:
        """Train on a step and push the weights.

        Returns the largest difference between the log probabilities of the trainer and of the rollout.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step.index + 1) / 5) * (1.0 - 0.5 * step.index / self._steps)
        batch, inputs = make_batch(step)
        gap = 0.0
        for epoch in range(EPOCHS):
            for part, rows in enumerate(torch.randperm(len(batch.tokens)).chunk(MINIBATCHES)):
                own = grpo.Batch(*(values[rows] for values in vars(batch).values()))
                logits = self._model(**{name: values[rows] for name, values in inputs.items()}, use_cache=False).logits
                logprobs, entropy = grpo.token_logprobs(logits, own.tokens)
                if epoch == part == 0:
                    gap = grpo.logprob_gap(logprobs.detach(), own)[0]
                loss = grpo.policy_loss(
                    logprobs, entropy, own, clip=CLIP, entropy_weight=ENTROPY_WEIGHT, num_tokens=float(own.mask.sum())
                )
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
                self._optimizer.step()
                self._optimizer.zero_grad()
        self._engine.update_weights_from_tensor(policy.named_weights(self._model))
        return gap


async def roll_out_and_train(engine: VerlEngine, trainer: Trainer, steps: int) -> list[Mapping[str, float]]:
    """Train on `steps` steps of samples. Returns the metrics of each step."""
    runner = RolloutRunner(
        task.CodingEnvironment,
        engine,
        limits=LIMITS,
        sampling_params={"temperature": 1.0, "max_new_tokens": task.MAX_TURN_TOKENS},
        n=SAMPLES_PER_TASK,
        max_concurrency=MAX_CONCURRENCY,
    )
    metrics: list[Mapping[str, float]] = []
    async with contextlib.aclosing(runner.steps(task.endless_tasks(), TASKS_PER_STEP)) as rollout:
        async for step in rollout:
            started = time.monotonic()
            gap = await asyncio.to_thread(trainer.train_step, step)
            metrics.append(step.metrics)
            print(
                f"step {step.index}: tests passed {step.metrics['rewards/tests_pass']:.3f}, "
                f"summaries {step.metrics['rewards/summary_is_right']:.3f}, "
                f"format {step.metrics['rewards/has_format']:.3f}, "
                f"first programs {step.metrics['rewards/first_passes']:.3f}, log prob gap {gap:.1e}, "
                f"{step.metrics['time/wait_s']:.1f} s rolled out, {time.monotonic() - started:.1f} s trained",
                flush=True,
            )
            if step.index % 10 == 9:
                print("   ", task.transcript(step.samples[0]), flush=True)
            if step.index == steps - 1:
                break
    return metrics


def train(folder: Path, steps: int, seed: int) -> list[Mapping[str, float]]:
    """Train with GRPO. Returns the metrics of each step."""
    from transformers import AutoModelForCausalLM

    path = folder / "policy"
    write_policy(path, task.VOCABULARY, seed)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        with VerlEngine(
            init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)),
            model_path=str(path),
            dtype="float32",
            context_length=CONTEXT_LENGTH,
            max_total_tokens=8192,
            random_seed=seed,
            log_level="warning",
        ) as engine:
            trainer = Trainer(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), engine, steps)
            return asyncio.run(roll_out_and_train(engine, trainer, steps))
    finally:
        dist.destroy_process_group()


def plot(metrics: Sequence[Mapping[str, float]], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, label in CURVES.items():
        axes.plot([figures[name] for figures in metrics], label=label)
    axes.set(xlabel="step", ylim=(0, 1.02), title="A policy learns to write programs (GRPO, from random weights)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(png, dpi=120)
    print(f"curves: {png}")


def print_times(metrics: Sequence[Mapping[str, float]], total_s: float) -> None:
    """Print where the time went: the mean seconds of a sample in each phase, and of a step."""
    names = [f"time/{phase}_s" for phase in ("queue", "setup", "generate", "tool", "reward")]
    phases = ", ".join(f"{name[5:-2]} {sum(m[name] for m in metrics) / len(metrics):.2f} s" for name in names)
    waited = sum(m["time/wait_s"] for m in metrics)
    print(f"a sample: {phases}; all steps: {waited:.0f} s rolled out of {total_s:.0f} s with the start")


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # more threads do not make operations on tiny matrices faster
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="verl-example-") as folder:
        metrics = train(Path(folder), options.steps, options.seed)
    print_times(metrics, time.monotonic() - started)
    if options.png is not None:
        plot(metrics, options.png)


if __name__ == "__main__":
    main()
