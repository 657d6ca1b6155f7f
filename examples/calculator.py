"""Agentic RL from scratch: a policy that knows nothing learns to call a calculator and to read its answer (GRPO).

Two trainer ranks (FSDP2), two replicas behind a router, a session of two turns for each sample. On rank 0 the runner
rolls out; both ranks train on their half of the batch; new weights go to both replicas. About seven minutes on two
cores. `--png` gets the curves: reward, and how often the tool is used.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import calculator_task as task
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from verl_server import VerlEngine
from verl_server.agent.episode import Budget
from verl_server.agent.runner import Group, RolloutRunner
from verl_server.demo import grpo, policy
from verl_server.rollout import RolloutManager
from verl_server.tiny import Architecture, make_config
from verl_server.trajectory.batches import to_batch
from verl_server.trajectory.rendering import Renderer

RANKS, REPLICAS = 2, 2
PROMPTS, GROUP = 48, 6
EPOCHS, MINIBATCHES = 2, 4
LEARNING_RATE, CLIP, ENTROPY = 3e-3, 0.2, 0.02
END = len(task.WORDS) - 1
BUDGET = Budget(response_tokens=task.MAX_RESPONSE, turns=2, tool_tokens=4)


def write_policy(folder: Path, seed: int) -> Any:
    """An untrained Qwen3 with two layers and the task's words. Returns its tokenizer."""
    from transformers import AutoModelForCausalLM

    config = make_config(Architecture.QWEN3, context_length=64, tie_word_embeddings=True, vocab_size=len(task.WORDS))
    config.eos_token_id, config.pad_token_id, config.initializer_range = END, END, policy.INITIAL_STD
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return task.make_tokenizer(folder)


class Rollouts:
    """Rank 0's: the fleet, and the agents that act through its router."""

    def __init__(self, folder: Path, tokenizer: Any, seed: int) -> None:
        self.fleet = RolloutManager(
            REPLICAS, model_path=str(folder), dtype="float32", skip_tokenizer_init=True, context_length=64,
            max_total_tokens=16384, random_seed=seed, log_level="warning",
        )  # fmt: skip
        self._renderer, self._rng = Renderer(tokenizer), random.Random(seed)
        self._loop = task.CalculatorLoop([task.calculate])

    def roll_out(self, step: int) -> list[Group]:
        """A group of samples for each question."""
        sampling = {"temperature": 1.0, "max_new_tokens": task.MAX_TURN, "stop_token_ids": [END]}
        runner = RolloutRunner(
            self._loop, self.fleet.router.generate, self._renderer, BUDGET, sampling, reward=task.reward
        )

        async def run() -> list[Group]:
            return [group async for group in runner.run(task.draw(self._rng, PROMPTS, f"s{step}"), GROUP)]

        return asyncio.run(run())


def batch_of(groups: Sequence[Group]) -> grpo.Batch:
    """What GRPO takes, from the recorded paths: all prompts are of one length, so nothing is padded on the left."""
    samples = [sample for group in groups for sample in group.samples]
    for sample in samples:
        if sample.error is not None:
            raise RuntimeError(f"sample {sample.task.id}-{sample.number} failed: {sample.error}")
    fields = to_batch([sample.path for sample in samples], pad_token_id=END)
    prompt = torch.zeros(fields["prompts"].shape)
    return grpo.Batch(
        tokens=fields["input_ids"],
        mask=torch.cat([prompt, fields["response_mask"].float()], dim=1),
        rollout_logprobs=torch.cat([prompt, fields["rollout_log_probs"]], dim=1),
        advantages=torch.tensor(
            grpo.group_advantages([sample.reward or 0.0 for sample in samples], GROUP), dtype=torch.float32
        ),
    )


def learn(model: Any, optimizer: torch.optim.Optimizer, batch: grpo.Batch, rank: int) -> float:
    """Optimizer steps on the batch, of which this rank takes its share. Returns the largest gap of log probs."""
    gap = 0.0
    for epoch in range(EPOCHS):
        for part in range(MINIBATCHES):
            rows = torch.arange(part, len(batch.tokens), MINIBATCHES)
            own = rows[rank::RANKS]
            share = grpo.Batch(batch.tokens[own], batch.mask[own], batch.rollout_logprobs[own], batch.advantages[own])
            logprobs, entropy = grpo.token_logprobs(policy.logits_of(model, share.tokens), share.tokens)
            if epoch == part == 0:
                gap = grpo.logprob_gap(logprobs.detach(), share)[0]
            tokens = float(batch.mask[rows].sum()) / RANKS
            grpo.policy_loss(logprobs, entropy, share, clip=CLIP, entropy_weight=ENTROPY, token_count=tokens).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return gap


def train(rank: int, folder: Path, steps: int, seed: int, png: Path | None) -> None:
    """The life of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    tokenizer = write_policy(folder / "policy", seed) if rank == 0 else None
    dist.barrier()
    rollouts = Rollouts(folder / "policy", tokenizer, seed) if rank == 0 else None
    model = policy.load_sharded(folder / "policy", mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    fleet = rollouts.fleet if rollouts else None
    curves: list[tuple[float, float]] = []
    with VerlEngine(mesh, fleet=fleet, model_path=str(folder / "policy"), dtype="float32") as engine:
        engine.update_weights_from_tensor(policy.named_weights(model))
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 5) * (1.0 - 0.9 * step / steps)
            started = time.monotonic()
            groups = rollouts.roll_out(step) if rollouts else []
            shared = [batch_of(groups) if rollouts else None]
            rolled_out_s = time.monotonic() - started
            dist.broadcast_object_list(shared, src=0)
            batch = shared[0]
            assert batch is not None
            gap = learn(model, optimizer, batch, rank)
            engine.update_weights_from_tensor(policy.named_weights(model))
            if rollouts:
                samples = [sample for group in groups for sample in group.samples]
                curves.append((fmean(s.reward or 0.0 for s in samples), fmean(task.used_tool(s) for s in samples)))
                print(
                    f"step {step}: reward {curves[-1][0]:.3f}, tool used {curves[-1][1]:.3f}, log prob gap {gap:.1e}, "
                    f"{rolled_out_s:.1f} s of {time.monotonic() - started:.1f} s rolled out",
                    flush=True,
                )
                if step % 10 == 9:
                    print("   ", task.show(samples[0]), flush=True)
    if png is not None and rank == 0:
        plot(curves, png)
    dist.destroy_process_group()


def plot(curves: Sequence[tuple[float, float]], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([reward for reward, _ in curves], label="mean reward")
    axes.plot([used for _, used in curves], label="samples that used the tool")
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
    os.environ["OMP_NUM_THREADS"] = "1"  # tiny matrices gain nothing from threads
    with tempfile.TemporaryDirectory(prefix="verl-example-") as folder:
        arguments = (Path(folder), options.steps, options.seed, options.png)
        mp.spawn(train, arguments, nprocs=RANKS)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
