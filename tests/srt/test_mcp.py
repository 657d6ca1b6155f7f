"""Tools of a real MCP server, in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from mcp import StdioServerParameters

from verl_server.agent.mcp_tools import mcp_tools
from verl_server.agent.tools import Tool, Toolbox, ToolCall, ToolResult

SERVER = """
import os, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int = 1) -> int:
    "The sum of two numbers."
    return a + b

@server.tool()
def fails() -> str:
    raise RuntimeError("no")

@server.tool()
async def hangs() -> str:
    import asyncio
    await asyncio.sleep(60)

@server.tool()
def pid() -> int:
    return os.getpid()

server.run("stdio")
"""


@pytest.fixture
def program(tmp_path: Path) -> StdioServerParameters:
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return StdioServerParameters(command=sys.executable, args=[str(path)])


def test_tools_of_a_server(program: StdioServerParameters) -> None:
    async def run() -> tuple[list[Tool], list[ToolResult], int, ToolResult]:
        async with mcp_tools(program, timeout_s=5.0) as tools:
            box = Toolbox(tools)
            calls: list[ToolCall | ToolResult] = [
                ToolCall("add", {"a": 2, "b": 3}),
                ToolCall("add", {"a": 4}),
                ToolCall("add", {"a": "x"}),
                ToolCall("fails", {}),
                ToolCall("hangs", {}),
            ]
            results = await box.call_all(calls)
            pid = int((await box.call(ToolCall("pid", {}))).content)
            os.kill(pid, signal.SIGKILL)
            return tools, results, pid, await box.call(ToolCall("add", {"a": 1}))

    tools, results, pid, gone = asyncio.run(run())
    schema = tools[0].schema["function"]
    assert (schema["name"], schema["description"]) == ("add", "The sum of two numbers.")
    assert schema["parameters"]["required"] == ["a"]
    assert [result.error for result in results] == [None, None, "raised", "raised", "timeout"]
    assert [result.content for result in results[:2]] == ["5", "5"]
    assert "fails" in results[3].content  # of what went wrong inside, the server says no more
    assert gone.error in ("raised", "timeout")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
