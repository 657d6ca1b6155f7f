"""Tools that a policy may call, with a schema, a time limit, and errors that it can read; functions become tools."""

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

from verl_server.agent.threads import in_thread
from verl_server.errors import BadInputError
from verl_server.trajectory.rendering import Call

Json = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """What a policy asked for."""

    name: str
    arguments: Json


@dataclass(frozen=True)
class ToolResult:
    """What it gets, as text; errors are results, too."""

    name: str
    content: str
    error: str | None = None
    """The kind of failure: `unknown_tool`, `bad_arguments`, `timeout`, `raised`, `malformed`."""

    @property
    def message(self) -> Json:
        return {"role": "tool", "name": self.name, "content": self.content}


class Tool(ABC):
    """What a policy may call: its name, its schema (as chat templates take them), and how long a call may take."""

    def __init__(self, name: str, description: str, parameters: Json, timeout_s: float) -> None:
        """`parameters`: a JSON schema of the arguments."""
        self.name, self.timeout_s = name, timeout_s
        self.schema: Json = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        }

    @abstractmethod
    async def run(self, arguments: Mapping[str, Any]) -> Any:
        """Its answer: text, or what becomes text as JSON. Raises ToolArgumentsError for wrong arguments."""

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Never raises what the tool did: the policy is told, and learns."""
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                return ToolResult(self.name, _text(await self.run(arguments)))
        except ToolArgumentsError as error:
            return ToolResult(self.name, f"Error: wrong arguments: {error}", "bad_arguments")
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return ToolResult(self.name, "Error: the tool was cancelled", "raised")  # by itself, not by our caller
        except Exception as error:  # noqa: BLE001 - a tool may raise anything
            if limit.expired():
                return ToolResult(self.name, f"Error: no answer within {self.timeout_s:g} s", "timeout")
            return ToolResult(self.name, f"Error: {type(error).__name__}: {error}", "raised")


class ToolArgumentsError(Exception):
    """A tool was called with what does not fit its schema."""


class FunctionTool(Tool):
    """A function, sync (run in a thread; one that is too late is left to itself) or async.

    Its annotations are the schema, its docstring the description.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, timeout_s: float = 30.0) -> None:
        name = name or function.__name__
        self._function = function
        hints = typing.get_type_hints(function)
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise BadInputError(f"tool {name!r}: parameter {parameter.name!r} cannot be passed by its name")
            given = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints.get(parameter.name, Any), given)
        config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        self._arguments = pydantic.create_model(name, __config__=config, **fields)
        super().__init__(name, inspect.getdoc(function) or "", self._arguments.model_json_schema(), timeout_s)

    async def run(self, arguments: Mapping[str, Any]) -> Any:
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            words = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ToolArgumentsError(words) from error
        given = {name: getattr(checked, name) for name in type(checked).model_fields}
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**given)
        return await in_thread(lambda: self._function(**given))


class Toolbox:
    """Tools by name. Functions become tools."""

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for one in tools:
            tool = one if isinstance(one, Tool) else FunctionTool(one)
            if tool.name in self._tools:
                raise BadInputError(f"two tools are called {tool.name!r}")
            self._tools[tool.name] = tool

    @property
    def schemas(self) -> list[Json]:
        return [tool.schema for tool in self._tools.values()]

    async def call(self, call: ToolCall) -> ToolResult:
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(sorted(self._tools)) or "none"
            return ToolResult(call.name, f"Error: there is no tool {call.name!r}; there are: {known}", "unknown_tool")
        return await tool.call(call.arguments)

    async def call_all(self, calls: Sequence[ToolCall | ToolResult]) -> list[ToolResult]:
        """At the same time, in the order of the calls. What could not be read is its result already."""

        async def one(call: ToolCall | ToolResult) -> ToolResult:
            return call if isinstance(call, ToolResult) else await self.call(call)

        return list(await asyncio.gather(*(one(call) for call in calls)))


def hermes_calls(text: str) -> list[ToolCall | ToolResult]:
    """Calls as Hermes' and Qwen's templates teach them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    One that cannot be read is answered with why.
    """
    return [hermes_call(part.partition("</tool_call>")[0]) for part in text.split("<tool_call>")[1:]]


def read(call: Call) -> ToolCall | ToolResult:
    """A call that a renderer found."""
    if call.fault is None and call.name is not None and call.arguments is not None:
        return ToolCall(call.name, call.arguments)
    return ToolResult(call.name or "", f"Error: this tool call cannot be read: {call.fault}", "malformed")


def hermes_call(text: str) -> ToolCall | ToolResult:
    """One call: what stands between the marks."""
    try:
        said = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return ToolResult("", f"Error: this tool call is no JSON: {error}", "malformed")
    name = said.get("name") if isinstance(said, dict) else None
    arguments = said.get("arguments", {}) if isinstance(said, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolResult("", 'Error: a tool call is {"name": "...", "arguments": {...}}', "malformed")
    return ToolCall(name, arguments)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return str(value)
