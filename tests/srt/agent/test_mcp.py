"""Tools of a real MCP server that runs in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from agent_helpers import ScriptedGenerateFn, call_text, make_tasks
from helpers import QWEN
from mcp import Client, StdioServerParameters, stdio_client
from mcp.server import MCPServer
from mcp.types import (
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from verl_server.agent import (
    Environment,
    Episode,
    RolloutLimits,
    RolloutRunner,
    Sample,
    Tool,
    ToolAgentLoop,
    ToolCall,
    ToolRegistry,
    ToolResult,
    mcp_tools,
)
from verl_server.errors import BadInputError, ServerError
from verl_server.tiny import make_tokenizer
from verl_server.trajectory import ChatRenderer

SERVER_PROGRAM = """
import os, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int = 1) -> int:
    "The sum of two numbers."
    return a + b

@server.tool()
def raise_error() -> str:
    raise RuntimeError("no")

@server.tool()
async def wait_a_minute() -> str:
    import asyncio
    await asyncio.sleep(60)

@server.tool()
def get_pid() -> int:
    return os.getpid()

server.run("stdio")
"""


@pytest.fixture
def program(tmp_path: Path) -> StdioServerParameters:
    path = tmp_path / "server.py"
    path.write_text(SERVER_PROGRAM)
    return StdioServerParameters(command=sys.executable, args=[str(path)])


def test_tools_of_an_mcp_server(program: StdioServerParameters) -> None:
    """Results, failures and timeouts of tools. A call after the server was killed returns an error."""

    async def run() -> tuple[list[Tool], list[ToolResult], int, ToolResult]:
        async with mcp_tools(program, timeout_s=5.0) as tools:
            registry = ToolRegistry(tools)
            calls: list[ToolCall | ToolResult] = [
                ToolCall("add", {"a": 2, "b": 3}),
                ToolCall("add", {"a": 4}),
                ToolCall("add", {"a": "x"}),
                ToolCall("raise_error", {}),
                ToolCall("wait_a_minute", {}),
            ]
            results = await registry.call_all(calls)
            pid = int((await registry.call(ToolCall("get_pid", {}))).content)
            os.kill(pid, signal.SIGKILL)
            return tools, results, pid, await registry.call(ToolCall("add", {"a": 1}))

    tools, results, pid, result_after_kill = asyncio.run(run())
    schema = tools[0].schema["function"]
    assert (schema["name"], schema["description"]) == ("add", "The sum of two numbers.")
    assert schema["parameters"]["required"] == ["a"]
    assert [result.error_type for result in results] == [None, None, "raised", "raised", "timeout"]
    assert [result.content for result in results[:2]] == ["5", "5"]
    assert "raise_error" in results[3].content  # the server does not send more details of the failure
    assert result_after_kill.error_type in ("raised", "timeout")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_results_that_are_not_plain_text() -> None:
    """Embedded resources, links, images, and structured content without any other content."""
    parts: list[ContentBlock] = [
        TextContent(text="see"),
        EmbeddedResource(resource=TextResourceContents(uri="file:///a.py", text="print(1)")),
        ResourceLink(name="b", uri="file:///b.py"),
        ImageContent(data="AAAA", mime_type="image/png"),
    ]
    server = MCPServer("files")

    @server.tool()
    def read() -> CallToolResult:
        return CallToolResult(content=parts)

    @server.tool()
    def count() -> CallToolResult:
        return CallToolResult(content=[], structured_content={"lines": [1, 2]})

    async def run() -> list[ToolResult]:
        async with mcp_tools(server) as tools:
            return await ToolRegistry(tools).call_all([ToolCall("read", {}), ToolCall("count", {})])

    contents = [result.content for result in asyncio.run(run())]
    assert contents == ["see\nprint(1)\n[resource_link: file:///b.py]\n[image]", '{"lines":[1,2]}']


@pytest.mark.parametrize("is_transport", [True, False])
def test_transport_or_server_of_this_process(program: StdioServerParameters, is_transport: bool) -> None:
    server = MCPServer("sums")

    @server.tool()
    def add(a: int, b: int = 1) -> int:
        return a + b

    async def run() -> ToolResult:
        async with mcp_tools(stdio_client(program) if is_transport else server, timeout_s=5.0) as tools:
            return await ToolRegistry(tools).call(ToolCall("add", {"a": 2}))

    assert asyncio.run(run()) == ToolResult("add", "3")


def test_tools_of_two_servers_and_a_tool_after_its_connection() -> None:
    """A prefix tells tools of the same name apart. A tool without its connection fails the sample."""

    def make_server(name: str) -> MCPServer:
        server = MCPServer(name)

        @server.tool()
        def search(query: str) -> str:
            return f"{name} {query}"

        return server

    async def run() -> tuple[list[ToolResult], Tool]:
        async with mcp_tools(make_server("a")) as first, mcp_tools(make_server("b"), prefix="b_") as second:
            with pytest.raises(BadInputError, match=r"two tools have the name 'search'; .*or prefix= to mcp_tools"):
                ToolRegistry([*first, *first])
            tools = ToolRegistry([*first, *second])
            calls = [ToolCall(name, {"query": "x"}) for name in tools.names]
            return await tools.call_all(calls), second[0]

    results, tool = asyncio.run(run())
    assert results == [ToolResult("search", "a x"), ToolResult("b_search", "b x")]
    with pytest.raises(BadInputError, match=r"tool 'b_search' was called after `async with mcp_tools\(...\)` was left"):
        asyncio.run(tool.call({"query": "x"}))


def test_what_is_no_server_is_named(program: StdioServerParameters) -> None:
    async def connect(server: StdioServerParameters | str, timeout_s: float = 1.0) -> None:
        async with mcp_tools(server, timeout_s):
            raise AssertionError("connected")

    for server in ("python server.py", ["python", "server.py"], {"command": "python"}, None, Client(program)):
        with pytest.raises(ServerError, match="no tools from the MCP server"):
            asyncio.run(connect(server))  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match=r"timeout_s must be greater than 0, got 0\.0"):
        asyncio.run(connect(program, timeout_s=0.0))


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("http://127.0.0.1:9/mcp", "no tools from the MCP server 'http://127.0.0.1:9/mcp': "),
        (StdioServerParameters(command="no-such-program", args=["x"]), "no tools from .* 'no-such-program x': File"),
        (StdioServerParameters(command=sys.executable, args=["-c", "exit(3)"]), r"no tools from .* -c exit\(3\)': "),
    ],
)
def test_server_without_connection_is_named(server: StdioServerParameters | str, expected: str) -> None:
    async def connect() -> None:
        async with mcp_tools(server, 5.0):
            raise AssertionError("connected")

    with pytest.raises(ServerError, match=expected):
        asyncio.run(connect())


def test_an_environment_connects_in_its_setup(
    program: StdioServerParameters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The setup and the teardown run in two tasks. Each sample has a program of its own, which its teardown ends."""
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.chat_template = QWEN
    pids: list[int] = []

    class Connects(Environment):
        async def setup(self) -> None:
            self.connection = contextlib.AsyncExitStack()
            self.mcp_tools = await self.connection.enter_async_context(mcp_tools(program))

        async def run(self, episode: Episode) -> None:
            branch = episode.new_root(episode.messages, self.mcp_tools)
            pids.append(int((await branch.tools.call(ToolCall("get_pid", {}))).content))
            await ToolAgentLoop().run(branch)

        async def teardown(self) -> None:
            await self.connection.aclose()

    def reply(prompt: str) -> str:
        return "hello" if "42" in prompt else call_text("add", a=40, b=2)

    async def collect() -> list[Sample]:
        generate = ScriptedGenerateFn(tokenizer, reply)
        limits = RolloutLimits(max_response_tokens=2000, max_turns=2)
        runner = RolloutRunner(Connects, generate, renderer=ChatRenderer(tokenizer), limits=limits)
        return [sample async for group in runner.run(make_tasks(2)) for sample in group.samples]

    samples = asyncio.run(asyncio.wait_for(collect(), 60.0))
    assert [(sample.stop_reason, sample.error) for sample in samples] == [("done", None)] * 2
    for sample in samples:
        results = [message for node in sample.graph.nodes for message in (node.message or {}).get("messages", [])]
        assert results[-1]["content"] == "42"
    assert len(set(pids)) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not caplog.records


def test_an_exception_of_the_block_is_raised_as_it_is(program: StdioServerParameters) -> None:
    async def fail() -> None:
        async with mcp_tools(program):
            raise KeyError("a")

    with pytest.raises(KeyError):
        asyncio.run(asyncio.wait_for(fail(), 60.0))


def test_a_connection_that_is_cancelled_before_it_is_made_ends() -> None:
    async def connect() -> int:
        server = StdioServerParameters(command=sys.executable, args=["-c", "import time; time.sleep(60)"])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0), mcp_tools(server):
                raise AssertionError("there is no MCP server")
        return len(asyncio.all_tasks())

    assert asyncio.run(asyncio.wait_for(connect(), 60.0)) == 2  # `connect` and the event loop's main task
