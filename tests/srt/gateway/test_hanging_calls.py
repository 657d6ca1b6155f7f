"""`CallThatMayHang`: callers share the call that runs, and a call that hangs is not made a second time."""

from __future__ import annotations

import asyncio
import threading

import pytest

from verl_server.gateway.threads import CallThatMayHang


async def wait_until_done(call: CallThatMayHang) -> None:
    """Wait until the calls that run have ended."""
    await asyncio.wait([task for task, _ in call._calls.values()], timeout=60)


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
        await wait_until_done(call)
        late = await asyncio.gather(*[call.result(60.0) for _ in range(3)])
        assert late == [1, 1, 1]
        assert await call.result(60.0) == 2

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_call_has_the_result_for_its_own_arguments() -> None:
    """Also while, and after, a call with other arguments hangs."""
    go, called = threading.Event(), list[str]()

    def load(path: str) -> str:
        called.append(path)
        if path == "a":
            go.wait(60)
        return f"the tokenizer {path}"

    async def run() -> None:
        call = CallThatMayHang("loading", load)
        with pytest.raises(TimeoutError):
            await call.result(0.01, "a")
        assert await call.result(60.0, "b") == "the tokenizer b"
        go.set()
        await wait_until_done(call)
        assert await call.result(60.0, "b") == "the tokenizer b"
        assert await call.result(60.0, "a") == "the tokenizer a"
        assert called == ["a", "b", "b"]

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("late", ["disk ok", OSError("disk full")])
def test_a_late_result_is_not_used_if_the_answer_must_be_new(late: str | OSError) -> None:
    go, answers = threading.Event(), [late, "new"]

    def probe() -> str:
        answer = answers.pop(0)
        go.wait(60)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def run() -> None:
        call = CallThatMayHang("the probe", probe, uses_late_results=False)
        with pytest.raises(TimeoutError):
            await call.result(0.01)
        go.set()
        await wait_until_done(call)
        assert list(await asyncio.gather(call.result(60.0), call.result(60.0))) == ["new", "new"]

    asyncio.run(asyncio.wait_for(run(), 60))
