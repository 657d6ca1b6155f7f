"""The mathematics of a GRPO step, as functions of tensors.

Shapes: B rows of a batch (`verl_server.trajectory.to_batch`), R tokens of the longest response, V tokens of the
vocabulary. All log probabilities are in nats and of dtype float32.

Sources: group-normalized advantages, DeepSeekMath (arXiv 2402.03300) section 4.1.2; clipped ratio, PPO (arXiv
1707.06347) equation 7; one mean over all tokens of a batch, and two clip ranges, DAPO (arXiv 2503.14476) sections 3.1
and 3.3; decoupled objective, arXiv 2110.00641; truncated importance weights, arXiv 1802.01561 section 4.1.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from tensordict import TensorDict

from verl_server.errors import BadInputError

logger = logging.getLogger(__name__)
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
    (`correction=1`), as in verl and TRL, plus `eps`. The advantages of a group with equal rewards are 0, also those of
    a group of one sample; a warning is logged if all of them are. Raises BadInputError for a reward that is not finite:
    the batch of a runner without `reward` has NaN.
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
    if len(advantages) and not advantages.any():
        logger.warning("the rewards of each group are equal, so no advantage differs from 0: nothing is learned")
    return advantages.float()


def _require_shape(name: str, value: object, *shapes: tuple[int, ...]) -> None:
    if not isinstance(value, torch.Tensor):
        raise BadInputError(f"{name} must be a tensor, got {type(value).__name__}", argument=name)
    if tuple(value.shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise BadInputError(f"{name} must have the shape {wanted}, got {list(value.shape)}", argument=name)


def response_logits(model: Any, batch: TensorDict, *, temperature: float | None = None) -> torch.Tensor:
    """The logits [B, R, V] in float32 that predict the tokens of the responses, divided by the temperature.

    `model` is a causal language model of transformers, also sharded by FSDP2 or with LoRA adapters. `batch` has the
    fields of `to_batch`. The model computes the logits of the responses only, because those of the prompts would often
    need most of the memory. `temperature`: None is that of each token in the rollout, the field `temperature` of the
    batch, because servers return the log probabilities after the temperature. Raises BadInputError for one that is not
    above 0.
    """
    if temperature is not None and not temperature > 0:
        raise BadInputError(
            f"temperature must be above 0, got {temperature}; the log probabilities of greedy answers are those of "
            "temperature 1",
            argument="temperature",
        )
    width = batch["responses"].shape[1] + 1
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits: torch.Tensor = model(**inputs, use_cache=False, logits_to_keep=width).logits
    divisor: Any = temperature
    if temperature is None:
        divisor = batch["temperature"][..., None] if "temperature" in batch else 1.0
    tempered: torch.Tensor = logits[:, -width:-1].float() / divisor
    return tempered


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log probability [B, R] of each of the `tokens` [B, R] by its `logits` [B, R, V]."""
    logits = logits.float()
    chosen: torch.Tensor = logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(dim=-1)
    return chosen


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    """The entropy [B, R] in nats of the distributions of `logits` [B, R, V]."""
    distribution = logits.float().log_softmax(dim=-1).clamp(min=torch.finfo(torch.float32).min)  # -inf counts 0
    return -(distribution.exp() * distribution).sum(dim=-1)


def response_logprobs(model: Any, batch: TensorDict, *, temperature: float | None = None) -> torch.Tensor:
    """The log probability [B, R] of each token of the responses. Arguments as in `response_logits`."""
    return logprobs_of(response_logits(model, batch, temperature=temperature), batch["responses"])


def importance_weights(
    logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, *, cap: float = 2.0
) -> torch.Tensor:
    """The weight [B, R] of each token: its probability in the trainer over that in the rollout, at most `cap`.

    Multiply the mask of `policy_loss` with these weights when the rollout differs from the policy that is trained: its
    weights are older (`max_staleness`), or the server computes in another dtype. `logprobs` [B, R]: those of the
    trainer before the first optimizer step. `rollout_logprobs` [B, R]: `rollout_log_probs` of the batch. The weights
    have no gradient and are 0 where `mask` is 0. Raises BadInputError for tensors whose shapes do not fit.
    """
    if not cap > 0:
        raise BadInputError(f"cap must be above 0, got {cap}", argument="cap")
    _require_shape("rollout_logprobs", rollout_logprobs, tuple(logprobs.shape))
    if rollout_logprobs.requires_grad and not logprobs.requires_grad:
        raise BadInputError("logprobs come first, then rollout_logprobs, which have no gradient", argument="logprobs")
    _require_shape("mask", mask, tuple(logprobs.shape))
    ratio = torch.where(mask != 0, logprobs.detach().float() - rollout_logprobs.float(), 0.0).exp()
    return ratio.clamp(max=cap) * (mask != 0)


def pad_rows(batch: TensorDict, multiple: int) -> TensorDict:
    """The batch with repeated rows at its end, so that the number of rows is a multiple of `multiple`.

    Ranks must all compute the same number of backward passes, each with at least one row. The `response_mask` of the
    added rows is 0, so they have no weight in a loss. Raises BadInputError for a `multiple` below 1.
    """
    if multiple < 1:
        raise BadInputError(f"multiple must be at least 1, got {multiple}", argument="multiple")
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
        clip_high: The ratio counts up to `1 + clip_high`: 0.28 for DAPO's 1.28. None is `clip`.
        num_tokens: What the sum is divided by. None is the number of tokens of this call that have a weight. When a
            step adds the gradients of several calls, pass the number of all its tokens. When ranks average their
            gradients, as FSDP2 does, pass the number of tokens of all ranks divided by the number of ranks.

    Log ratios outside of -20 to 20 count as these, as in verl. Raises BadInputError for tensors whose shapes do not
    fit, for advantages that are not finite, for a `num_tokens` of 0 or less, for a `clip` outside of 0 to 1, for a
    `clip_high` below 0, and for the two `logprobs` in the wrong order.
    """
    if not 0 <= clip <= 1:
        raise BadInputError(f"clip is the distance of the ratio from 1, 0 to 1, got {clip}", argument="clip")
    if clip_high is not None and not clip_high >= 0:
        raise BadInputError(f"clip_high is the distance of the ratio from 1, got {clip_high}", argument="clip_high")
    _require_shape("logprobs", logprobs, tuple(getattr(logprobs, "shape", ())))
    _require_shape("old_logprobs", old_logprobs, tuple(logprobs.shape))
    if old_logprobs.requires_grad and not logprobs.requires_grad:
        raise BadInputError("logprobs come first, then old_logprobs, which have no gradient", argument="logprobs")
    _require_shape("mask", mask, tuple(logprobs.shape))
    _require_shape("advantages", advantages, *[(len(logprobs), *rest) for rest in ((), (1,), logprobs.shape[1:])])
    if not advantages.isfinite().all():
        raise BadInputError("an advantage is not finite", argument="advantages")
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
