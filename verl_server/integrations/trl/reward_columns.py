"""Rewards and advantages of the completions of one prompt, as TRL's own rollout worker computes them."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_server.errors import BadInputError

RewardFunc = Callable[..., Any]
"""TRL's reward function: gets lists of prompts, completions and columns, and returns a reward or None for each."""

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


async def compute_rewards(functions: Sequence[RewardFunc], executor: Executor, **columns: Any) -> dict[str, list[Any]]:
    """The values of each reward function by its name. Functions that are not coroutines run in `executor`.

    Raises BadInputError for a result of another length, and the errors of the functions.
    """
    loop = asyncio.get_running_loop()

    async def call(function: RewardFunc) -> list[Any]:
        if _is_async(function):
            values = list(await function(**columns))
        else:
            values = list(await loop.run_in_executor(executor, functools.partial(function, **columns)))
        expected = len(columns["completions"])
        if len(values) != expected:
            raise BadInputError(
                f"reward function {name_of(function)} returned {len(values)} rewards for {expected} completions"
            )
        return values

    results = await asyncio.gather(*(call(function) for function in functions))
    return dict(zip((name_of(function) for function in functions), results, strict=True))


def score_group(values: dict[str, list[Any]]) -> Scores:
    """Rewards and advantages of a group. `values`: results of the reward functions by name."""
    table = np.array([[np.nan if value is None else float(value) for value in column] for column in values.values()])
    has_reward = ~np.isnan(table).all(axis=0)
    rewards = np.where(has_reward, np.nansum(table, axis=0), np.nan)
    advantages, std = np.zeros(len(rewards)), float("nan")
    if has_reward.any():
        known = rewards[has_reward]
        std = float(known.std())
        advantages[has_reward] = (known - known.mean()) / (std + EPSILON)
    by_function = dict(zip(values, table.tolist(), strict=True))
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
