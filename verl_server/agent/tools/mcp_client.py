"""Tools of MCP servers (Model Context Protocol), connected with the official package `mcp`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
from mcp import Client, StdioServerParameters
from mcp.client import Transport
from mcp.server import MCPServer, Server
from mcp.types import ContentBlock, EmbeddedResource, ResourceLink, TextContent, TextResourceContents
from mcp.types import Tool as ToolDescription

from verl_server.agent.tools.tool import Tool
from verl_server.agent.user_code import wait_uncancelled, wait_until_done
from verl_server.config import Positive
from verl_server.errors import ServerError, UserCodeError
from verl_server.validation import check_arguments

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 15.0
"""Seconds for a connection to close. The client waits some seconds for the end of a program before it kills it."""


class McpToolError(Exception):
    """An MCP server reported that a tool call failed."""


class McpTool(Tool):
    """A tool of a connected MCP server. The server validates the arguments."""

    def __init__(self, client: Client, description: ToolDescription, timeout_s: float, prefix: str) -> None:
        name = prefix + description.name
        super().__init__(name, description.description or "", description.input_schema, timeout_s)
        self._client, self._name_on_server = client, description.name
        self.is_disconnected = False
        """Whether the context of `mcp_tools` was left."""

    async def run(self, arguments: Mapping[str, Any]) -> str:
        if self.is_disconnected:
            raise UserCodeError(
                f"the tool {self.name!r} was called after `async with mcp_tools(...)` was left, which closes the "
                "connection; run the agent within this block"
            )
        result = await self._client.call_tool(self._name_on_server, dict(arguments))
        text = "\n".join(map(_text_of, result.content))
        if not result.content and result.structured_content is not None:
            text = orjson.dumps(result.structured_content).decode()
        if result.is_error:
            raise McpToolError(text)
        return text


def _text_of(part: ContentBlock) -> str:
    """A part of a result as text: the text, that of an embedded resource, the URI of a link, or the part's type."""
    if isinstance(part, TextContent):
        return part.text
    if isinstance(part, EmbeddedResource) and isinstance(part.resource, TextResourceContents):
        return part.resource.text
    if isinstance(part, ResourceLink):
        return f"[{part.type}: {part.uri}]"
    return f"[{part.type}]"


McpServer = Server[Any] | MCPServer | Transport | StdioServerParameters | str
"""What `mcp.Client` connects to."""


@asynccontextmanager
@check_arguments(skip=("server",))
async def mcp_tools(server: McpServer, timeout_s: Positive = 30.0, *, prefix: str = "") -> AsyncIterator[list[Tool]]:
    """Connect to an MCP server and yield its tools.

    `server`: a URL (streamable HTTP), `mcp.StdioServerParameters` of a program, which is started and ended with the
    context, a transport of `mcp`, for example `streamable_http_client(url, http_client=...)` for a server that needs a
    key, or an `MCPServer` object, which runs in this process. `timeout_s`: maximum seconds per answer of the server.
    `prefix`: text before the names of the tools, for example "github_", because the tools of an agent need different
    names.

    One task may enter the context and another task may leave it, so `Environment.setup` can enter it and
    `Environment.teardown` leave it.

    The policy reads the text of a result, with the text of embedded resources. A result without content is its
    structured content as JSON, and other parts appear as their type in brackets. After the server has ended, its tools
    return errors. After the context was left, a call of a tool fails its sample. Raises BadInputError for a `timeout_s`
    that is not a positive number, and ServerError with the name of the server if there is no connection or the tools
    cannot be listed.
    """
    connected: asyncio.Future[tuple[Client, list[ToolDescription]]] = asyncio.get_running_loop().create_future()
    closing, tools = asyncio.Event(), list[McpTool]()
    holder = asyncio.create_task(_hold_connection(server, timeout_s, connected, closing))
    try:
        awaited: set[asyncio.Future[Any]] = {holder, connected}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            holder.result()  # raises ServerError
        client, descriptions = connected.result()
        tools += [McpTool(client, description, timeout_s, prefix) for description in descriptions]
        yield list(tools)
    finally:
        for tool in tools:
            tool.is_disconnected = True
        closing.set()
        name = f"the connection to the MCP server {_server_name(server)!r}"
        # A second cancellation would reach the holder while it stops the program of the server.
        await wait_uncancelled(wait_until_done(holder, CLOSE_TIMEOUT_S if connected.done() else 0.0, name))
        if tools and holder.done() and not holder.cancelled() and (failure := holder.exception()) is not None:
            logger.warning("%s ended with an error: %r", name, failure)


async def _hold_connection(
    server: McpServer,
    timeout_s: float,
    connected: asyncio.Future[tuple[Client, list[ToolDescription]]],
    closing: asyncio.Event,
) -> None:
    """Connect, set `connected`, and disconnect when `closing` is set. Raises ServerError if there is no connection.

    The task groups of `mcp.Client` must be left by the task that entered them, and make an exception group of each
    exception of their block. In a task of its own, the connection serves tools of all tasks, and their exceptions stay
    as they are.
    """
    async with AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(Client(server, read_timeout_seconds=timeout_s))
            descriptions = await _list_tools(client)
        except Exception as error:
            cause = error
            while isinstance(cause, ExceptionGroup):
                cause = cause.exceptions[0]
            raise ServerError(
                f"no tools from the MCP server {_server_name(server)!r}: {type(cause).__name__}: {cause}; check that "
                "the server runs, and for a program that it starts without an error"
            ) from error
        if not connected.done():
            connected.set_result((client, descriptions))
        await closing.wait()


def _server_name(server: McpServer) -> str:
    if isinstance(server, StdioServerParameters):
        return " ".join([server.command, *server.args])
    return server if isinstance(server, str) else type(server).__name__


async def _list_tools(client: Client) -> list[ToolDescription]:
    """The descriptions of all tools of a server, from all pages of its list."""
    page = await client.list_tools()
    descriptions = list(page.tools)
    seen_cursors = {page.next_cursor}
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        descriptions += page.tools
        if page.next_cursor in seen_cursors:
            raise ServerError(f"the server repeats the page {page.next_cursor!r} of its tool list")
        seen_cursors.add(page.next_cursor)
    return descriptions
