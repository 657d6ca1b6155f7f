"""Shared by `calculator.py` and `async_training.py`: training with GRPO on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calculator_task as task
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl_server import VerlEngine
from verl_server.agent import RolloutLimits, RolloutStep
from verl_server.demo import grpo, policy

PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 48, 6
EPOCHS, MINIBATCHES = 2, 4
LEARNING_RATE, CLIP, ENTROPY_WEIGHT = 3e-3, 0.2, 0.02
MAX_IMPORTANCE_WEIGHT = 2.0
LIMITS = RolloutLimits(max_response_tokens=task.MAX_RESPONSE_TOKENS, max_turns=2, max_tool_tokens=4)
SAMPLING_PARAMS = {"temperature": 1.0, "max_new_tokens": task.MAX_TURN_TOKENS}
SERVER_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "context_length": 64,
    "max_total_tokens": 16384,
    "log_level": "warning",
}


def make_batch(step: RolloutStep) -> grpo.Batch:
    """The batch for GRPO. All prompts have the same length, so there is no left padding.

    `step.batch()` leaves out failed samples. The groups of a step can therefore have different sizes here.
    """
    if errors := [sample.error for sample in step.samples if sample.error is not None]:
        print(f"step {step.index}: {len(errors)} samples failed and are left out, the first by {errors[0]}", flush=True)
    fields = step.batch()
    prompt_zeros = torch.zeros(fields["prompts"].shape)
    rewards, groups = fields["reward"], fields["group_index"]
    advantages = torch.zeros(len(rewards))
    for group in groups.unique():
        rows = groups == group
        if (size := int(rows.sum())) > 1:  # a sample that is alone in its group has the advantage 0
            advantages[rows] = torch.tensor(grpo.group_advantages(rewards[rows].tolist(), size), dtype=torch.float32)
    return grpo.Batch(
        tokens=fields["input_ids"],
        mask=torch.cat([prompt_zeros, fields["response_mask"].float()], dim=1),
        rollout_logprobs=torch.cat([prompt_zeros, fields["rollout_log_probs"]], dim=1),
        advantages=advantages,
    )


def correct_staleness(model: Any, batch: grpo.Batch) -> tuple[grpo.Batch, float]:
    """Prepare samples that older weights may have generated for `grpo.policy_loss`.

    `rollout_logprobs` has the log probability of each token under the weights that sampled this token. With
    `max_staleness=1` these are not the present weights: for about half of the tokens, the ratio of probabilities is
    outside the clip range before the first optimizer step. A loss that clips this ratio therefore learns slowly. Here
    the loss clips the ratio to the present weights, and each token counts with its importance weight, the probability
    under the present weights over that under the weights that sampled it. This is the decoupled objective of PPO
    (arXiv 2110.00641), as AReaL uses it (arXiv 2505.24298). Without staleness all importance weights are 1.

    Also returns the largest difference between the log probabilities of the present weights and of the rollout.
    """
    with torch.no_grad():
        logprobs, _ = grpo.token_logprobs(policy.logits_of(model, batch.tokens), batch.tokens)
    weights = (logprobs - batch.rollout_logprobs).exp().clamp(max=MAX_IMPORTANCE_WEIGHT)
    gap, _ = grpo.logprob_gap(logprobs, batch)
    return grpo.Batch(batch.tokens, batch.mask * weights, logprobs, batch.advantages), gap


def train_on_batch(model: Any, optimizer: torch.optim.Optimizer, batch: grpo.Batch) -> float:
    """Run the optimizer steps of this rank on its part of the batch.

    Returns the largest difference between the log probabilities of the trainer and of the rollout.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    parts, gaps = [], []
    for part in range(MINIBATCHES):
        rows = torch.arange(part, len(batch.tokens), MINIBATCHES)
        own = rows[rank::num_ranks]
        corrected, gap = correct_staleness(
            model,
            grpo.Batch(batch.tokens[own], batch.mask[own], batch.rollout_logprobs[own], batch.advantages[own]),
        )
        parts.append((corrected, float(batch.mask[rows].sum()) / num_ranks))
        gaps.append(gap)
    for _ in range(EPOCHS):
        for corrected, num_tokens in parts:
            logprobs, entropy = grpo.token_logprobs(policy.logits_of(model, corrected.tokens), corrected.tokens)
            loss = grpo.policy_loss(
                logprobs, entropy, corrected, clip=CLIP, entropy_weight=ENTROPY_WEIGHT, num_tokens=num_tokens
            )
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return max(gaps)


class Trainer:
    """The training of one rank. All ranks call `train_step` once for each step.

    `update_options`: arguments of `VerlEngine.update_weights_from_tensor` in each step.
    """

    def __init__(self, folder: Path, mesh: DeviceMesh, engine: VerlEngine, steps: int, **update_options: Any) -> None:
        self._engine, self._steps, self._update_options = engine, steps, update_options
        self._model = policy.load_sharded(folder, mesh)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        engine.update_weights_from_tensor(policy.named_weights(self._model))

    def train_step(self, index: int, step: RolloutStep | None) -> float:
        """Train on the samples of rank 0 and push the weights. Returns the largest difference of log probabilities."""
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (index + 1) / 5) * (1.0 - 0.9 * index / self._steps)
        shared = [None if step is None else make_batch(step)]
        dist.broadcast_object_list(shared, src=0)
        assert shared[0] is not None
        gap = train_on_batch(self._model, self._optimizer, shared[0])
        self._engine.update_weights_from_tensor(policy.named_weights(self._model), **self._update_options)
        return gap
