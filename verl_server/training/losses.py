"""The mathematics of a GRPO step, as functions of tensors.

Shapes: B rows of a batch (`verl_server.trajectory.to_batch`), R tokens of the longest response, V tokens of the
vocabulary. All log probabilities are in nats and of dtype float32.

Sources: group-normalized advantages, DeepSeekMath (arXiv 2402.03300) section 4.1.2; clipped ratio, PPO (arXiv
1707.06347) equation 7; one mean over all tokens of a batch, and two clip ranges, DAPO (arXiv 2503.14476) sections 3.1
and 3.3; decoupled objective, arXiv 2110.00641; truncated importance weights, arXiv 1802.01561 section 4.1.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from verl_server.errors import BadInputError

MAX_LOG_RATIO = 20.0


def group_advantages(
    rewards: torch.Tensor,
    group_index: torch.Tensor,
    sample_index: torch.Tensor | None = None,
    *,
    scale: bool = True,
    eps: float = 1e-6,
) -> torch.Tensor:
    """The advantage of each row [B]: the reward of its sample minus the mean of its group, over their deviation.

    `rewards`, `group_index`, `sample_index` [B] are the fields `reward`, `group_index` and `sample_index` of
    `RolloutStep.batch()`. A sample with several rows (branches) counts once. `sample_index=None`: each row is a sample.
    `scale=False` does not divide by the standard deviation (arXiv 2503.20783). The deviation is that of a sample
    (`correction=1`), as in verl and TRL, plus `eps`. The advantages of a group with
    equal rewards are 0, also those of a group of one sample. Raises BadInputError for a reward that is not finite: the
    batch of a runner without `reward` has NaN.
    """
    _require_shape("rewards", rewards, (len(group_index),))
    _require_shape("group_index", group_index, (len(group_index),))
    if sample_index is not None:
        _require_shape("sample_index", sample_index, (len(rewards),))
    if not rewards.isfinite().all():
        raise BadInputError("a reward is not finite; a runner without reward= or @reward has none", argument="rewards")
    rewards = rewards.double()
    samples = torch.arange(len(rewards), device=rewards.device) if sample_index is None else sample_index
    advantages = torch.zeros_like(rewards)
    for group in group_index.unique():  # type: ignore[no-untyped-call]
        rows = (group_index == group).nonzero().flatten()
        ids = samples[rows].tolist()
        first = rows[[ids.index(sample) for sample in dict.fromkeys(ids)]]
        values = rewards[first]
        if (values == values[0]).all():  # a rounded mean would give all of them the same sign
            continue
        advantages[rows] = rewards[rows] - values.mean()
        if scale:
            advantages[rows] /= values.std() + eps
    return advantages.float()


def _require_shape(name: str, value: object, *shapes: tuple[int, ...]) -> None:
    if not isinstance(value, torch.Tensor):
        raise BadInputError(f"{name} must be a tensor, got {type(value).__name__}", argument=name)
    if tuple(value.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise BadInputError(f"{name} must have the shape {wanted}, got {list(value.shape)}", argument=name)


def response_logits(model: Any, batch: TensorDict, *, temperature: float = 1.0) -> torch.Tensor:
    """The logits [B, R, V] in float32 that predict the tokens of the responses, divided by `temperature`.

    `model` is a causal language model of transformers, also sharded by FSDP2 or with LoRA adapters. `batch` has the
    fields of `to_batch`. The model computes the logits of the responses only, because those of the prompts would often
    need most of the memory. `temperature` is that of the rollout: servers return the log probabilities after the
    temperature.
    """
    width = batch["responses"].shape[1] + 1
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits: torch.Tensor = model(**inputs, use_cache=False, logits_to_keep=width).logits
    return logits[:, -width:-1].float() / temperature


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log probability [B, R] of each of the `tokens` [B, R] by its `logits` [B, R, V]."""
    logits = logits.float()
    chosen: torch.Tensor = logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(dim=-1)
    return chosen


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    """The entropy [B, R] in nats of the distributions of `logits` [B, R, V]."""
    distribution = logits.float().log_softmax(dim=-1).clamp(min=torch.finfo(torch.float32).min)  # -inf counts 0
    return -(distribution.exp() * distribution).sum(dim=-1)


def response_logprobs(model: Any, batch: TensorDict, *, temperature: float = 1.0) -> torch.Tensor:
    """The log probability [B, R] of each token of the responses. Arguments as in `response_logits`."""
    return logprobs_of(response_logits(model, batch, temperature=temperature), batch["responses"])


def importance_weights(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, *, cap: float = 2.0
) -> torch.Tensor:
    """The weight [B, R] of each token: its probability in the trainer over that in the rollout, at most `cap`.

    Multiply the mask of `policy_loss` with these weights when the rollout differs from the policy that is trained: its
    weights are older (`max_staleness`), or the server computes in another dtype. `logprobs` [B, R]: those of the
    trainer before the first optimizer step. `rollout_logprobs` [B, R]: `rollout_log_probs` of the batch. The weights
    have no gradient and are 0 where `mask` is 0.
    """
    if not cap > 0:
        raise BadInputError(f"cap must be above 0, got {cap}", argument="cap")
    ratio = torch.where(mask != 0, logprobs.detach().float() - rollout_logprobs.float(), 0.0).exp()
    return ratio.clamp(max=cap) * (mask != 0)


def pad_rows(batch: TensorDict, multiple: int) -> TensorDict:
    """The batch with repeated rows at its end, so that the number of rows is a multiple of `multiple`.

    Ranks must all compute the same number of backward passes, each with at least one row. The `response_mask` of the
    added rows is 0, so they have no weight in a loss.
    """
    num_rows = len(batch)
    added = torch.arange(num_rows, num_rows + -num_rows % multiple) % num_rows
    if not len(added):
        return batch
    padding = batch[added].clone()
    padding["response_mask"] = torch.zeros_like(padding["response_mask"])
    joined: TensorDict = TensorDict.cat([batch, padding])
    return joined


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float = 0.2,
    clip_high: float | None = None,
    num_tokens: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """The clipped loss of PPO, a scalar: a weighted sum over the tokens, divided by `num_tokens`.

    Args:
        logprobs: [B, R], with a gradient: `response_logprobs` of the model that is trained.
        old_logprobs: [B, R]: the ratio of probabilities is clipped around these. Those of the rollout are the usual
            choice. For the decoupled objective, pass those of the trainer before its first optimizer step, and multiply
            `mask` with `importance_weights`.
        advantages: [B], or [B, R] for advantages of single tokens.
        mask: [B, R]: the weight of each token, usually `response_mask * loss_weight[:, None]`. Values where it is 0
            have no effect.
        clip: The ratio counts from `1 - clip`.
        clip_high: The ratio counts up to `1 + clip_high`. None is `clip`.
        num_tokens: What the sum is divided by. None is the number of tokens of this call that have a weight. When a
            step adds the gradients of several calls, pass the number of all its tokens. When ranks average their
            gradients, as FSDP2 does, pass the number of tokens of all ranks divided by the number of ranks.

    Log ratios outside of -20 to 20 count as these, as in verl. Raises BadInputError for
    tensors whose shapes do not fit, for a `num_tokens` of 0 or less, and for the two `logprobs` in the wrong order.
    """
    _require_shape("old_logprobs", old_logprobs, tuple(logprobs.shape))
    if old_logprobs.requires_grad and not logprobs.requires_grad:
        raise BadInputError("logprobs come first, then old_logprobs, which have no gradient", argument="logprobs")
    _require_shape("mask", mask, tuple(logprobs.shape))
    _require_shape("advantages", advantages, *[(len(logprobs), *rest) for rest in ((), (1,), logprobs.shape[1:])])
    if num_tokens is not None and not num_tokens > 0:
        raise BadInputError(f"num_tokens must be above 0, got {num_tokens}", argument="num_tokens")
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    used = mask != 0
    ratio = torch.where(used, logprobs.float() - old_logprobs.float(), 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ratio.clamp(1.0 - clip, 1.0 + (clip if clip_high is None else clip_high))
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    if num_tokens is None:
        num_tokens = used.sum().clamp(min=1)
    return -(torch.where(used, gain, 0.0) * mask).sum() / num_tokens
