"""Shared by the examples that train: GRPO on any number of trainer ranks, the options of the command line, the plot.

The mathematics is in `verl_server.training`. `calculator.py`, `async_training.py`, `coding.py` and
`train_claude_code.py` use this module.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_server import VerlEngine, training
from verl_server.agent import RolloutStep, Sample
from verl_server.demo import trainer as policy

EPOCHS, MINIBATCHES, CLIP = 2, 4, 0.2
WARMUP_STEPS = 5
FINAL_RATE = 0.1
"""Learning rate of the last step, as a fraction of the full learning rate."""


def make_batch(step: RolloutStep) -> TensorDict:
    """The fields of `step.batch()`, the advantage of each row, and the weight of each token in the loss.

    `step.batch()` leaves out failed samples. The groups of a step can therefore have different sizes here.
    """
    if errors := [sample.error for sample in step.samples if sample.error is not None]:
        print(f"step {step.index}: {len(errors)} samples failed and are left out, the first by {errors[0]}", flush=True)
    batch = step.batch()
    batch["advantage"] = training.group_advantages(batch["reward"], batch["group_index"], batch["sample_index"])
    batch["token_weight"] = batch["response_mask"] * batch["loss_weight"][:, None]
    return batch


class Trainer:
    """The training of one rank. All ranks call `train_step` once for each step.

    `folder`: the checkpoint of the policy. `steps`: the number of steps, over which the learning rate falls.
    `update_options`: arguments of `VerlEngine.update_weights_from_tensor` in each step.
    """

    def __init__(
        self,
        folder: Path,
        mesh: DeviceMesh,
        engine: VerlEngine,
        steps: int,
        *,
        learning_rate: float = 3e-3,
        entropy_weight: float = 0.02,
        **update_options: Any,
    ) -> None:
        self._engine, self._steps, self._update_options = engine, steps, update_options
        self._learning_rate, self._entropy_weight = learning_rate, entropy_weight
        self._model = policy.load_sharded(folder, mesh)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        engine.update_weights_from_tensor(policy.named_weights(self._model))

    def train_step(self, index: int, step: RolloutStep | None) -> float:
        """Train on the samples of rank 0 and push the weights.

        Returns the largest difference between the log probabilities of the trainer and of the rollout.
        """
        rate = min(1.0, (index + 1) / WARMUP_STEPS) * (1.0 - (1.0 - FINAL_RATE) * index / self._steps)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * rate
        shared = [None if step is None else make_batch(step)]
        dist.broadcast_object_list(shared, src=0)
        assert shared[0] is not None
        gap = self._optimize(shared[0], torch.Generator().manual_seed(index))
        self._engine.update_weights_from_tensor(policy.named_weights(self._model), **self._update_options)
        return gap

    def _optimize(self, batch: TensorDict, generator: torch.Generator) -> float:
        """Run the optimizer steps of this rank on its rows. `generator` is equal on all ranks."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        parts, gaps = [], []
        for rows in torch.randperm(len(batch), generator=generator).chunk(MINIBATCHES):
            own = batch[rows[rank::num_ranks]]
            with torch.no_grad():
                logprobs, rollout = training.response_logprobs(self._model, own), own["rollout_log_probs"]
            # Older weights may have generated the samples (`max_staleness`): the loss clips the ratio to the present
            # weights, and each token counts with its importance weight. Without staleness, all of these are 1.
            weights = training.importance_weights(logprobs, rollout, own["response_mask"]) * own["token_weight"]
            parts.append((own, logprobs, weights, float(batch["token_weight"][rows].sum()) / num_ranks))
            gaps.append(float(((logprobs - rollout) * own["response_mask"]).abs().max()))
        for _ in range(EPOCHS):
            for own, old, weights, num_tokens in parts:
                logits = training.response_logits(self._model, own)
                logprobs, entropy = training.logprobs_of(logits, own["responses"]), training.entropy_of(logits)
                loss = training.policy_loss(
                    logprobs, old, own["advantage"], weights, clip=CLIP, num_tokens=num_tokens
                ) - self._entropy_weight * ((entropy * weights).sum() / num_tokens)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
                self._optimizer.step()
                self._optimizer.zero_grad()
        return max(gaps)


async def train_on_steps(
    trainer: Trainer,
    rollout: AsyncGenerator[RolloutStep, None],
    steps: int,
    figures: Mapping[str, str],
    transcript: Callable[[Sample], str],
) -> list[Mapping[str, float]]:
    """Train on the first `steps` steps of a rollout. Returns the metrics of each step.

    `figures`: names of metrics by the label that is printed. `transcript`: text of a sample, printed every ten steps.
    """
    metrics: list[Mapping[str, float]] = []
    async with contextlib.aclosing(rollout):
        async for step in rollout:
            started = time.monotonic()
            gap = await asyncio.to_thread(trainer.train_step, step.index, step)
            metrics.append(step.metrics)
            shown = ", ".join(f"{label} {step.metrics[name]:.3f}" for label, name in figures.items())
            print(
                f"step {step.index}: {shown}, log prob gap {gap:.1e}, {step.metrics['time/wait_s']:.1f} s rolled out, "
                f"{time.monotonic() - started:.1f} s trained",
                flush=True,
            )
            if step.index % 10 == 9:
                print("   ", transcript(step.samples[0]), flush=True)
            if step.index == steps - 1:
                break
    return metrics


@contextlib.contextmanager
def trainer_rank(folder: Path, rank: int = 0, num_ranks: int = 1) -> Iterator[DeviceMesh]:
    """Join the process group of the trainer ranks, and leave it at the end of the context.

    `folder`: the same directory on all ranks. This process and the servers that it starts use one thread each: more
    threads do not make operations on tiny matrices faster.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    try:
        yield init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def parse_options(description: str | None, *, steps: int) -> argparse.Namespace:
    """The options of the command line: `steps`, `seed`, and `png`, the file of the plot or None."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path)
    return parser.parse_args()


def save_plot(png: Path, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], **axes_options: Any) -> None:
    """Draw a line for each label of `curves`, with its x and y values. `axes_options`: arguments of `Axes.set`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for label, (x, y) in curves.items():
        axes.plot(x, y, label=label)
    axes.set(**axes_options)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(png, dpi=120)
    print(f"curves: {png}")
