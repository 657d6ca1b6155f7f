"""Tools that a policy may call. A tool has a JSON schema, a timeout, and error messages that the policy can read."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import inspect
import json
import linecache
import logging
import os
import traceback
import types
import typing
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass
from numbers import Number
from typing import Annotated, Any, Literal, TypeVar, cast, overload

import orjson
import pydantic
from pydantic.fields import FieldInfo

from verl_server.agent.limits import EpisodeStopped, LoopSlots, Phase, RolloutLimits, count, measure
from verl_server.agent.user_code import CURRENT_EPISODE_STATE, call_user_function, create_user_task, wait_until_done
from verl_server.config import Name, Positive, PositiveInt
from verl_server.errors import BadInputError, InfrastructureError, UserCodeError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.messages import Message, as_json, copy_json
from verl_server.types import Json
from verl_server.validation import (
    check_arguments,
    check_fields,
)

logger = logging.getLogger(__name__)


# -- Options ----------------------------------------------------------------------------------------
# `tool`: the decorator that gives a function or a method of an environment the options of a tool.

Function = TypeVar("Function", bound=Callable[..., Any])
Truncation = Literal["start", "middle", "end"]
"""Part of a too long result that is removed."""
OPTIONS_ATTRIBUTE = "__verl_server_tool__"
DEFAULT_TIMEOUT_S = 30.0


@check_fields()
@dataclass(frozen=True)
class ToolOptions:
    """The options of a tool, see `tool`."""

    name: Name | None = None
    description: Name | None = None
    timeout_s: Positive = DEFAULT_TIMEOUT_S
    max_result_tokens: PositiveInt | None = None
    truncate: Truncation = "end"
    max_concurrency: PositiveInt | None = None

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


def tool(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorator, with or without options, for a function that is a tool, and for a method of an `Environment`.

    `name`: name of the tool; None takes that of the function. `description`: text that the policy reads; None takes the
    docstring. `timeout_s`: maximum seconds per call. `max_result_tokens`: maximum number of tokens of a result; None
    takes `RolloutLimits.max_tool_tokens`. `truncate`: part of a too long result that is removed, "start", "middle" or
    "end". `max_concurrency`: maximum number of calls that run at a time in this event loop, over all samples; the time
    that a call waits for its turn does not count against `timeout_s`. Raises BadInputError for an option of a wrong
    type or value.
    """
    checked = ToolOptions(**options)

    def decorate(decorated: Function) -> Function:
        setattr(decorated, OPTIONS_ATTRIBUTE, checked)
        return decorated

    return decorate if function is None else decorate(function)


def options_of(function: object) -> ToolOptions | None:
    """The options of a function with the decorator `tool`, also of a bound method. None for any other object."""
    options = getattr(function, OPTIONS_ATTRIBUTE, None)
    return options if isinstance(options, ToolOptions) else None


# -- Failure log ------------------------------------------------------------------------------------
# The log of exceptions that tools do not raise on purpose. The policy reads them as results of its calls.

_LOGGED: set[tuple[str, str, str | None, int]] = set()
"""Tool, type of the exception, file and line of each failure that was logged."""


def log_failure(name: str, error: Exception, source_file: str | None) -> None:
    """Log the exception of the tool `name` with its traceback, once for each line of the source file of the tool.

    An exception that the tool raises by itself with `raise` is not logged: it is an answer to the policy. Other
    exceptions can be a mistake in the tool, for example a missing key or attribute.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == source_file]
    if own and own[-1] is frames[-1] and is_raise(own[-1]):
        return
    line = (own or frames)[-1].lineno if frames else None
    failure = (name, type(error).__name__, source_file, line or 0)
    if failure not in _LOGGED:
        _LOGGED.add(failure)
        logger.warning(
            "the tool %r has raised an exception, which the policy reads as the result of its call. If this is a "
            "mistake in the tool, correct it. Later exceptions of this type at the same line are not logged; the "
            "metric tools/%s/errors/raised counts them",
            name,
            name,
            exc_info=error,
        )


def is_raise(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is at a statement `raise`, also at one behind `if ...:` on the same line."""
    line = linecache.getline(frame.filename, frame.lineno or 0).encode()
    return line[frame.colno or 0 :].split(b"#")[0].split(maxsplit=1)[:1] == [b"raise"]


# -- Result text ------------------------------------------------------------------------------------
# The text of what a tool returns, which the policy reads.

JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def as_result_text(name: str, value: Any) -> str:
    """A text as it is, data as JSON, and any other object as Python writes it. `name`: name of the tool.

    Raises UserCodeError for an iterator, an awaitable and an object that Python writes with its address in memory, also
    within lists and dicts: the text would say nothing, and it would differ when a sample is replayed.
    """
    if isinstance(value, (bytes, bytearray, os.PathLike, Number)) and not isinstance(value, (int, float)):
        value = _as_json(value)
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value, default=_as_json, option=JSON_OPTIONS).decode()
    except TypeError:  # an integer of more than 64 bits, a lone surrogate, or a value that is not JSON
        pass
    try:
        return json.dumps(value, default=_as_json, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError):
        _require_texts(name, value)
        return str(value)


def _require_texts(name: str, value: Any) -> None:
    """Raise UserCodeError for the objects of `as_result_text`.

    The address must be that of the object, or of the object whose method it is: a policy can write any other address.
    """
    parts, seen = [value], set()
    for part in parts:  # grows meanwhile
        if id(part) in seen:  # a list that contains itself
            continue
        seen.add(id(part))
        if isinstance(part, Mapping):
            parts += [*part.keys(), *part.values()]
            continue
        if isinstance(part, (list, tuple, Set, ValuesView)):
            parts += part
            continue
        text = str(part) if part is value else repr(part)
        address = f" at {id(getattr(part, '__self__', part)):#x}>"
        if isinstance(part, (Iterator, AsyncIterator, Awaitable)) or address in text:
            raise UserCodeError(
                f"tool {name!r} returned {text:.200}, which is an iterator, an awaitable or an object of which Python "
                "writes only the address in memory; return a list, a text, JSON values or a pydantic model, and write "
                "`await` before a coroutine"
            )


def _as_json(value: Any) -> Any:
    """A value of another library as JSON values. Raises TypeError for other values."""
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Set, Sequence, ValuesView)):
        return list(value)
    if isinstance(value, Number):  # a decimal or a fraction, with all of its digits
        return str(value)
    raise TypeError(type(value).__name__)


# -- Schema -----------------------------------------------------------------------------------------
# From a Python function to a tool: the description, and a model of the parameters, which gives the JSON schema.

MODEL_CONFIG = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
WRAPS = "A decorator around a tool needs @functools.wraps(function): then the docstring and the parameters are visible."
"""How a decorated function can be a tool, for errors."""


def _as_called(function: Any) -> Callable[..., Any]:
    """What a tool calls, whose signature `inspect` can read: for a callable object, its method `__call__`."""
    if isinstance(function, functools.partial):  # after `functools.update_wrapper`, its signature is that of `func`
        return functools.partial(function.func, *function.args, **function.keywords)
    is_whole = inspect.isroutine(function) or hasattr(function, "__wrapped__")  # its signature is that of `__wrapped__`
    called: Callable[..., Any] = function if is_whole else function.__call__
    return called


def _find_layers(function: Callable[..., Any]) -> Iterator[Any]:
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


def _inner_function(function: Callable[..., Any]) -> Any:
    """The function or method behind decorators, a `functools.partial` and a callable object."""
    return list(_find_layers(function))[-1]


def _read_description(name: str, function: Callable[..., Any], *, is_needed: bool) -> str:
    """The docstring of the outermost layer that has one. For a callable object, its `__call__` or its class.

    Without a docstring, BadInputError is raised if it `is_needed`; otherwise the words of the tool's name are returned.
    """
    description = next(filter(None, map(_own_docstring, _find_layers(function))), None)
    if description is None and is_needed:
        raise BadInputError(f"tool {name!r} has no docstring, which the policy reads as its description. {WRAPS}")
    return name.replace("_", " ") if description is None else inspect.cleandoc(description)


def _own_docstring(layer: Any) -> str | None:
    """The docstring of a function or an object, but not that of the object's class unless it has none in `__call__`."""
    if getattr(layer, "__name__", "") == "__call__":  # `inspect.getdoc` returns the docstring of `type.__call__`
        return layer.__doc__ or type(getattr(layer, "__self__", None)).__doc__
    is_of_class = layer.__doc__ in (type(layer).__doc__, functools.partial.__doc__)
    return None if is_of_class else inspect.getdoc(layer)


def _make_arguments_model(name: str, function: Callable[..., Any]) -> type[pydantic.BaseModel]:
    """A model of the function's parameters, which validates arguments and gives the JSON schema.

    The arguments of a `functools.partial` are no parameters. Raises BadInputError.
    """
    try:
        return _build_model(name, function)
    except (NameError, TypeError, SyntaxError, ValueError, pydantic.PydanticUserError) as error:
        reason = str(getattr(error, "message", error)).rstrip(".")
        raise BadInputError(
            f"tool {name!r}: its parameters have no JSON schema, which the policy reads: {reason}. Write each "
            "parameter with a type of JSON that is imported at run time, for example str, list[float] or a pydantic "
            f"model. {WRAPS}"
        ) from error


def _build_model(name: str, function: Callable[..., Any]) -> type[pydantic.BaseModel]:
    partials = [layer for layer in _find_layers(function) if isinstance(layer, functools.partial)]
    bound = {keyword for layer in partials for keyword in layer.keywords}
    signature = inspect.signature(_as_called(partials[0]) if partials else function)
    parameters = {key: item for key, item in signature.parameters.items() if key not in bound}
    for key, item in parameters.items():
        if item.annotation is item.empty:
            raise TypeError(f"the parameter {key!r} has no annotation")
        if item.kind not in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY):
            raise TypeError(f"the parameter {key!r} cannot be passed by name")
    # The annotation of the result is not needed: it may be imported for type checkers only.
    holder: Any = types.SimpleNamespace(__annotations__={key: item.annotation for key, item in parameters.items()})
    names = getattr(_inner_function(function), "__globals__", {})
    annotations = typing.get_type_hints(holder, globalns=names, include_extras=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a parameter has the name of an attribute of BaseModel, such as `schema`
        fields: dict[str, Any] = {key: _as_field(annotations[key], item) for key, item in parameters.items()}
        model: type[pydantic.BaseModel] = pydantic.create_model(name, __config__=MODEL_CONFIG, **fields)
        _schema_of(model)
    if hidden := fields.keys() - model.model_fields.keys():  # pydantic takes them for settings of the model
        raise TypeError(f"a parameter cannot have the name {min(hidden)!r}")
    return model


@functools.lru_cache(1024)
def _schema_of(model: type[pydantic.BaseModel]) -> Json:
    return model.model_json_schema()


def _as_field(annotation: Any, parameter: inspect.Parameter) -> tuple[Any, Any]:
    """A field of a pydantic model. A parameter whose default is None may be None: `limit: int = None`.

    `Annotated[str, "text"]` has the text as the description, unless a pydantic field gives another description.
    """
    default = ... if parameter.default is parameter.empty else parameter.default
    value = default.default if isinstance(default, FieldInfo) else default
    base, *metadata = typing.get_args(annotation) if typing.get_origin(annotation) is Annotated else [annotation]
    if value is None and base not in (Any, object, None) and type(None) not in typing.get_args(base):
        annotation = Annotated[base | None, *metadata] if metadata else base | None
    texts = [item for item in metadata if isinstance(item, str)]
    documented = [FieldInfo.from_annotation(annotation), *([default] if isinstance(default, FieldInfo) else [])]
    if texts and all(field.description is None for field in documented):
        annotation = Annotated[annotation, pydantic.Field(description=texts[0])]
    return annotation, default


# -- Tool -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolCall:
    """A well-formed tool call of a policy."""

    name: str
    arguments: Json


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool call as text. A failed call also has a result, which describes the failure.

    A lone surrogate, which UTF-8 does not have, becomes its escape (`\\udc80`).
    """

    name: str
    """Name of the tool. Empty if the call does not give a name."""
    content: str
    error_type: str | None = None
    """Type of the failure: `unknown_tool`, `bad_arguments`, `timeout`, `raised` or `malformed`. None for success."""

    def __post_init__(self) -> None:
        for name in ("name", "content"):  # a lone surrogate, for example of a file name, cannot be tokenized
            text = getattr(self, name).encode("utf-8", "backslashreplace").decode()
            object.__setattr__(self, name, text)

    @property
    def message(self) -> Json:
        """The result as a chat message with the role `tool`."""
        return {"role": "tool", "name": self.name, "content": self.content}


class ToolArgumentsError(Exception):
    """The arguments of a tool call do not fit the tool's schema."""


def _source_file(function: Callable[..., Any]) -> str | None:
    """The file that defines a function or a method, also behind decorators and in a `functools.partial`."""
    code = getattr(_inner_function(function), "__code__", None)
    return None if code is None else code.co_filename


class Tool(ABC):
    """A tool that a policy may call: a name, a JSON schema as chat templates take it, and a timeout per call."""

    @check_arguments(skip=("parameters",))
    def __init__(self, name: Name, description: str, parameters: Json, timeout_s: Positive) -> None:
        """`parameters`: JSON schema of the arguments. `timeout_s`: maximum seconds per call. Raises BadInputError."""
        self.name, self.timeout_s = name, timeout_s
        self.schema: Json = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        }

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.source_file = _source_file(cls.run)

    source_file: str | None = None
    """Path of the file that defines the tool. None if the tool is not defined in Python."""
    max_result_tokens: int | None = None
    """Maximum number of tokens of a result. None: `RolloutLimits.max_tool_tokens`."""
    truncate: Truncation = "end"
    """Part of a too long result that is removed: "start", "middle" or "end"."""

    @property
    def slots(self) -> asyncio.Semaphore | None:
        """Admits the calls that run at a time in this event loop. None without a limit."""
        return None

    @abstractmethod
    async def run(self, arguments: Mapping[str, Any]) -> Any:
        """Execute the tool. Returns text, or a value that is converted to JSON text.

        Raises ToolArgumentsError for arguments that do not fit the schema. It may raise any other exception; `call`
        converts exceptions to results.
        """

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Execute the tool within its timeout. Exceptions of the tool become results, which the policy can read.

        At its timeout the tool is cancelled. A tool that ignores the cancellation for 5 s keeps running, and its result
        is discarded.

        A NameError or an ImportError in the source file of the tool is raised, and the episode fails: it is a mistake
        in the tool, not in the call. If a statement `raise` of the tool raises it, it is a result. InfrastructureError
        is raised, too. UserCodeError is raised for a sandbox that was not started, and if `run` returns nothing to
        await, or a value that has no text (see `as_result_text`). EpisodeStopped is raised for a limit of the episode
        whose agent loop calls the tool, and not for a limit of another episode. An exception that is not raised by a
        statement `raise` of the tool is logged with its traceback, once for each line.
        """
        with measure(Phase.TOOL, **{"gen_ai.tool.name": self.name}):
            async with self.slots or contextlib.nullcontext():
                count(f"{self.name}/calls")
                try:
                    result = await self._call(arguments)
                except Exception:
                    count(f"{self.name}/errors/failed")
                    raise
        if result.error_type is not None:
            count(f"{self.name}/errors/{result.error_type}")
        return result

    async def _call(self, arguments: Mapping[str, Any]) -> ToolResult:
        task = create_user_task(self._run_as_text(arguments), CURRENT_EPISODE_STATE.get())
        timed_out = await wait_until_done(task, self.timeout_s, f"the tool {self.name!r}")
        try:
            return ToolResult(self.name, task.result())
        except (InfrastructureError, UserCodeError):
            raise
        except (asyncio.CancelledError, Exception) as error:
            if timed_out:
                return ToolResult(self.name, f"Error: no result within {self.timeout_s:g} s", "timeout")
            if isinstance(error, asyncio.CancelledError):
                return ToolResult(self.name, "Error: the tool was cancelled", "raised")  # the tool cancelled itself
            if isinstance(error, ToolArgumentsError):
                return ToolResult(self.name, f"Error: wrong arguments: {error}", "bad_arguments")
            if _is_mistake_in_source(error, self.source_file):
                raise
            log_failure(self.name, error, self.source_file)
            return ToolResult(self.name, f"Error: {type(error).__name__}: {error}", "raised")

    async def _run_as_text(self, arguments: Mapping[str, Any]) -> str:
        result = self.run(arguments)
        if not inspect.isawaitable(result):  # the policy would read the TypeError of `await`
            raise UserCodeError(f"{type(self).__qualname__}.run must be a coroutine function: write `async def run`")
        return as_result_text(self.name, await result)


class FunctionTool(Tool):
    """A Python function as a tool. Its annotations give the schema, its docstring gives the description.

    A function that is not a coroutine function runs in a thread of its own. The thread of a call that exceeds the
    timeout keeps running, and its result is discarded. `Annotated[int, Field(ge=1)]` gives a parameter bounds, and
    `Annotated[str, "text"]` a description.

    The function can be behind decorators, also behind those that are objects; parameters and docstring are those of the
    function in `__wrapped__`, which `functools.wraps` sets. A `functools.partial` and an object with `__call__` need a
    `name` unless they have a `__name__`. Arguments of the partial are not shown to the policy. Raises BadInputError for
    a class, for a function without a docstring, and for parameters that have no annotation or no JSON schema, have a
    name that begins with `_`, or cannot be passed by name.
    """

    @check_arguments(skip=("function",))
    def __init__(
        self, function: Callable[..., Any], *, name: Name | None = None, timeout_s: Positive | None = None
    ) -> None:
        """`name`: name of the tool. `timeout_s`: maximum seconds per call. None takes the options of the decorator
        `tool`, or the function's name and 30 s.
        """
        decorated = options_of(function)
        self._options = options = decorated or ToolOptions()
        name = name or options.name or getattr(function, "__name__", None)
        if isinstance(function, type) or not callable(function) or not isinstance(name, str):
            raise BadInputError(
                f"a tool must be a function, a method or a Tool, got {function!r:.80}; for another object that can be "
                'called, pass FunctionTool(..., name="search")'
            )
        self._function = _as_called(function)
        description = options.description or _read_description(name, function, is_needed=decorated is None)
        self._arguments_model = _arguments_model(name, self._function)
        schema = copy_json(_schema_of(self._arguments_model))
        super().__init__(name, description, schema, options.timeout_s if timeout_s is None else timeout_s)
        self.max_result_tokens, self.truncate = options.max_result_tokens, options.truncate
        self.source_file = _source_file(function)

    @property
    def slots(self) -> asyncio.Semaphore | None:
        return self._options.slots

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        try:
            validated = self._arguments_model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise ToolArgumentsError(problems) from error
        values = {name: getattr(validated, name) for name in type(validated).model_fields}
        return await call_user_function(self._function, **values)


_method_models: weakref.WeakKeyDictionary[Any, dict[str, type[pydantic.BaseModel]]] = weakref.WeakKeyDictionary()
"""Models of the parameters of methods by their function: each sample has an environment with the same methods."""


def _arguments_model(name: str, function: Callable[..., Any]) -> type[pydantic.BaseModel]:
    if not inspect.ismethod(function):
        return _make_arguments_model(name, function)
    models = _method_models.setdefault(function.__func__, {})
    if name not in models:
        models[name] = _make_arguments_model(name, function)
    return models[name]


def _is_mistake_in_source(error: Exception, source_file: str | None) -> bool:
    """Whether the source file of a tool uses an unknown name or a module that cannot be imported.

    A subclass of these exceptions, or an exception from another file, can be the answer to the policy's arguments: an
    unknown column of a table, for example, or code that the tool executes for the policy.
    """
    if type(error) not in (NameError, UnboundLocalError, ImportError, ModuleNotFoundError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename == source_file and not is_raise(frames[-1])


# -- Registry ---------------------------------------------------------------------------------------
# The tools of an agent by name.

MAX_CONCURRENT_CALLS = 16
"""Maximum number of calls of one turn that are executed at a time. A policy can write a thousand calls in one turn, and
each call of a function that is not a coroutine function has a thread."""


class ToolRegistry:
    """The tools of an agent by name. Functions are converted to `FunctionTool`."""

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]] = ()) -> None:
        """Raises BadInputError for a function that cannot be a tool, and for two tools with the same name."""
        self._tools: dict[str, Tool] = {}
        for item in tools:
            tool = item if isinstance(item, Tool) else FunctionTool(item)
            if tool.name in self._tools:
                raise BadInputError(
                    f"two tools have the name {tool.name!r}; pass name= to FunctionTool, or prefix= to mcp_tools"
                )
            self._tools[tool.name] = tool

    @property
    def names(self) -> list[str]:
        """Names of all tools, in the order of `schemas`."""
        return list(self._tools)

    @property
    def schemas(self) -> list[Json]:
        """JSON schemas of all tools, as chat templates take them."""
        return [tool.schema for tool in self._tools.values()]

    def get(self, name: str) -> Tool | None:
        """The tool with this name, or None."""
        return self._tools.get(name)

    def truncate_result(self, message: Message, renderer: ChatRenderer, limits: RolloutLimits) -> Message:
        """The message. The result of a tool is truncated to the limit of its tool or else to `max_tool_tokens`."""
        content = message.get("content")
        if message.get("role") != "tool" or not isinstance(content, (str, list)):
            return message
        tool = self.get(str(message.get("name")))
        max_tokens = (tool and tool.max_result_tokens) or limits.max_tool_tokens
        return {**message, "content": renderer.truncate_content(content, max_tokens, tool.truncate if tool else "end")}

    @functools.cached_property
    def digest(self) -> str:
        """A digest of the schemas, equal in every process."""
        return hashlib.sha256(as_json(self.schemas)).hexdigest()[:16]

    async def call(self, call: ToolCall) -> ToolResult:
        """Execute a tool call. Failures become results, see `Tool.call`."""
        tool = self._tools.get(call.name)
        if tool is None:
            count("errors/unknown_tool")
            known = ", ".join(sorted(self._tools)) or "none"
            return ToolResult(
                call.name, f"Error: there is no tool {call.name!r}; available tools: {known}", "unknown_tool"
            )
        return await tool.call(call.arguments)

    async def call_all(self, calls: Sequence[ToolCall | ToolResult]) -> list[ToolResult]:
        """Execute tool calls concurrently, `MAX_CONCURRENT_CALLS` at a time. Returns results in the order of the calls.

        An entry that is already a result (a malformed call) is returned unchanged. The exception of a tool with a
        mistake in its source (see `Tool.call`) is raised after all calls have ended, and before the limit of an episode
        that another call has reached.
        """
        slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

        async def execute(call: ToolCall | ToolResult) -> ToolResult:
            if isinstance(call, ToolResult):
                count(f"errors/{call.error_type or 'malformed'}")
                return call
            async with slots:
                return await self.call(call)

        if len(calls) == 1:
            return [await execute(calls[0])]
        results = await asyncio.gather(*(execute(call) for call in calls), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise next((failure for failure in failures if not isinstance(failure, EpisodeStopped)), failures[0])
        return cast("list[ToolResult]", results)


def as_tool_registry(tools: ToolRegistry | Sequence[Tool | Callable[..., Any]]) -> ToolRegistry:
    """The registry itself, or a new one for a list of tools. Raises the errors of `ToolRegistry`."""
    return tools if isinstance(tools, ToolRegistry) else ToolRegistry(tools)
