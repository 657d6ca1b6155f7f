"""Tools: Python functions that a policy may call, with a schema, a time limit, and errors that it can read."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import pydantic

from verl_server.errors import BadInputError

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


class Tool:
    """A function, sync (run in a thread) or async. Its annotations are the schema, its docstring the description."""

    def __init__(self, function: Callable[..., Any], *, name: str | None = None, timeout_s: float = 30.0) -> None:
        self.name = name or function.__name__
        self.timeout_s = timeout_s
        self._function = function
        hints = typing.get_type_hints(function)
        fields: dict[str, Any] = {}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise BadInputError(f"tool {self.name!r}: parameter {parameter.name!r} cannot be passed by its name")
            given = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints.get(parameter.name, Any), given)
        config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        self._arguments = pydantic.create_model(self.name, __config__=config, **fields)
        self.schema: Json = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": inspect.getdoc(function) or "",
                "parameters": self._arguments.model_json_schema(),
            },
        }

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Never raises what the function or its arguments did. A thread that is too late is left to itself."""
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            words = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            return ToolResult(self.name, f"Error: wrong arguments: {words}", "bad_arguments")
        given = {name: getattr(checked, name) for name in type(checked).model_fields}
        try:
            async with asyncio.timeout(self.timeout_s):
                value = await self._run(given)
        except TimeoutError:
            return ToolResult(self.name, f"Error: no answer within {self.timeout_s:g} s", "timeout")
        except Exception as error:  # noqa: BLE001 - the policy is told, and learns
            return ToolResult(self.name, f"Error: {type(error).__name__}: {error}", "raised")
        return ToolResult(self.name, _text(value))

    def _run(self, given: Json) -> Awaitable[Any]:
        if inspect.iscoroutinefunction(self._function):
            return typing.cast("Awaitable[Any]", self._function(**given))
        return _in_thread(lambda: self._function(**given))


async def _in_thread(call: Callable[[], Any]) -> Any:
    """In a daemon thread of its own: a pool would wait for one that hangs, at the latest when the process ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if done.done():  # given up
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, failure = None, None
        try:
            value = call()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            failure = error
        with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=work, name="verl-server-tool", daemon=True).start()
    return await done


class Toolbox:
    """Tools by name. Functions become tools."""

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for one in tools:
            tool = one if isinstance(one, Tool) else Tool(one)
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
    return [_call(part.partition("</tool_call>")[0]) for part in text.split("<tool_call>")[1:]]


def _call(text: str) -> ToolCall | ToolResult:
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
