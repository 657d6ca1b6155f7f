"""Tools of MCP servers (Model Context Protocol), connected with the official package `mcp`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.types import Tool as ToolDescription

from verl_server.agent.tools import Tool
from verl_server.errors import BadInputError, ServerError
from verl_server.validation import require_seconds


class McpToolError(Exception):
    """An MCP server reported that a tool call failed."""


class McpTool(Tool):
    """A tool of a connected MCP server. The server validates the arguments."""

    def __init__(self, client: Client, description: ToolDescription, timeout_s: float) -> None:
        super().__init__(description.name, description.description or "", description.input_schema, timeout_s)
        self._client = client

    async def run(self, arguments: Mapping[str, Any]) -> str:
        result = await self._client.call_tool(self.name, dict(arguments))
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise McpToolError(text)
        return text


@asynccontextmanager
async def mcp_tools(server: StdioServerParameters | str, timeout_s: float = 30.0) -> AsyncIterator[list[Tool]]:
    """Connect to an MCP server and yield its tools.

    `server`: a program, which is started and ended with the context, or a URL (streamable HTTP). `timeout_s`: maximum
    seconds per answer of the server. Parts of a tool result that are not text appear as their type in brackets. After
    the server has ended, its tools return errors. Raises BadInputError for a string that is no URL and for a
    `timeout_s` that is not a positive number, ServerError if the server repeats a page of its tool list, and the
    exceptions of the package `mcp` if there is no connection.
    """
    require_seconds("timeout_s", timeout_s)
    if isinstance(server, str) and not server.startswith(("http://", "https://")):
        raise BadInputError(
            f"{server!r} is no URL of an MCP server (http:// or https://); to start a program, pass "
            'mcp.StdioServerParameters(command="python", args=["server.py"])'
        )
    async with Client(server, read_timeout_seconds=timeout_s) as client:
        page = await client.list_tools()
        descriptions = list(page.tools)
        seen_cursors = {page.next_cursor}
        while page.next_cursor is not None:
            page = await client.list_tools(cursor=page.next_cursor)
            descriptions += page.tools
            if page.next_cursor in seen_cursors:
                raise ServerError(f"the MCP server repeats the page {page.next_cursor!r} of its tool list")
            seen_cursors.add(page.next_cursor)
        yield [McpTool(client, description, timeout_s) for description in descriptions]
