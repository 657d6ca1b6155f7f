"""The tests of `test_tracing.py` that need servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agent_helpers import make_tasks
from aiohttp import web
from helpers import adapter_of
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from test_tracing import exporter
from transformers import AutoTokenizer

from verl_server import AsyncHttpServerEngineAdapter, RouterClient, VerlEngine
from verl_server.agent import AgentLoop, Episode, RolloutLimits, RolloutRunner, Sample, as_generate_fn
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http import RouterHttpServer
from verl_server.tracing import span
from verl_server.trajectory import ChatRenderer

__all__ = ["exporter"]


KEY = "key"


@contextlib.asynccontextmanager
async def recording_relay(url: str, received: list[str | None]) -> AsyncIterator[str]:
    """The URL of a relay to a server, which records the trace context of each request for tokens."""

    async def forward(request: web.BaseRequest) -> web.Response:
        if request.path == "/generate":
            received.append(request.headers.get("traceparent"))
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url + request.path, data=await request.read(), headers=headers) as answer,
        ):
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    runner = web.ServerRunner(web.Server(forward))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("through_router", [False, True])
def test_a_sample_is_one_trace(
    shared_engine: VerlEngine, tiny: Callable[..., Path], exporter: InMemorySpanExporter, through_router: bool
) -> None:
    exporter.clear()
    traces_of_tools, received = list[int](), list[str | None]()

    async def look(x: int) -> str:
        """Looks."""
        traces_of_tools.append(trace.get_current_span().get_span_context().trace_id)
        return "seen"

    class OneCall(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.generate()
            call = type("Call", (), {"name": "look", "arguments": {"x": 1}})
            result = await self.tools.call(call)  # type: ignore[arg-type]
            await episode.generate([result.message])

    async def reward(sample: Sample) -> float:
        return 0.5

    async def run() -> list[Sample]:
        target = adapter_of(shared_engine)
        renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
        async with contextlib.AsyncExitStack() as stack:
            relay = await stack.enter_async_context(recording_relay(target.base_url, received))
            server = await stack.enter_async_context(
                AsyncHttpServerEngineAdapter.attach(relay, api_key=target.server_args["api_key"])
            )
            generate: Any = as_generate_fn(server)
            if through_router:
                dispatcher = Dispatcher()
                stack.push_async_callback(dispatcher.close)
                dispatcher.pool.add_replica("a", server, 0)
                http_server = RouterHttpServer(dispatcher, KEY)
                stack.push_async_callback(http_server.close)
                runner = web.ServerRunner(await http_server.create_server())
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                url = f"http://127.0.0.1:{runner.addresses[0][1]}"
                generate = (await stack.enter_async_context(RouterClient(url, KEY))).generate
            rollout = RolloutRunner(
                OneCall([look]), generate, renderer=renderer, limits=RolloutLimits(max_response_tokens=200), n=2,
                sampling_params={"max_new_tokens": 4, "ignore_eos": True}, reward=reward,
            )  # fmt: skip
            with span("step", {}):
                return [sample async for group in rollout.run(make_tasks(1)) for sample in group.samples]

    samples = asyncio.run(run())
    assert [sample.error for sample in samples] == [None, None]
    spans = exporter.get_finished_spans()
    (step,) = [item for item in spans if item.name == "step"]
    roots = [item for item in spans if item.name == "sample"]
    assert sorted(attribute(item, "verl_server.sample_index") for item in roots) == [0, 1]
    for root in roots:
        assert root.parent is None
        assert [link.context.trace_id for link in root.links] == [trace_id(step)]
        assert attribute(root, "verl_server.reward") == 0.5
        assert attribute(root, "verl_server.task") == "t0"
        parts = [item for item in spans if trace_id(item) == trace_id(root) and item is not root]
        assert sorted({item.name for item in parts}) == ["generate", "queue", "reward", "tool"]
        turns = [item for item in parts if item.name == "generate"]
        assert [attribute(item, "gen_ai.usage.output_tokens") for item in turns] == [4, 4]
        assert all(item.parent is not None and item.parent.span_id == span_id(root) for item in turns)
        (call,) = [item for item in parts if item.name == "tool"]
        assert attribute(call, "gen_ai.tool.name") == "look"
        assert trace_id(root) in traces_of_tools
        headers = {f"00-{trace_id(root):032x}-{span_id(item):016x}" for item in turns}
        assert headers <= {(header or "")[:-3] for header in received}  # without the flags
    assert len(received) == 4


def attribute(item: ReadableSpan, name: str) -> Any:
    return (item.attributes or {})[name]


def trace_id(item: ReadableSpan) -> int:
    return item.get_span_context().trace_id  # type: ignore[union-attr]


def span_id(item: ReadableSpan) -> int:
    return item.get_span_context().span_id  # type: ignore[union-attr]
