"""`GroupMaker`: the completions of one prompt, with rewards and advantages, as samples of an `AsyncGRPOTrainer`."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from verl_server.errors import BadInputError, VerlServerError
from verl_server.integrations.trl.completions import Completion, parse_completion
from verl_server.integrations.trl.policy_versions import PolicyVersions
from verl_server.integrations.trl.reward_columns import RewardFunctions, Scores, score_group
from verl_server.integrations.trl.sampling import fit_into_context, sampling_params
from verl_server.integrations.trl.texts import completion_value, prompt_token_ids
from verl_server.router.rollout_router import RolloutRouter

logger = logging.getLogger(__name__)

SEED_BITS = 31
#: Seconds before a generation is repeated.
REPEAT_S = 1.0
#: Columns of the data set that reward functions get under the same name from the worker.
RESERVED_COLUMNS = {"prompt", "prompts", "completion", "completions", "completion_ids", "weight_versions"}


async def repeat_until(timeout_s: float, ask: Callable[[float], Awaitable[Completion]]) -> Completion:
    """The result of `ask`, which gets the seconds that are left. A retryable error is raised only when none are left.

    For example, the servers are not ready when all of them have been started again and get their weights with the next
    push: the training goes on then.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await ask(max(deadline - time.monotonic(), REPEAT_S))
        except VerlServerError as error:
            if not error.retryable or time.monotonic() + REPEAT_S >= deadline:
                raise
            logger.warning("a generation is repeated after %s: %s", type(error).__name__, error)
            await asyncio.sleep(REPEAT_S)


class GroupMaker:
    """Generates and scores the samples of one row of the data set. Its coroutines run in one event loop."""

    def __init__(
        self,
        router: RolloutRouter,
        args: Any,
        rewards: RewardFunctions,
        tokenizer: Any,
        versions: PolicyVersions,
        more_params: Mapping[str, Any],
        seed: int | None,
        max_tokens: int | None,
    ) -> None:
        """`more_params`: sampling parameters besides those of `args`. `max_tokens`: as `fit_into_context` takes it."""
        self._router, self._args, self._tokenizer = router, args, tokenizer
        self._rewards, self._versions, self._max_tokens = rewards, versions, max_tokens
        self._params = sampling_params(args, [tokenizer.eos_token_id], more_params)
        self._seeds = None if seed is None else random.Random(seed)

    async def make_group(self, row: dict[str, Any], group_id: int) -> tuple[list[Any], dict[str, Any]]:
        """Samples of a row, which are TRL's `RolloutSample`, and metrics of their generation.

        Raises BadInputError for a row without a prompt, and for a prompt that leaves no room for a completion.
        """
        if not row.get("prompt"):
            raise BadInputError(f"a row of train_dataset has no prompt; its columns are {sorted(row)}")
        started, prompt = time.monotonic(), row["prompt"]
        prompt_ids = prompt_token_ids(self._tokenizer, prompt, self._args.chat_template_kwargs or {})
        completions = await self._generate(prompt_ids)
        values = [completion_value(self._tokenizer, prompt, prompt_ids, each.token_ids) for each in completions]
        generated = time.monotonic()
        columns = {name: [value] * len(values) for name, value in row.items() if name not in RESERVED_COLUMNS}
        columns |= {
            "prompts": [prompt] * len(values),
            "completions": values,
            "completion_ids": [each.token_ids for each in completions],
            "weight_versions": [each.weight_versions for each in completions],
        }
        results = await self._rewards.compute(columns)
        scores = score_group(self._rewards.names, results)
        samples = [
            self._sample(prompt, prompt_ids, value, completion, scores, index, group_id)
            for index, (value, completion) in enumerate(zip(values, completions, strict=True))
        ]
        return samples, self._metrics(completions, generated - started, time.monotonic() - generated)

    async def _generate(self, prompt_ids: list[int]) -> list[Completion]:
        """`num_generations` completions of one prompt, at the same time."""
        params = fit_into_context(self._params, len(prompt_ids), self._max_tokens)
        calls = (self._generate_one(prompt_ids, dict(params)) for _ in range(self._args.num_generations))
        return await asyncio.gather(*calls)

    async def _generate_one(self, prompt_ids: list[int], params: dict[str, Any]) -> Completion:
        if self._seeds is not None:
            params["sampling_seed"] = self._seeds.getrandbits(SEED_BITS)
        return await repeat_until(self._args.request_timeout, lambda left_s: self._ask(prompt_ids, params, left_s))

    async def _ask(self, prompt_ids: list[int], params: dict[str, Any], timeout_s: float) -> Completion:
        reply = await self._router.generate(
            input_ids=prompt_ids, sampling_params=params, return_logprob=True, timeout_s=timeout_s
        )
        return parse_completion(reply)

    def _sample(
        self, prompt: Any, prompt_ids: list[int], value: Any, completion: Completion, scores: Scores, index: int,
        group_id: int,
    ) -> Any:  # fmt: skip
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        context, spans = len(prompt_ids), completion.weight_versions
        oldest, newest = self._versions.oldest(spans), self._versions.newest(spans)
        metrics = {
            "reward": scores.rewards[index],
            "reward_std": scores.std,
            **{f"rewards/{name}": rewards[index] for name, rewards in scores.by_function.items()},
            "policy_version/oldest_token": float(oldest),
            "policy_version/newest_token": float(newest),
        }
        return RolloutSample(
            prompt=prompt,
            completion=value,
            input_ids=np.array(prompt_ids + completion.token_ids, dtype=np.int64),
            completion_mask=np.array([0] * context + [1] * len(completion.token_ids), dtype=np.int64),
            old_log_probs=np.array([0.0] * context + completion.log_probs, dtype=np.float32),
            advantage=scores.advantages[index],
            model_version=oldest,
            group_id=group_id,
            metrics=metrics,
        )

    def _metrics(self, completions: Sequence[Completion], generation_s: float, reward_s: float) -> dict[str, Any]:
        """Metrics as TRL reads them. A pair of numbers is a rate: TRL adds up both and divides."""
        lengths = [len(completion.token_ids) for completion in completions]
        ends = {*self._params["stop_token_ids"], self._tokenizer.pad_token_id}
        cut_off = sum(completion.token_ids[-1] not in ends for completion in completions)
        return {
            "completions/mean_length": (float(sum(lengths)), float(len(lengths))),
            "completions/max_length": float(max(lengths)),
            "completions/min_length": float(min(lengths)),
            "completions/clipped_ratio": (float(cut_off), float(len(lengths))),
            "rollout/duration_s": generation_s,
            "rollout/score_s": reward_s,
        }
