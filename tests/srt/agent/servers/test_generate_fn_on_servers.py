"""The tests of `test_generate_fn.py` that need servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import adapter_of

from verl_server import AsyncHttpServerEngineAdapter, VerlEngine
from verl_server.adapter.sglang.replies import max_running_requests
from verl_server.agent.engines import access_engine


def test_one_server_gets_as_many_requests_as_it_runs(
    shared_engine: VerlEngine, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests would wait in the queue of the server, see docs/decisions/order-of-arrival.md."""
    server = adapter_of(shared_engine)
    limit = max_running_requests(server.get_server_info())
    assert limit is not None
    running = most = 0
    generate = AsyncHttpServerEngineAdapter.generate

    async def counted(self: AsyncHttpServerEngineAdapter, *args: Any, **request: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await generate(self, *args, **request)
        finally:
            running -= 1

    monkeypatch.setattr(AsyncHttpServerEngineAdapter, "generate", counted)
    limited = access_engine(server).generate
    params = {"max_new_tokens": 2, "temperature": 0.0}

    async def run() -> list[Any]:
        requests = (
            limited(rid=f"limited-{index}", session_id="s", input_ids=[5, 6], sampling_params=params)
            for index in range(2 * limit)
        )
        return list(await asyncio.gather(*requests))

    replies = asyncio.run(run())
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 1
    assert most == limit
