"""Rewards and advantages of the completions of one prompt, as TRL's own rollout worker computes them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_server.agent.user_code import call_user_function
from verl_server.errors import BadInputError, VerlServerError
from verl_server.validation import is_list

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
