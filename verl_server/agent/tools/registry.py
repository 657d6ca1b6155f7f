"""The tools of an agent by name."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

from verl_server.agent.limits import EpisodeStopped, RolloutLimits
from verl_server.agent.tools.call_counts import count_error
from verl_server.agent.tools.tool import FunctionTool, Tool, ToolCall, ToolResult
from verl_server.errors import BadInputError
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.trajectory.rendering.messages import Message, as_json
from verl_server.types import Json
from verl_server.validation import require_list

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
