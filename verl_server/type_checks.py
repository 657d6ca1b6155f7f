"""Public constructors: pydantic checks the values, by annotation, and its errors become BadInputError."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from verl_server.errors import BadInputError
from verl_server.validation import is_bool, to_plain

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = ParamSpec("P")
R = TypeVar("R")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def check_fields(settings: DataclassInstance) -> None:
    """Raise BadInputError unless each field of a dataclass fits its annotation. Call it in `__post_init__`.

    Numbers of numpy become ints and floats. Values of fields with `repr=False` are not shown: they can be keys.
    """
    for item in fields(settings):
        name, value = f"{type(settings).__name__}.{item.name}", getattr(settings, item.name)
        expected = _field_types(type(settings))[item.name]
        object.__setattr__(settings, item.name, checked_value(name, value, expected, is_secret=not item.repr))


def check_arguments(*, skip: Collection[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a constructor: raises BadInputError for an argument that does not fit its annotation.

    Numbers of numpy are passed on as ints and floats, and `**arguments` as `to_plain` converts them. Not checked: the
    arguments in `skip`, and those whose annotation is imported for type checkers only. Values of arguments whose name
    ends with `key` are not shown.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        variadic = {name for name, item in signature.parameters.items() if item.kind is item.VAR_KEYWORD}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given, hints = (bound := signature.bind(*args, **kwargs)).arguments, _argument_types(function)
            for name in given.keys() & hints.keys() - {*skip} - variadic:
                given[name] = checked_value(name, given[name], hints[name], is_secret=name.endswith("key"))
            given.update((name, to_plain(given[name])) for name in variadic.intersection(given))
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def checked_value(name: str, value: object, expected: Any, *, is_secret: bool = False) -> Any:
    """`value` if it fits the annotation `expected`. A number of numpy becomes an int or a float.

    Otherwise raise BadInputError, which does not show a value that `is_secret`, nor the items of dicts and lists.
    """
    value = to_plain(value) if isinstance(value, Real) or is_bool(value) else value
    try:
        checked = _adapter(expected).validate_python(value, strict=True)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        given = first["input"]
        is_item = given is not value
        place = "".join(f"[{each!r}]" for each in first["loc"] if is_item and _is_index(value, each))
        wanted = dict.fromkeys(each["msg"].replace("Input should be", "must be") for each in (first, *others))
        kind = type(given).__name__
        is_container = isinstance(given, Collection) and not isinstance(given, (str, bytes))  # its items may be keys
        is_hidden = is_secret or is_item or is_container
        got = f"a value of type {kind}" if is_hidden else f"{_SHORT.repr(given)} ({kind})"
        raise BadInputError(f"{name}{place} {' or '.join(wanted)}, got {got}", argument=name) from None
    if isinstance(checked, float) and not isinstance(value, Real):  # pydantic calls `__float__`, as of a tensor
        got = type(value).__name__ if is_secret else f"{_SHORT.repr(value)} ({type(value).__name__})"
        raise BadInputError(f"{name} must be a valid number, got {got}", argument=name)
    return value


def _is_index(value: Any, key: object) -> bool:
    """Whether a part of the location of an error is an index of `value`; others name a choice of a union."""
    return key in value if isinstance(value, dict) else isinstance(key, int)


@functools.cache
def _adapter(expected: Any) -> TypeAdapter[Any]:
    config = None if is_dataclass(expected) else ConfigDict(arbitrary_types_allowed=True)
    return TypeAdapter(expected, config=config)


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@functools.cache
def _argument_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Annotations of a function by argument, without those whose names are imported for type checkers only."""
    hints = {}
    for name, annotation in inspect.get_annotations(function).items():
        try:
            hints[name] = eval(annotation, inspect.unwrap(function).__globals__)  # a string: PEP 563
        except NameError:
            continue
    return hints
