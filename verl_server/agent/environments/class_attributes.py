"""Checks of the attributes of an environment class, before any sample starts."""

from __future__ import annotations

import difflib
import inspect
import logging
from numbers import Number

from verl_server.agent.environments.decorators import decorators_of
from verl_server.agent.limits import RolloutLimits
from verl_server.errors import BadInputError
from verl_server.validation import require_parameters

logger = logging.getLogger(__name__)

SETTINGS = ("setup_timeout_s", "setup_attempts", "teardown_timeout_s")
"""Class attributes that the runner reads."""
MIN_SIMILARITY = 0.9
"""Similarity of a misspelled setting (`difflib`). Other attributes, for example `max_attempts`, belong to the user."""


def require_class_attributes(cls: type, base: type) -> None:
    """Check what a subclass of `Environment` defines. `base`: `Environment` itself.

    Raises BadInputError for a decorator `tool` or `reward` on what cannot be a tool or a reward, for wrong parameters
    of such a method, and for a misspelled setting. Logs a warning for a limit that belongs in `RolloutLimits`.
    """
    for name, value in vars(cls).items():
        tool, reward = decorators_of(value)
        if tool is not None and reward is not None:
            raise BadInputError(
                f"{cls.__name__}.{name} has the decorators @tool and @reward, so the policy could call its own reward; "
                "write two methods"
            )
        if tool is not None or reward is not None:
            _require_method(cls, base, name, value, is_tool=tool is not None)
        elif isinstance(value, Number) and name not in SETTINGS:
            _require_no_setting(cls, base, name, value)


def _require_method(cls: type, base: type, name: str, value: object, *, is_tool: bool) -> None:
    """Refuse what cannot be a tool or a reward. `value`: an attribute with one of the two decorators."""
    decorator = "tool" if is_tool else "reward"
    if isinstance(value, (staticmethod, classmethod, property)):
        raise BadInputError(
            f"the {decorator} {name!r} is a {type(value).__name__}; write a method, `def {name}(self, ...)`"
        )
    if hasattr(base, name):
        hint = f'give the method another name, and the tool this name: @tool(name="{name}")' if is_tool else "rename it"
        raise BadInputError(f"{name!r} is a method of every environment, so it cannot be a {decorator}; {hint}")
    if not inspect.isfunction(inspect.unwrap(value)):  # type: ignore[arg-type]
        return
    if not is_tool:
        hint = f"write `def {name}(self, sample)`; data of the task is in sample.task.data"
        require_parameters(f"the reward {cls.__name__}.{name}", value, ("self", "sample"), hint)
        return
    first = next(iter(inspect.signature(value).parameters.values()), None)  # type: ignore[arg-type]
    if first is None or not (first.name == "self" or first.kind is first.VAR_POSITIONAL):
        got = "no parameter" if first is None else f"the first parameter {first.name!r}"
        raise BadInputError(
            f"the tool {cls.__name__}.{name} has {got}, but a method needs `self`; write `def {name}(self, ...)`"
        )


def _require_no_setting(cls: type, base: type, name: str, value: Number) -> None:
    """Refuse a misspelled setting, and warn of a limit that has no effect. `value`: the attribute."""
    if close := difflib.get_close_matches(name, SETTINGS, n=1, cutoff=MIN_SIMILARITY):
        raise BadInputError(f"{cls.__name__}.{name} has no effect; did you mean {close[0]!r}?", argument=name)
    is_limit = name in RolloutLimits.__dataclass_fields__
    if is_limit and cls.run is base.run:  # type: ignore[attr-defined]
        logger.warning(
            "%s.%s has no effect unless the environment reads it; for a limit of each sample, pass "
            "RolloutRunner(limits=RolloutLimits(%s=%s))",
            cls.__name__,
            name,
            name,
            value,
        )
