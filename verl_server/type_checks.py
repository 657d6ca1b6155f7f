"""Checks of types by annotation: the fields of a settings dataclass, and the arguments of a constructor.

`verl_server/validation.py` has the checks of single values. Imports the standard library only.
"""

from __future__ import annotations

import enum
import functools
import inspect
import os
import reprlib
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from verl_server.argument_names import find_argument_error
from verl_server.errors import BadInputError
from verl_server.validation import is_finite_number, to_plain

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = ParamSpec("P")
R = TypeVar("R")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_NAMES = {
    bool: "True or False", str: "a string", type(None): "None", Sequence: "a list", Mapping: "a dict", dict: "a dict",
    Callable: "a function", Path: "a path", os.PathLike: "a path",
}  # fmt: skip


class NumberRange(enum.Enum):
    """The numbers that an argument or a field accepts."""

    ANY = enum.auto()
    """Any number, also NaN and infinity."""
    NOT_NEGATIVE = enum.auto()
    """Zero and finite numbers above it."""
    POSITIVE = enum.auto()
    """Finite numbers above zero."""


def check_fields(settings: DataclassInstance, *, may_be_zero: Collection[str] = ()) -> None:
    """Raise BadInputError unless each field of a dataclass has its annotated type and each number is positive.

    Call it in `__post_init__`. Numbers of numpy become ints and floats. `may_be_zero`: names of the fields that may be
    0. Values of fields with `repr=False` are not shown, because they can be keys.
    """
    hints = _field_types(type(settings))
    for item in fields(settings):
        accepted = NumberRange.NOT_NEGATIVE if item.name in may_be_zero else NumberRange.POSITIVE
        name, value = f"{type(settings).__name__}.{item.name}", getattr(settings, item.name)
        error = find_type_error(name, value, hints[item.name], numbers=accepted, is_secret=not item.repr)
        if error is not None:
            raise error
        object.__setattr__(settings, item.name, _plain_number(value))


def check_arguments(*, skip: Collection[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a constructor: raises BadInputError for an argument that is not of its annotated type.

    Numbers of numpy are passed on as ints and floats, and `**arguments` as `to_plain` converts them. Not checked: the
    arguments in `skip`, `**arguments`, and arguments whose annotation is imported for type checkers only. Values of
    arguments whose name ends with `key` are not shown.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        variadic = {name for name, item in signature.parameters.items() if item.kind is item.VAR_KEYWORD}
        checked = signature.parameters.keys() - variadic - {*skip}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            hints = _argument_types(function)
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as mismatch:
                raise find_argument_error(function, args, kwargs) or mismatch from None
            given = bound.arguments
            for name in [name for name in given if name in checked and name in hints]:
                error = find_type_error(name, given[name], hints[name], is_secret=name.endswith("key"))
                if error is not None:
                    raise error
                given[name] = _plain_number(given[name])
            given.update((name, to_plain(given[name])) for name in variadic.intersection(given))
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def find_type_error(
    name: str,
    value: object,
    expected: Any,
    *,
    numbers: NumberRange = NumberRange.ANY,
    is_secret: bool = False,
) -> BadInputError | None:
    """The error of a value that is not of the type `expected`, or None. Elements of lists and dicts are checked too.

    `numbers`: the numbers that are accepted where `expected` is a number. `is_secret`: the message shows the type of
    the value only.
    """
    fitting = [choice for choice in _choices(expected) if _fits(value, choice, numbers)]
    if not fitting:
        wanted = " or ".join(_describe(choice, numbers, name) for choice in _choices(expected))
        kind = type(value).__name__
        got = "None" if value is None else f"a value of type {kind}" if is_secret else f"{_SHORT.repr(value)} ({kind})"
        if isinstance(value, type) and any(_is_class_of(value, choice) for choice in _choices(expected)):
            got = f"the class {value.__name__}; write {value.__name__}(...)"
        return BadInputError(f"{name} must be {wanted}, got {got}", argument=name)
    errors = [_find_element_error(name, value, get_args(choice)) for choice in fitting]
    return None if None in errors else errors[0]


def _find_element_error(name: str, value: object, expected: tuple[Any, ...]) -> BadInputError | None:
    """The error of the first wrong element of a list or dict. `expected`: the parameters of its annotation.

    Values of a dict are not shown, because they can be keys: environment variables, for example.
    """
    found: Iterable[BadInputError | None] = ()
    if isinstance(value, Mapping) and len(expected) == 2:
        keys = (find_type_error(f"key of {name}", key, expected[0]) for key in value)
        items = (find_type_error(f"{name}[{key!r}]", item, expected[1], is_secret=True) for key, item in value.items())
        found = (*keys, *items)
    elif isinstance(value, Sequence) and len(expected) == 1:
        found = (find_type_error(f"{name}[{index}]", item, expected[0]) for index, item in enumerate(value))
    return next((error for error in found if error is not None), None)


def _choices(expected: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation: `int | None` has two."""
    return get_args(expected) if get_origin(expected) in (Union, types.UnionType) else (expected,)


def _class_of(expected: Any) -> Any:
    """The class of an annotation: `Sequence[int]` is a `Sequence`."""
    origin = get_origin(expected)
    return _class_of(get_args(expected)[0]) if origin is Annotated else origin or expected


def _plain_number(value: Any) -> Any:
    """A number of another library as an int or a float. Other values are returned as they are."""
    return to_plain(value) if isinstance(value, Real) else value


def _fits(value: object, expected: Any, numbers: NumberRange) -> bool:
    kind = _class_of(expected)
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
            return False
        if numbers is NumberRange.ANY:
            return True
        return is_finite_number(value) and (value > 0 or (value == 0 and numbers is NumberRange.NOT_NEGATIVE))
    is_protocol = getattr(kind, "_is_protocol", False)
    is_unchecked = is_protocol and not getattr(kind, "_is_runtime_protocol", False)
    if kind is Any or is_unchecked or not isinstance(kind, type):  # isinstance takes no such protocol and no variable
        return True
    if is_protocol and isinstance(value, type):  # a class has the methods of its instances
        return False
    return isinstance(value, kind) and not (kind is Sequence and isinstance(value, (str, bytes)))


def _is_class_of(value: type, expected: Any) -> bool:
    """Whether `value` is a class of objects of the type `expected`."""
    kind = _class_of(expected)
    if getattr(kind, "_is_protocol", False):  # issubclass takes no protocol with attributes
        return isinstance(value, kind)
    return isinstance(kind, type) and issubclass(value, kind)


def _describe(expected: Any, numbers: NumberRange, name: str) -> str:
    """An annotation in words. `Annotated` has the words as its second parameter."""
    kind = _class_of(expected)
    if get_origin(expected) is Annotated:
        return str(get_args(expected)[1])
    if kind is int:
        minimum = {NumberRange.NOT_NEGATIVE: " of at least 0", NumberRange.POSITIVE: " of at least 1"}
        return "a whole number" + minimum.get(numbers, "")
    if kind is float:
        number = "a number" if numbers is NumberRange.ANY else "a positive number"
        return number + " of seconds" * name.endswith("_s") + " or 0" * (numbers is NumberRange.NOT_NEGATIVE)
    if kind is Sequence and get_args(expected):
        return f"a list of {getattr(get_args(expected)[0], '__name__', 'values')}"
    own_name = getattr(kind, "__name__", str(kind))
    return _NAMES.get(kind, f"an {own_name}" if own_name[0] in "AEIOU" else f"a {own_name}")


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
