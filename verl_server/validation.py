"""Checks of arguments that several folders of this package need."""

from __future__ import annotations

from verl_server.errors import BadInputError


def require_whole_number(name: str, value: object, minimum: int = 1) -> int:
    """`value` if it is an int of at least `minimum`; a bool is not an int here. Otherwise raise BadInputError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise BadInputError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    return value
