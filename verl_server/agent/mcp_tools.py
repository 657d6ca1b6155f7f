"""Tools of MCP servers (Model Context Protocol), by the official `mcp` package."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.types import Tool as Described

from verl_server.agent.tools import Tool
from verl_server.errors import ServerError


class McpError(Exception):
    """What a server's tool answers when it fails."""


class McpTool(Tool):
    """One tool of a connected server, which checks the arguments itself."""

    def __init__(self, client: Client, described: Described, timeout_s: float) -> None:
        super().__init__(described.name, described.description or "", described.input_schema, timeout_s)
        self._client = client

    async def run(self, arguments: Mapping[str, Any]) -> str:
        result = await self._client.call_tool(self.name, dict(arguments))
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        if result.is_error:
            raise McpError(text)
        return text


@asynccontextmanager
async def mcp_tools(server: StdioServerParameters | str, timeout_s: float = 30.0) -> AsyncIterator[list[Tool]]:
    """The tools of a server: a program that is started and ended here, or a URL (streamable HTTP).

    `timeout_s`: for each answer of it. Parts of an answer that are no text are named, not shown. A server that is gone
    answers its calls with an error.
    """
    async with Client(server, read_timeout_seconds=timeout_s) as client:
        page = await client.list_tools()
        described = list(page.tools)
        seen = {page.next_cursor}
        while page.next_cursor is not None:
            page = await client.list_tools(cursor=page.next_cursor)
            described += page.tools
            if page.next_cursor in seen:
                raise ServerError("the MCP server lists its tools in a circle")
            seen.add(page.next_cursor)
        yield [McpTool(client, one, timeout_s) for one in described]
