"""The methods of an environment with the decorators `tool` and `reward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from verl_server.agent.environments.rewards import Reward, RewardOptions, reward_of
from verl_server.agent.tools.options import options_of

Options = TypeVar("Options")


def tools_of(environment: object) -> list[Callable[..., Any]]:
    """The tools of an environment: its methods with the decorator `tool`, in the order of their definition."""
    return [getattr(environment, name) for name in _decorated_methods(type(environment), options_of)]


def rewards_of(owner: object) -> list[Reward]:
    """The rewards of an environment: its methods with the decorator `reward`, in the order of their definition."""
    return [Reward(name, getattr(owner, name), options) for name, options in reward_options_of(type(owner)).items()]


def reward_options_of(kind: type) -> dict[str, RewardOptions]:
    """The options of the rewards of a class by their names."""
    return _decorated_methods(kind, reward_of)


def _decorated_methods(kind: type, read_options: Callable[[object], Options | None]) -> dict[str, Options]:
    """The options of the methods of a class that have a decorator. A method without it replaces that of a base."""
    found: dict[str, Options] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            found.pop(name, None)
            if (options := read_options(value)) is not None:
                found[name] = options
    return found
