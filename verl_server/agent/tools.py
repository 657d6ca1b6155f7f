"""Tools that a policy may call. A tool has a JSON schema, a timeout, and error messages that the policy can read."""

from __future__ import annotations

import asyncio
import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pydantic

from verl_server.agent.daemon_thread import run_in_daemon_thread
from verl_server.errors import BadInputError
from verl_server.types import Json


@dataclass(frozen=True)
class ToolCall:
    """A well-formed tool call of a policy."""

    name: str
    arguments: Json


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool call as text. A failed call also has a result, which describes the failure."""

    name: str
    """Name of the tool. Empty if the call does not give a name."""
    content: str
    error_type: str | None = None
    """Type of the failure: `unknown_tool`, `bad_arguments`, `timeout`, `raised` or `malformed`. None for success."""

    @property
    def message(self) -> Json:
        """The result as a chat message with the role `tool`."""
        return {"role": "tool", "name": self.name, "content": self.content}


class ToolArgumentsError(Exception):
    """The arguments of a tool call do not fit the tool's schema."""


class Tool(ABC):
    """A tool that a policy may call: a name, a JSON schema as chat templates take it, and a timeout per call."""

    def __init__(self, name: str, description: str, parameters: Json, timeout_s: float) -> None:
        """`parameters`: JSON schema of the arguments. `timeout_s`: maximum seconds per call."""
        self.name, self.timeout_s = name, timeout_s
        self.schema: Json = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        }

    @abstractmethod
    async def run(self, arguments: Mapping[str, Any]) -> Any:
        """Execute the tool. Returns text, or a value that is converted to JSON text.

        Raises ToolArgumentsError for arguments that do not fit the schema. It may raise any other exception.
        """

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Execute the tool within its timeout. Exceptions of the tool become results, which the policy can read."""
        timeout = asyncio.timeout(self.timeout_s)
        try:
            async with timeout:
                return ToolResult(self.name, _as_text(await self.run(arguments)))
        except ToolArgumentsError as error:
            return ToolResult(self.name, f"Error: wrong arguments: {error}", "bad_arguments")
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return ToolResult(self.name, "Error: the tool was cancelled", "raised")  # the tool cancelled itself
        except Exception as error:  # noqa: BLE001 - a tool may raise any exception
            if timeout.expired():
                return ToolResult(self.name, f"Error: no result within {self.timeout_s:g} s", "timeout")
            return ToolResult(self.name, f"Error: {type(error).__name__}: {error}", "raised")


class FunctionTool(Tool):
    """A Python function as a tool. Its annotations give the schema, its docstring gives the description.

    A function that is not a coroutine function runs in a thread of its own. The thread of a call that exceeds the
    timeout keeps running, and its result is discarded. Raises BadInputError for parameters that cannot be passed by
    name.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, timeout_s: float = 30.0) -> None:
        name = name or function.__name__
        self._function = function
        annotations = typing.get_type_hints(function)
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise BadInputError(f"tool {name!r}: parameter {parameter.name!r} cannot be passed by name")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (annotations.get(parameter.name, Any), default)
        config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        self._arguments_model = pydantic.create_model(name, __config__=config, **fields)
        schema = self._arguments_model.model_json_schema()
        super().__init__(name, inspect.getdoc(function) or "", schema, timeout_s)

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        try:
            validated = self._arguments_model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise ToolArgumentsError(problems) from error
        values = {name: getattr(validated, name) for name in type(validated).model_fields}
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**values)
        return await run_in_daemon_thread(lambda: self._function(**values))


class ToolRegistry:
    """The tools of an agent by name. Functions are converted to `FunctionTool`."""

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]] = ()) -> None:
        """Raises BadInputError if two tools have the same name."""
        self._tools: dict[str, Tool] = {}
        for item in tools:
            tool = item if isinstance(item, Tool) else FunctionTool(item)
            if tool.name in self._tools:
                raise BadInputError(f"two tools have the name {tool.name!r}; pass name= to FunctionTool")
            self._tools[tool.name] = tool

    @property
    def schemas(self) -> list[Json]:
        """JSON schemas of all tools, as chat templates take them."""
        return [tool.schema for tool in self._tools.values()]

    async def call(self, call: ToolCall) -> ToolResult:
        """Execute a tool call. Failures become results."""
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(sorted(self._tools)) or "none"
            return ToolResult(
                call.name, f"Error: there is no tool {call.name!r}; available tools: {known}", "unknown_tool"
            )
        return await tool.call(call.arguments)

    async def call_all(self, calls: Sequence[ToolCall | ToolResult]) -> list[ToolResult]:
        """Execute tool calls concurrently. Returns the results in the order of the calls.

        An entry that is already a result (a malformed call) is returned unchanged.
        """

        async def execute(call: ToolCall | ToolResult) -> ToolResult:
            return call if isinstance(call, ToolResult) else await self.call(call)

        return list(await asyncio.gather(*(execute(call) for call in calls)))


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return str(value)
