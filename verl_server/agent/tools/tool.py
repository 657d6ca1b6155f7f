"""Tools that a policy may call. A tool has a JSON schema, a timeout, and error messages that the policy can read."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from verl_server.agent.phase_times import Phase, measure
from verl_server.agent.tools.call_counts import count_call, count_error
from verl_server.agent.tools.failure_log import is_raise, log_failure
from verl_server.agent.tools.options import ToolOptions, Truncation, options_of
from verl_server.agent.tools.result_text import as_result_text
from verl_server.agent.tools.schema import find_inner_function, make_arguments_model, read_description, require_function
from verl_server.agent.user_code import call_user_function, create_user_task, wait_until_done
from verl_server.agent.user_failures import CURRENT_EPISODE_STATE
from verl_server.errors import BadInputError, InfrastructureError, UserCodeError
from verl_server.trajectory.rendering.messages import copy_json
from verl_server.types import Json
from verl_server.validation import (
    find_coroutine_error,
    require_seconds,
)

RUN_EXAMPLE = "async def run(self, arguments)"
"""How the method `run` of a tool is written, for errors."""


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

    def __init__(self, name: str, description: str, parameters: Json, timeout_s: float) -> None:
        """`parameters`: JSON schema of the arguments. `timeout_s`: maximum seconds per call.

        Raises BadInputError for a `timeout_s` that is not a positive number.
        """
        self.name, self.timeout_s = name, require_seconds(f"timeout_s of tool {name!r}", timeout_s)
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
        timeout_s = require_seconds("Tool.timeout_s", self.timeout_s)
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
        if (mistake := find_coroutine_error(type(self), "run", result, RUN_EXAMPLE)) is not None:
            raise UserCodeError(mistake.message)
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

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, timeout_s: float | None = None
    ) -> None:
        """`name`: name of the tool. `timeout_s`: maximum seconds per call. None takes the options of the decorator
        `tool`, or the function's name and 30 s.
        """
        if name is not None and not isinstance(name, str):
            raise BadInputError(f'the name of a tool must be a string, got {name!r}; write name="search"')
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
