"""Names in a subclass of `Environment` that other libraries use, and that would have no effect here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from verl_server.agent.environments.decorators import decorators_of
from verl_server.errors import BadInputError

ATTRIBUTES = {
    "tools": "write a method with the decorator @tool for each tool",
    "rewards": "write a method with the decorator @reward for each reward",
}
"""Class attributes that are refused, and what to write instead."""
SETUP, TEARDOWN, RUN = "async def setup(self)", "async def teardown(self)", "async def run(self, episode)"
REWARD = "the decorator @reward above `def NAME(self, sample)`"
METHODS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("set_up", "setUp", "setup_state", "reset"), ("setup", SETUP)),
    **dict.fromkeys(("tear_down", "tearDown", "clean_up", "cleanup"), ("teardown", TEARDOWN)),
    **dict.fromkeys(("env_response", "is_completed", "rollout"), ("run", RUN)),
    **dict.fromkeys(
        ("reward", "get_reward", "compute_reward", "compute_score", "reward_fn", "reward_func"), ("", REWARD)
    ),
}
"""Methods that are refused if nothing can call them: the method of `Environment` in their place, and what to write."""


def require_no_near_miss(kind: type, base: type) -> None:
    """Raise BadInputError if a class has an attribute or a method of another library that nothing would use.

    `base`: the class `Environment`. A method with a decorator, or that another method of the class names, is used. So
    is one beside the method of `base` that it could be mistaken for.
    """
    own = vars(kind)
    for name, hint in ATTRIBUTES.items():
        if name in own and not _is_decorated(own[name]):
            raise BadInputError(f"{kind.__name__}.{name} would have no effect; {hint}")
    for name, (place, text) in METHODS.items():
        if not isinstance(method := own.get(name), FunctionType) or _is_decorated(method):
            continue
        is_replaced = place and getattr(kind, place) is not getattr(base, place)
        if not is_replaced and name not in _used_names(own, but=name):
            raise BadInputError(
                f"the method {kind.__name__}.{name} would never be called; write {text.replace('NAME', name)}"
            )


def _is_decorated(value: object) -> bool:
    return decorators_of(value) != (None, None)


def _used_names(own: Mapping[str, Any], but: str) -> set[str]:
    """The names of attributes that the functions of a class use, without those of the function `but`."""
    codes = [value.__code__ for name, value in own.items() if isinstance(value, FunctionType) and name != but]
    return {name for code in codes for each in _with_inner(code) for name in each.co_names}


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
