"""`tool`: the decorator that gives a function or a method of an environment the options of a tool."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, overload

from pydantic import Field

from verl_server.agent.loop_slots import LoopSlots
from verl_server.config import Positive, PositiveInt
from verl_server.errors import BadInputError
from verl_server.type_checks import check_fields

Function = TypeVar("Function", bound=Callable[..., Any])
Truncation = Literal["start", "middle", "end"]
"""Part of a too long result that is removed."""
OPTIONS_ATTRIBUTE = "__verl_server_tool__"
DEFAULT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ToolOptions:
    """The options of a tool, see `tool`."""

    name: Annotated[str, Field(min_length=1)] | None = None
    description: Annotated[str, Field(min_length=1)] | None = None
    timeout_s: Positive = DEFAULT_TIMEOUT_S
    max_result_tokens: PositiveInt | None = None
    truncate: Truncation = "end"
    max_concurrency: PositiveInt | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @functools.cached_property
    def _slots(self) -> LoopSlots | None:
        return None if self.max_concurrency is None else LoopSlots(self.max_concurrency)

    @property
    def slots(self) -> asyncio.Semaphore | None:
        """Admits `max_concurrency` calls at a time in this event loop. None without that limit."""
        return None if self._slots is None else self._slots.of_running_loop()


@overload
def tool(function: Function) -> Function: ...


@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_result_tokens: int | None = None,
    truncate: Truncation = "end",
    max_concurrency: int | None = None,
) -> Callable[[Function], Function]: ...


def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_result_tokens: int | None = None,
    truncate: Truncation = "end",
    max_concurrency: int | None = None,
) -> Any:
    """Decorator, with or without options, for a function that is a tool, and for a method of an `Environment`.

    `name`: name of the tool; None takes that of the function. `description`: text that the policy reads; None takes the
    docstring. `timeout_s`: maximum seconds per call. `max_result_tokens`: maximum number of tokens of a result; None
    takes `RolloutLimits.max_tool_tokens`. `truncate`: part of a too long result that is removed, "start", "middle" or
    "end". `max_concurrency`: maximum number of calls that run at a time in this event loop, over all samples; the time
    that a call waits for its turn does not count against `timeout_s`. Raises BadInputError for an option of a wrong
    type or value.
    """
    if function is not None and not callable(function):
        raise BadInputError(f"tool is a decorator of a function, got {function!r:.80}; write @tool or @tool(name=...)")
    options = ToolOptions(name, description, timeout_s, max_result_tokens, truncate, max_concurrency)

    def decorate(decorated: Function) -> Function:
        setattr(decorated, OPTIONS_ATTRIBUTE, options)
        return decorated

    return decorate if function is None else decorate(function)


def options_of(function: object) -> ToolOptions | None:
    """The options of a function with the decorator `tool`, also of a bound method. None for any other object."""
    options = getattr(function, OPTIONS_ATTRIBUTE, None)
    return options if isinstance(options, ToolOptions) else None
