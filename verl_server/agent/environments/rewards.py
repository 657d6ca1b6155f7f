"""Reward functions of users: a function of a runner, and methods of an environment with the decorator `reward`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, overload

from pydantic import Field

from verl_server.agent.samples import Sample
from verl_server.agent.user_code import call_user_function, call_within
from verl_server.config import Positive
from verl_server.errors import BadInputError
from verl_server.type_checks import check_fields

RewardFn = Callable[[Sample], float | Awaitable[float]]
"""Computes a reward of a finished sample, a finite number. A function that is not a coroutine function runs in a
thread."""
Function = TypeVar("Function", bound=Callable[..., Any])
OPTIONS_ATTRIBUTE = "__verl_server_reward__"
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class RewardOptions:
    """The options of a reward, see `reward`."""

    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    timeout_s: Positive = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Reward:
    """A reward function, bound to the environment of its sample."""

    name: str
    function: RewardFn
    options: RewardOptions


@overload
def reward(function: Function) -> Function: ...


@overload
def reward(*, weight: float = 1.0, timeout_s: float = DEFAULT_TIMEOUT_S) -> Callable[[Function], Function]: ...


def reward(
    function: Callable[..., Any] | None = None, *, weight: float = 1.0, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Any:
    """Decorator, with or without options, for a method `(self, sample)` of an `Environment` that computes a reward, and
    for the function `reward=` of a runner.

    The reward of a sample is the sum of the results, each times its `weight`. With the weight 0 the result is a metric.
    All results are in `Sample.rewards`. `timeout_s`: maximum seconds; after that the sample fails. Raises BadInputError
    for an option of a wrong type or value.
    """
    if function is not None and not callable(function):
        raise BadInputError(f"reward is a decorator of a method, got {function!r:.80}; write @reward or @reward(...)")
    options = RewardOptions(weight, timeout_s)

    def decorate(decorated: Function) -> Function:
        setattr(decorated, OPTIONS_ATTRIBUTE, options)
        return decorated

    return decorate if function is None else decorate(function)


def reward_of(function: object) -> RewardOptions | None:
    """The options of a function with the decorator `reward`. None for any other object."""
    options = getattr(function, OPTIONS_ATTRIBUTE, None)
    return options if isinstance(options, RewardOptions) else None


async def compute_rewards(rewards: Sequence[Reward], sample: Sample) -> dict[str, float]:
    """The result of each reward by its name. Raises the first exception, and BadInputError for a result that is no
    finite number, and DeadlineError. The rewards are computed one after the other.
    """
    return {item.name: await _compute(item, sample) for item in rewards}


def total_reward(options: Mapping[str, RewardOptions], values: Mapping[str, float]) -> float | None:
    """The weighted sum of the results `values` by name. None if all of them are metrics."""
    if not any(item.weight for item in options.values()):
        return None
    return sum(options[name].weight * value for name, value in values.items())


async def _compute(item: Reward, sample: Sample) -> float:
    call = call_user_function(item.function, sample)
    value = await call_within(call, item.options.timeout_s, f"the reward {item.name!r}")
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, (str, bytes)) and math.isfinite(number := float(value)):
            return number
    raise BadInputError(f"the reward function {item.name!r} must return a finite number, got {value!r:.80}")
