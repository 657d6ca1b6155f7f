"""Tools that a policy may call. A tool has a JSON schema, a timeout, and error messages that the policy can read."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import hashlib
import inspect
import json
import linecache
import logging
import os
import re
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass
from numbers import Number
from typing import Any, Literal, TypeVar, cast, overload

import orjson
import pydantic

from verl_server.agent.limits import EpisodeStopped, LoopSlots, Phase, RolloutLimits, measure
from verl_server.agent.tools.schema import find_inner_function, make_arguments_model, read_description, require_function
from verl_server.agent.user_code import CURRENT_EPISODE_STATE, call_user_function, create_user_task, wait_until_done
from verl_server.config import Name, Positive, PositiveInt
from verl_server.errors import BadInputError, InfrastructureError, UserCodeError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.messages import Message, as_json, copy_json
from verl_server.types import Json
from verl_server.validation import (
    check_arguments,
    check_fields,
    checked_value,
    require_list,
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


def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_result_tokens: int | None = None,
    truncate: Truncation = "end",
    max_concurrency: int | None = None,
) -> Any:
    """Decorator, with or without options, for a function that is a tool, and for a method of an `Environment`.

    `name`: name of the tool; None takes that of the function. `description`: text that the policy reads; None takes the
    docstring. `timeout_s`: maximum seconds per call. `max_result_tokens`: maximum number of tokens of a result; None
    takes `RolloutLimits.max_tool_tokens`. `truncate`: part of a too long result that is removed, "start", "middle" or
    "end". `max_concurrency`: maximum number of calls that run at a time in this event loop, over all samples; the time
    that a call waits for its turn does not count against `timeout_s`. Raises BadInputError for an option of a wrong
    type or value.
    """
    if function is not None and not callable(function):
        raise BadInputError(f"tool is a decorator of a function, got {function!r:.80}; write @tool or @tool(name=...)")
    options = ToolOptions(name, description, timeout_s, max_result_tokens, truncate, max_concurrency)

    def decorate(decorated: Function) -> Function:
        setattr(decorated, OPTIONS_ATTRIBUTE, options)
        return decorated

    return decorate if function is None else decorate(function)


def options_of(function: object) -> ToolOptions | None:
    """The options of a function with the decorator `tool`, also of a bound method. None for any other object."""
    options = getattr(function, OPTIONS_ATTRIBUTE, None)
    return options if isinstance(options, ToolOptions) else None


# -- Call counts ------------------------------------------------------------------------------------
# How many calls of each tool a sample has made, and how many of these calls failed.

CallCounts = Counter[str]
"""Counts by names such as `search/calls` and `search/errors/timeout`."""
_COUNTS: contextvars.ContextVar[CallCounts | None] = contextvars.ContextVar("verl_server_call_counts", default=None)


@contextlib.contextmanager
def count_calls() -> Iterator[CallCounts]:
    """Count the calls of a sample. Calls in tasks that begin within the block count, too."""
    counts: CallCounts = Counter()
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)


def count_call(tool: str) -> None:
    """Count a call of a tool in the current sample, when the call begins."""
    _count(f"{tool}/calls")


def count_error(error_type: str, tool: str | None = None) -> None:
    """Count a call that failed in the current sample.

    `error_type`: that of `ToolResult`, or `failed` for a call that failed the sample. `tool`: name of the tool. None if
    the call is of no tool: its name is unknown, or the call cannot be parsed.
    """
    _count(f"errors/{error_type}" if tool is None else f"{tool}/errors/{error_type}")


def _count(name: str) -> None:
    if (counts := _COUNTS.get()) is not None:
        counts[name] += 1


def call_metrics(samples: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """The sums of the counts of samples by names such as `tools/search/calls`."""
    total: CallCounts = Counter()
    for counts in samples:
        total.update(counts)
    return {f"tools/{name}": count for name, count in total.items()}


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

    Raises UserCodeError for a coroutine, and for an object that Python writes with its address in memory, also within
    lists and dicts: the text would say nothing, and it would differ when a sample is replayed.
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
    """Raise UserCodeError if a value has a part that is no data and has no text of its own."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:  # a list that contains itself
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, Set)):
            pending += item
        elif inspect.isawaitable(item):
            if inspect.iscoroutine(item):
                item.close()
            raise UserCodeError(f"tool {name!r} returned a value with a coroutine, {item!r:.80}; write `await` there")
        elif _shows_address(item):
            raise UserCodeError(
                f"tool {name!r} returned a value with an object of the type {type(item).__name__}, of which Python "
                "writes only the address in memory; return a text, JSON values or a pydantic model"
            )


def _shows_address(item: object) -> bool:
    """Whether the text of an object is only its address in memory, which differs in each process."""
    return re.fullmatch(r"<.* at 0x[0-9a-fA-F]+>", str(item)) is not None


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
    code = getattr(find_inner_function(function), "__code__", None)
    return None if code is None else code.co_filename


class Tool(ABC):
    """A tool that a policy may call: a name, a JSON schema as chat templates take it, and a timeout per call."""

    @check_arguments(skip=("parameters",))
    def __init__(self, name: Name, description: str, parameters: Json, timeout_s: Positive) -> None:
        """`parameters`: JSON schema of the arguments. `timeout_s`: maximum seconds per call.

        Raises BadInputError for an argument of a wrong type, and for a `timeout_s` that is not a positive number.
        """
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
        is raised, too. UserCodeError is raised for a sandbox that was not started, and if `run` returns an iterator,
        nothing to await, or a value that has no text (see `as_result_text`). EpisodeStopped is raised for a limit of
        the episode whose agent loop calls the tool, and not for a limit of another episode. An exception that is not
        raised by a statement `raise` of the tool is logged with its traceback, once for each line. Raises BadInputError
        for a `timeout_s` that is not a positive number.
        """
        with measure(Phase.TOOL, **{"gen_ai.tool.name": self.name}):
            async with self.slots or contextlib.nullcontext():
                count_call(self.name)
                try:
                    result = await self._call(arguments)
                except Exception:
                    count_error("failed", self.name)
                    raise
        if result.error_type is not None:
            count_error(result.error_type, self.name)
        return result

    async def _call(self, arguments: Mapping[str, Any]) -> ToolResult:
        timeout_s = checked_value("Tool.timeout_s", self.timeout_s, Positive)  # a subclass may have set it since
        task = create_user_task(self._run_as_text(arguments), CURRENT_EPISODE_STATE.get())
        timed_out = await wait_until_done(task, timeout_s, f"the tool {self.name!r}")
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
        if not inspect.isawaitable(result):
            raise UserCodeError(
                f"{type(self).__qualname__}.run must be a coroutine function, but its call returned "
                f"{type(result).__name__}; write `async def run(self, arguments)`, and let decorators return what they "
                "call"
            )
        if isinstance(value := await result, (Iterator, AsyncIterator)):
            raise UserCodeError(
                f"tool {self.name!r} returned an iterator, but the policy reads one result; collect the values and "
                "return them as a list"
            )
        return as_result_text(self.name, value)


class FunctionTool(Tool):
    """A Python function as a tool. Its annotations give the schema, its docstring gives the description.

    A function that is not a coroutine function runs in a thread of its own. The thread of a call that exceeds the
    timeout keeps running, and its result is discarded. `Annotated[int, Field(ge=1)]` gives a parameter bounds, and
    `Annotated[str, "text"]` a description.

    The function can be behind decorators, also behind those that are objects; parameters and docstring are those of the
    function in `__wrapped__`, which `functools.wraps` sets. A `functools.partial` and an object with `__call__` need a
    `name` unless they have a `__name__`. Arguments of the partial are not shown to the policy. Raises BadInputError for
    any other object that is neither a function nor a method, for a lambda, for a function with `yield` or without a
    docstring, for a method without its object, for a `name` that is not a string, and for parameters that have no
    annotation or no JSON schema, have a name that begins with `_`, or cannot be passed by name.
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
        name = name or options.name
        self._function = require_function(function, name)
        name = name or str(getattr(function, "__name__", ""))
        description = options.description or read_description(name, function, is_needed=decorated is None)
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
        return make_arguments_model(name, function)
    models = _method_models.setdefault(function.__func__, {})
    if name not in models:
        models[name] = make_arguments_model(name, function)
    return models[name]


@functools.lru_cache(1024)
def _schema_of(model: type[pydantic.BaseModel]) -> Json:
    return model.model_json_schema()


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
        """Raises BadInputError if `tools` is not a list, for a function that cannot be a tool, for a `Tool` whose
        constructor does not call `super().__init__`, and for two tools with the same name.
        """
        hint = f"write tools=[{getattr(tools, '__name__', 'function')}]"
        if hasattr(tools, "__aenter__"):
            hint = "write `async with mcp_tools(...) as tools:` and pass these tools"
        require_list("tools", tools, hint)
        self._tools: dict[str, Tool] = {}
        for item in tools:
            tool = item if isinstance(item, Tool) else FunctionTool(item)
            if missing := [name for name in ("name", "schema", "timeout_s") if not hasattr(tool, name)]:
                kind = type(tool).__qualname__
                raise BadInputError(
                    f"the tool {kind} has no attribute {missing[0]!r}; call super().__init__(name, description, "
                    f"parameters, timeout_s) in {kind}.__init__"
                )
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
            count_error("unknown_tool")
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
                count_error(call.error_type or "malformed")
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
