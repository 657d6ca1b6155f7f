"""Filters that decide which groups of samples are used."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

from verl_server.agent.samples import SampleGroup
from verl_server.agent.user_code import await_to_its_end
from verl_server.agent.user_failures import NotedFailures
from verl_server.errors import BadInputError
from verl_server.validation import is_bool, require_callable

GroupFilter = Callable[[SampleGroup], bool | Awaitable[bool]]
"""Decides whether a group is used. May be a coroutine function."""


def has_variance(group: SampleGroup) -> bool:
    """Whether the rewards of the samples that did not fail differ. If not, their advantages in the group are 0."""
    rewards = {sample.reward for sample in group.samples if sample.reward is not None}
    return len(rewards) > 1


NAMED_FILTERS: dict[str, GroupFilter] = {"has_variance": has_variance}


def get_group_filter(value: GroupFilter | str | None, n: int, has_rewards: bool) -> GroupFilter | None:
    """The filter of a name or a function. Raises BadInputError for another value, and for a filter that keeps nothing.

    `n`: number of samples of a group. `has_rewards`: whether the samples have rewards with a weight.
    """
    if isinstance(value, str):
        if value not in NAMED_FILTERS:
            names = ", ".join(map(repr, NAMED_FILTERS))
            raise BadInputError(f"there is no group_filter {value!r}; pass a function, or {names}")
        if n == 1:
            raise BadInputError(f"group_filter={value!r} keeps no group of one sample; pass n=8, for example")
        if not has_rewards:
            raise BadInputError(
                f"group_filter={value!r} needs rewards; pass reward=..., or an Environment with a method @reward, "
                "whose weight is not 0"
            )
        return NAMED_FILTERS[value]
    if value is not None:
        require_callable("group_filter", value, "write `def keep(group: SampleGroup) -> bool`")
    return value


async def is_kept(group_filter: GroupFilter | None, group: SampleGroup) -> bool:
    """Whether the filter keeps a group. Raises the exceptions of the filter."""
    if group_filter is None:
        return True
    task_id = group.task.id
    note = f"raised by group_filter for the group of task {task_id!r}; failed samples have the reward None"
    with NotedFailures(note):
        kept = group_filter(group)
        if inspect.isawaitable(kept):
            name = f"group_filter, called with the group of task {task_id!r},"
            kept = await await_to_its_end(asyncio.ensure_future(kept), name)
    return _require_bool(kept, group)


def _require_bool(kept: object, group: SampleGroup) -> bool:
    """What a filter has returned. An array or a tensor of one bool is a bool, too."""
    if str(getattr(kept, "dtype", "")) in ("bool", "torch.bool") and getattr(kept, "shape", None) == ():
        return bool(kept)
    if not is_bool(kept):
        raise BadInputError(
            f"group_filter returned {kept!r:.80} for task {group.task.id!r}; it must return True, which keeps the "
            "whole group, or False"
        )
    return bool(kept)
