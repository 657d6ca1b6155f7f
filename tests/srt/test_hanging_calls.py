"""`CallThatMayHang`: callers share the call that runs, and a call that hangs is not made a second time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from verl_server.gateway.hanging_calls import CallThatMayHang


def test_callers_share_a_call_and_a_late_result_is_used() -> None:
    go, num_calls = threading.Event(), 0

    def count() -> int:
        nonlocal num_calls
        num_calls += 1
        go.wait(60)
        return num_calls

    async def run() -> None:
        call = CallThatMayHang("counting", count)
        with pytest.raises(TimeoutError, match=r"counting took more than 0\.01 s"):
            await call.result(0.01)
        with pytest.raises(TimeoutError):
            await call.result(0.01)
        shared = [asyncio.create_task(call.result(60.0)) for _ in range(3)]
        assert [type(error) for error in await asyncio.gather(*shared, return_exceptions=True)] == [TimeoutError] * 3
        go.set()
        assert call._task is not None
        await asyncio.wait((call._task,), timeout=60)
        late = await asyncio.gather(*[call.result(60.0) for _ in range(3)])
        assert late == [1, 1, 1]
        assert await call.result(60.0) == 2

    asyncio.run(asyncio.wait_for(run(), 60))
