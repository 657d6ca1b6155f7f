"""From a Python function to a tool: the description, and a model of the parameters, which gives the JSON schema."""

from __future__ import annotations

import functools
import inspect
import types
import typing
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import pydantic
from pydantic.fields import FieldInfo

from verl_server.errors import BadInputError

MODEL_CONFIG = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
EXAMPLE = 'def search(query: str) -> str:\n    """Search the documents."""\n    ...'
"""A function that can be a tool, for errors."""


def require_function(function: object, name: str | None) -> Callable[..., Any]:
    """The function or method behind a tool. For a callable object, its method `__call__`.

    A `functools.partial` is returned unchanged. Raises BadInputError for an object that cannot be a tool.
    """
    if isinstance(function, type) or not callable(function):
        got = f"the class {function.__name__}" if isinstance(function, type) else f"{function!r:.80}"
        raise BadInputError(
            f"a tool must be a function, a method or a Tool, got {got}; write a function such as\n{EXAMPLE}"
        )
    if getattr(function, "__name__", "") == "<lambda>":
        raise BadInputError(
            f"a lambda cannot be a tool, because it has no name, annotations and docstring; write a function such as\n"
            f"{EXAMPLE}"
        )
    if not inspect.isroutine(function) and name is None:
        raise BadInputError(
            f"a tool must be a function, a method or a Tool, got {function!r:.80}, which has no name; pass "
            'FunctionTool(..., name="search")'
        )
    inner = inspect.unwrap(find_inner_function(function))
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise BadInputError(
            f"the function {inner.__name__} has `yield`, so it returns an iterator, but the policy reads one result; "
            "collect the values and return them as a list"
        )
    return function if isinstance(function, functools.partial) else find_inner_function(function)


def find_inner_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function or method behind a `functools.partial` or a callable object, or else the same function."""
    inner: Any = function.func if isinstance(function, functools.partial) else function
    return inner if inspect.isroutine(inner) else inner.__call__


def read_description(name: str, function: Callable[..., Any]) -> str:
    """The docstring of a tool's function. For a callable object, that of its method `__call__` or of its class.

    Raises BadInputError if there is none.
    """
    inner = find_inner_function(function)
    if inner.__name__ == "__call__":  # `inspect.getdoc` returns the docstring of `type.__call__`
        description = inner.__doc__ or type(getattr(inner, "__self__", None)).__doc__
    else:
        description = inspect.getdoc(inner)
    if not description:
        raise BadInputError(
            f"tool {name!r} has no docstring; the policy reads the docstring as the description of the tool. Write it "
            f"as the first line of the function, for example\n{EXAMPLE}"
        )
    return inspect.cleandoc(description)


def make_arguments_model(name: str, function: Callable[..., Any]) -> type[pydantic.BaseModel]:
    """A model of the function's parameters, which validates arguments and gives the JSON schema.

    The keyword arguments of a `functools.partial` are no parameters. Raises BadInputError for a parameter without a
    usable annotation and for one that cannot be passed by name.
    """
    parameters = _read_parameters(name, function)
    annotations = _read_annotations(name, function, parameters)
    fields: dict[str, Any] = {}
    for parameter in parameters:
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (_with_description(annotations[parameter.name], default), default)
    for parameter_name, field in fields.items():
        _require_json_schema(name, parameter_name, field)
    model: type[pydantic.BaseModel] = pydantic.create_model(name, __config__=MODEL_CONFIG, **fields)
    for parameter_name in fields.keys() - model.model_fields.keys():  # pydantic takes them for settings of the model
        raise BadInputError(f"tool {name!r}: a parameter cannot have the name {parameter_name!r}; rename it")
    return model


def _require_json_schema(name: str, parameter: str, field: Any) -> None:
    """Raise BadInputError if a parameter has no JSON schema. `field`: its annotation and its default."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same warnings come from the model of all parameters
            pydantic.create_model("parameter", __config__=MODEL_CONFIG, value=field).model_json_schema()
    except (ValueError, TypeError, pydantic.PydanticUserError) as error:
        reason = str(getattr(error, "message", error)).rstrip(".")
        raise BadInputError(
            f"tool {name!r}: the annotation of parameter {parameter!r} has no JSON schema: {reason}. Use a type of "
            "JSON, for example str, int, list[float] or a pydantic model"
        ) from error


def _read_parameters(name: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that the policy sets. Raises BadInputError for one without an annotation or without a name."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise BadInputError(f"tool {name!r}: its parameters cannot be read: {error}") from error
    bound = function.keywords if isinstance(function, functools.partial) else {}
    parameters = [parameter for parameter in parameters if parameter.name not in bound]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise BadInputError(f"tool {name!r}: parameter {parameter.name!r} cannot be passed by name")
        if parameter.annotation is not parameter.empty:
            continue
        *_, owner, method = "", *find_inner_function(function).__qualname__.split(".")
        if parameter.name == "self" and owner not in ("", "<locals>"):
            raise BadInputError(
                f"tool {name!r}: {owner}.{method} is a method of the class {owner}; pass the method of an object, for "
                f"example {owner}().{method}"
            )
        raise BadInputError(
            f"tool {name!r}: parameter {parameter.name!r} has no annotation; the annotations are the JSON schema "
            f"that the policy reads. Write `{parameter.name}: str`, or the type that the function needs"
        )
    return parameters


def _read_annotations(name: str, function: Callable[..., Any], parameters: list[inspect.Parameter]) -> dict[str, Any]:
    """The annotations of the parameters, evaluated. The annotation of the result is not needed."""
    annotations = {parameter.name: parameter.annotation for parameter in parameters}
    names = getattr(inspect.unwrap(find_inner_function(function)), "__globals__", {})
    try:
        holder: Any = types.SimpleNamespace(__annotations__=annotations)
        return typing.get_type_hints(holder, globalns=names, include_extras=True)
    except (NameError, TypeError, SyntaxError) as error:
        cure = "Import their types at run time, not only under `if TYPE_CHECKING`"
        if not isinstance(error, NameError):
            cure = "An annotation must be a type, for example list[int]; a description belongs into Annotated[str, ...]"
        raise BadInputError(
            f"tool {name!r}: the annotations of its parameters cannot be read: {error}. {cure}"
        ) from error


def _with_description(annotation: Any, default: Any) -> Any:
    """`Annotated[str, "text"]` with the text as the description, unless a pydantic field gives another description."""
    texts = [item for item in getattr(annotation, "__metadata__", ()) if isinstance(item, str)]
    documented = [FieldInfo.from_annotation(annotation), *([default] if isinstance(default, FieldInfo) else [])]
    if not texts or any(field.description is not None for field in documented):
        return annotation
    return Annotated[annotation, pydantic.Field(description=texts[0])]
