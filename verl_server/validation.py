"""Checks of arguments that several folders of this package need."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from verl_server.errors import BadInputError


def require_whole_number(name: str, value: object, minimum: int = 1) -> int:
    """`value` if it is an int of at least `minimum`; a bool is not an int here. Otherwise raise BadInputError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise BadInputError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
    return value


def require_seconds(name: str, value: object) -> float:
    """`value` if it is a finite number above 0; a bool is not a number here. Otherwise raise BadInputError."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return value
    raise BadInputError(f"{name} must be a positive number of seconds, got {value!r}")


def require_list(name: str, value: object, hint: str) -> None:
    """Raise BadInputError unless `value` is a list or another sequence; a string is none. `hint` says what to pass."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise BadInputError(f"{name} must be a list, got {type(value).__name__}; {hint}")


def require_callable(name: str, value: object, hint: str, *args: object, **kwargs: object) -> None:
    """Raise BadInputError unless `value` can be called with these arguments. `hint` says what to pass."""
    if not callable(value):
        raise BadInputError(f"{name} must be a function, got {type(value).__name__}; {hint}")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a function of a C extension may have no signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise BadInputError(f"{name} has the wrong parameters {signature}: {error}; {hint}") from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the most similar known name, or nothing when none is similar."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def require_http_url(name: str, url: str, example: str = "http://127.0.0.1:30000") -> str:
    """`url` without a slash at its end. Raises BadInputError unless it is an HTTP URL with a host."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number from 0 to 65535
        is_valid = False
    if not is_valid:
        raise BadInputError(f"{name} {url!r} is not an HTTP URL; write for example {example}")
    return url.rstrip("/")
