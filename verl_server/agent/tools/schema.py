"""From a Python function to a tool: the description, and a model of the parameters, which gives the JSON schema."""

from __future__ import annotations

import functools
import inspect
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import pydantic
from pydantic.fields import FieldInfo

from verl_server.errors import BadInputError

MODEL_CONFIG = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
EXAMPLE = 'def search(query: str) -> str:\n    """Search the documents."""\n    ...'
"""A function that can be a tool, for errors."""
WRAPS = "A decorator around a tool needs @functools.wraps(function): then the docstring and the parameters are visible."
"""How a decorated function can be a tool, for errors."""


def require_function(function: object, name: str | None) -> Callable[..., Any]:
    """What a tool calls: a function, a method, a `functools.partial` or a decorator object (with `__wrapped__`).

    For another callable object, its method `__call__`. Raises BadInputError for an object that cannot be a tool.
    """
    if isinstance(function, type) or not callable(function):
        got = f"the class {function.__name__}" if isinstance(function, type) else f"{function!r:.80}"
        raise BadInputError(
            f"a tool must be a function, a method or a Tool, got {got}; write a function such as\n{EXAMPLE}"
        )
    if name is None and not isinstance(getattr(function, "__name__", None), str):
        raise BadInputError(
            f"a tool must be a function, a method or a Tool, got {function!r:.80}, which has no name; pass "
            'FunctionTool(..., name="search")'
        )
    return _as_called(function)


def _as_called(function: Any) -> Callable[..., Any]:
    if isinstance(function, functools.partial):  # after `functools.update_wrapper`, its signature is that of `func`
        return functools.partial(function.func, *function.args, **function.keywords)
    is_whole = inspect.isroutine(function) or hasattr(function, "__wrapped__")  # its signature is that of `__wrapped__`
    called: Callable[..., Any] = function if is_whole else function.__call__
    return called


def find_layers(function: Callable[..., Any]) -> Iterator[Any]:
    """The callable itself, and what it calls: the function behind decorators, a `functools.partial` and an object."""
    layer: Any = function
    while True:
        yield layer
        if isinstance(layer, functools.partial):
            layer = layer.func
        elif hasattr(layer, "__wrapped__"):
            layer = layer.__wrapped__
        elif inspect.isroutine(layer):
            return
        else:
            layer = layer.__call__


def find_inner_function(function: Callable[..., Any]) -> Any:
    """The function or method behind decorators, a `functools.partial` and a callable object."""
    return list(find_layers(function))[-1]


def read_description(name: str, function: Callable[..., Any], *, is_needed: bool = True) -> str:
    """The docstring of the outermost layer that has one. For a callable object, its `__call__` or its class.

    Without a docstring, BadInputError is raised if it `is_needed`; otherwise the words of the tool's name are returned.
    """
    description = next(filter(None, map(_own_docstring, find_layers(function))), None)
    if description is None and not is_needed:
        return name.replace("_", " ")
    if description is None:
        raise BadInputError(
            f"tool {name!r} has no docstring; the policy reads the docstring as the description of the tool. Write it "
            f"as the first line of the function, for example\n{EXAMPLE}\n{WRAPS}"
        )
    return inspect.cleandoc(description)


def _own_docstring(layer: Any) -> str | None:
    """The docstring of a function or an object, but not that of the object's class unless it has none in `__call__`."""
    if getattr(layer, "__name__", "") == "__call__":  # `inspect.getdoc` returns the docstring of `type.__call__`
        return layer.__doc__ or type(getattr(layer, "__self__", None)).__doc__
    is_of_class = layer.__doc__ in (type(layer).__doc__, functools.partial.__doc__)
    return None if is_of_class else inspect.getdoc(layer)


def make_arguments_model(name: str, function: Callable[..., Any]) -> type[pydantic.BaseModel]:
    """A model of the function's parameters, which validates arguments and gives the JSON schema.

    The arguments of a `functools.partial` are no parameters. Raises BadInputError for a parameter without a
    usable annotation and for one that cannot be passed by name.
    """
    parameters = _read_parameters(name, function)
    annotations = _read_annotations(name, function, parameters)
    fields: dict[str, Any] = {}
    for parameter in parameters:
        default = ... if parameter.default is parameter.empty else parameter.default
        annotation = _with_default(annotations[parameter.name], default)
        fields[parameter.name] = (_with_description(annotation, default), default)
    for parameter_name, field in fields.items():
        _require_json_schema(name, parameter_name, field)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a parameter has the name of an attribute of BaseModel, such as `schema`
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
    partials = [layer for layer in find_layers(function) if isinstance(layer, functools.partial)]
    try:
        signature = inspect.signature(_as_called(partials[0]) if partials else function)
    except (TypeError, ValueError) as error:
        raise BadInputError(f"tool {name!r}: its parameters cannot be read: {error}") from error
    bound = {keyword for layer in partials for keyword in layer.keywords}
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in bound]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise BadInputError(
                f"tool {name!r}: parameter {parameter.name!r} cannot be passed by name; write each parameter "
                f"with its name and its type. {WRAPS}"
            )
        if parameter.annotation is not parameter.empty:
            continue
        owner, method = ["", *find_inner_function(function).__qualname__.split(".")][-2:]
        if parameter.name == "self" and owner not in ("", "<locals>"):
            raise BadInputError(
                f"tool {name!r}: {owner}.{method} is a method of the class {owner}; pass the method of an object, for "
                f"example {owner}().{method}"
            )
        raise BadInputError(
            f"tool {name!r}: parameter {parameter.name!r} has no annotation; the annotations are the JSON schema "
            f"that the policy reads. Write `{parameter.name}: str`, or the type that the function needs. {WRAPS}"
        )
    return parameters


def _read_annotations(name: str, function: Callable[..., Any], parameters: list[inspect.Parameter]) -> dict[str, Any]:
    """The annotations of the parameters, evaluated. The annotation of the result is not needed."""
    annotations = {parameter.name: parameter.annotation for parameter in parameters}
    names = getattr(find_inner_function(function), "__globals__", {})
    try:
        holder: Any = types.SimpleNamespace(__annotations__=annotations)
        return typing.get_type_hints(holder, globalns=names, include_extras=True)
    except (NameError, TypeError, SyntaxError) as error:
        hint = "Import their types at run time, not only under `if TYPE_CHECKING`"
        if not isinstance(error, NameError):
            hint = "An annotation must be a type, for example list[int]; a description belongs in Annotated[str, ...]"
        raise BadInputError(
            f"tool {name!r}: the annotations of its parameters cannot be read: {error}. {hint}"
        ) from error


def _with_default(annotation: Any, default: Any) -> Any:
    """The annotation, which also allows None if None is the default: `limit: int = None`."""
    value = default.default if isinstance(default, FieldInfo) else default
    base, *metadata = typing.get_args(annotation) if typing.get_origin(annotation) is Annotated else [annotation]
    if value is not None or base in (Any, object, None) or type(None) in typing.get_args(base):
        return annotation
    return Annotated[base | None, *metadata] if metadata else base | None


def _with_description(annotation: Any, default: Any) -> Any:
    """`Annotated[str, "text"]` with the text as the description, unless a pydantic field gives another description."""
    texts = [item for item in getattr(annotation, "__metadata__", ()) if isinstance(item, str)]
    documented = [FieldInfo.from_annotation(annotation), *([default] if isinstance(default, FieldInfo) else [])]
    if not texts or any(field.description is not None for field in documented):
        return annotation
    return Annotated[annotation, pydantic.Field(description=texts[0])]
