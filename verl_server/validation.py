"""Checks of arguments that several folders of this package need."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from verl_server.errors import BadInputError


def require_whole_number(name: str, value: object, minimum: int = 1) -> int:
    """`value` if it is an int of at least `minimum`; a bool is not an int here. Otherwise raise BadInputError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise BadInputError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    return value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the most similar known name, or nothing when none is similar."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
