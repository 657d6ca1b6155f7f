"""GRPO as pure functions: advantages, the training batch, log-probabilities, the loss.

Shapes: `n` samples in the batch, `t` = length of the longest prompt + response. Sequences are padded on the right, so
that causal attention never reads padding. `mask[i, j]` is 1.0 where the policy generated token j of sample i.

Sources: group-normalised advantages, DeepSeekMath (arXiv 2402.03300) section 4.1.2; clipped ratio, PPO (arXiv
1707.06347) equation 7; one mean over all tokens of the batch instead of one mean per sample, DAPO (arXiv 2503.14476)
section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GrpoSample:
    """One prompt and one response of the policy, with its reward."""

    prompt: tuple[int, ...]  # token ids
    response: tuple[int, ...]  # token ids
    logprobs: tuple[float, ...]  # one per response token, from the rollout server
    reward: float  # 0 to 1
    advantage: float = 0.0  # from `group_advantages`


@dataclass(frozen=True)
class Batch:
    """Samples as padded tensors."""

    tokens: torch.Tensor  # (n, t) int64
    mask: torch.Tensor  # (n, t) float32, 1.0 on response tokens
    rollout_logprobs: torch.Tensor  # (n, t) float32, 0.0 outside the mask
    advantages: torch.Tensor  # (n,) float32


def group_advantages(rewards: Sequence[float], group: int, eps: float = 1e-4) -> list[float]:
    """(reward - mean of the group) / (standard deviation of the group + eps) for each reward.

    `group` is the number of consecutive rewards that belong to one prompt. If all rewards of a group are equal, its
    advantages are zero.
    """
    grouped = torch.tensor(rewards, dtype=torch.float64).view(-1, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    normalised: list[float] = (centred / (grouped.std(dim=1, keepdim=True) + eps)).flatten().tolist()
    return normalised


def make_batch(samples: Sequence[GrpoSample], pad: int) -> Batch:
    """Pad all samples on the right to the length of the longest. `pad` is any valid token id; the mask excludes it."""
    length = max(len(sample.prompt) + len(sample.response) for sample in samples)
    tokens = torch.full((len(samples), length), pad, dtype=torch.int64)
    mask = torch.zeros(len(samples), length)
    logprobs = torch.zeros(len(samples), length)
    for row, sample in enumerate(samples):
        start, stop = len(sample.prompt), len(sample.prompt) + len(sample.response)
        tokens[row, :stop] = torch.tensor((*sample.prompt, *sample.response))
        mask[row, start:stop] = 1.0
        logprobs[row, start:stop] = torch.tensor(sample.logprobs)
    return Batch(tokens, mask, logprobs, torch.tensor([sample.advantage for sample in samples]))


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of every token given the tokens before it, and the entropy of its distribution; both (n, t).

    `logits` is (n, t, vocabulary), as the model returns it: position j predicts token j + 1. Column 0 has no prediction
    and is zero.
    """
    distribution = logits[:, :-1].log_softmax(dim=-1)
    chosen = distribution.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return _shift(chosen), _shift(entropy)


def _shift(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (1, 0))


def policy_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    batch: Batch,
    *,
    clip: float,
    entropy_weight: float,
    num_tokens: float,
) -> torch.Tensor:
    """Clipped policy loss of `batch` minus the entropy bonus: the sum over the mask, divided by `num_tokens`.

    `num_tokens` is the number of response tokens over which the mean is taken. With data-parallel ranks, whose
    gradients are averaged, it is the number of tokens of all ranks divided by the number of ranks.
    """
    ratio = (logprobs - batch.rollout_logprobs).exp()
    advantages = batch.advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)
    return -((gain + entropy_weight * entropy) * batch.mask).sum() / num_tokens


def logprob_gap(logprobs: torch.Tensor, batch: Batch) -> tuple[float, float]:
    """Maximum and sum of the absolute differences between trainer and server logprobs, over response tokens."""
    gap = (logprobs - batch.rollout_logprobs).abs() * batch.mask
    return float(gap.max()), float(gap.sum())
