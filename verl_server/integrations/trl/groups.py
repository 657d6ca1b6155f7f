"""Rewards and advantages of the completions of one prompt, as TRL's own rollout worker computes them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_server.agent.user_code import call_user_function
from verl_server.errors import BadInputError, VerlServerError
from verl_server.integrations.trl.generation import (
    Completion,
    completion_value,
    fit_into_context,
    parse_completion,
    prompt_token_ids,
    sampling_params,
)
from verl_server.integrations.trl.weights import PolicyVersions
from verl_server.router.dispatcher import RolloutRouter
from verl_server.validation import is_list

logger = logging.getLogger(__name__)

RewardFunc = Callable[..., Any]
"""TRL's reward function: gets lists of prompts, completions and columns, and returns a reward or None for each."""

NUM_THREADS = 8
"""Maximum number of reward functions that run in threads at a time."""
EPSILON = 1e-8
"""Added to the standard deviation of a group, so that equal rewards have no advantage."""


@dataclass(frozen=True)
class Scores:
    """Rewards of one group of completions."""

    by_function: dict[str, list[float]]
    """Rewards by the name of the reward function. NaN where the function returned None."""
    rewards: list[float]
    """Sum of the rewards of each completion. NaN where all functions returned None."""
    advantages: list[float]
    """Rewards minus their mean, divided by their standard deviation. 0 where the reward is NaN."""
    std: float
    """Standard deviation of the rewards. NaN without rewards."""


def parse_reward_funcs(reward_funcs: object) -> list[RewardFunc]:
    """The reward functions of a function or a list of functions. Raises BadInputError for anything else."""
    functions: list[Any] = list(reward_funcs) if is_list(reward_funcs) else [reward_funcs]
    if not functions:
        raise BadInputError("FleetRolloutWorker needs a reward function: pass reward_funcs=", argument="reward_funcs")
    for function in functions:
        if not callable(function) or hasattr(function, "from_pretrained"):  # models and tokenizers are callable
            got = f"{function!r} (str)" if isinstance(function, str) else type(function).__name__
            raise BadInputError(
                f"reward_funcs must be a function or a list of functions, got {got}. For a reward model, write a "
                "function that calls it",
                argument="reward_funcs",
            )
    return functions


class RewardFunctions:
    """The reward functions of a worker, and the calls that run now."""

    def __init__(self, functions: Sequence[RewardFunc]) -> None:
        self._functions = list(functions)
        self.names = _unique_names([name_of(function) for function in functions])
        """A name for each function. The second function of a name has the suffix `_2`."""
        self._threads = asyncio.Semaphore(NUM_THREADS)
        self._running: dict[object, tuple[str, float]] = {}

    async def compute(self, columns: Mapping[str, Any]) -> list[list[float | None]]:
        """The values of each reward function. Its arguments are `columns`. Ordinary functions run in daemon threads.

        Raises BadInputError for a result that is not a list with one number or None for each completion, and
        VerlServerError for an error of a function, which is its cause.
        """
        calls = zip(self.names, self._functions, strict=True)
        return await asyncio.gather(*(self._call(name, function, columns) for name, function in calls))

    def longest_call(self) -> tuple[str, float] | None:
        """The name of the function that runs for the longest time, and its seconds. None if no function runs."""
        started = min(list(self._running.values()), key=lambda call: call[1], default=None)
        return None if started is None else (started[0], time.monotonic() - started[1])

    async def _call(self, name: str, function: RewardFunc, columns: Mapping[str, Any]) -> list[float | None]:
        is_async = _is_async(function)
        async with contextlib.nullcontext() if is_async else self._threads:
            call = object()
            self._running[call] = (name, time.monotonic())
            try:
                bound = functools.partial(function, **columns)
                result = await (bound() if is_async else call_user_function(bound))
            except Exception as error:
                raise VerlServerError(f"reward function {name} failed: {type(error).__name__}: {error}") from error
            finally:
                del self._running[call]
        return _parse_rewards(name, result, len(columns["completions"]))


def _parse_rewards(name: str, result: Any, num_completions: int) -> list[float | None]:
    """The rewards that a function has returned: a list, or an array, of one number or None for each completion."""
    expected = f"a list of {num_completions} numbers or None, one for each completion"
    is_iterable = isinstance(result, Iterable) and not isinstance(result, (str, bytes, Mapping))
    try:
        values = list(result) if is_iterable else None
    except TypeError:  # an array without dimensions
        values = None
    if values is None:
        raise BadInputError(f"reward function {name} returned {result!r:.100}; it must return {expected}")
    if len(values) != num_completions:
        raise BadInputError(f"reward function {name} returned {len(values)} rewards for {num_completions} completions")
    return [_parse_reward(name, value, expected) for value in values]


def _parse_reward(name: str, value: Any, expected: str) -> float | None:
    if value is None:
        return None
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor with several elements
        pass
    raise BadInputError(f"reward function {name} returned {value!r:.100} as a reward; it must return {expected}")


def score_group(names: Sequence[str], values: Sequence[Sequence[Any]]) -> Scores:
    """Rewards and advantages of a group. `values`: the results of each reward function. `names`: their own names."""
    table = np.array([[np.nan if value is None else float(value) for value in column] for column in values])
    has_reward = ~np.isnan(table).all(axis=0)
    rewards = np.where(has_reward, np.nansum(table, axis=0), np.nan)
    advantages, std = np.zeros(len(rewards)), float("nan")
    if has_reward.any():
        known = rewards[has_reward]
        std = float(known.std())
        advantages[has_reward] = (known - known.mean()) / (std + EPSILON)
    by_function = dict(zip(names, table.tolist(), strict=True))
    return Scores(by_function, rewards.tolist(), advantages.tolist(), std)


def _is_async(function: RewardFunc) -> bool:
    """Whether a call returns a coroutine. `function` is a function, a `functools.partial` or an object."""
    function = function.func if isinstance(function, functools.partial) else function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def name_of(function: RewardFunc) -> str:
    """The name of a reward function: that of the function, of the wrapped function, or of the class of an object."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def _unique_names(names: Sequence[str]) -> list[str]:
    """The names, with the suffixes `_2`, `_3` and so on where a name is taken."""
    unique: list[str] = []
    for name in names:
        suffixed = (f"{name}_{number}" for number in itertools.count(2))
        unique.append(next(each for each in itertools.chain([name], suffixed) if each not in unique))
    return unique


# -- Group maker ------------------------------------------------------------------------------------
# `GroupMaker`: the completions of one prompt, with rewards and advantages, as samples of an `AsyncGRPOTrainer`.

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
