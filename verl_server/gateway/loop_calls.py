"""Calls a function in the event loop of the gateway from another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from verl_server.errors import DeadlineError

Result = TypeVar("Result")


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], Result], timeout_s: float) -> Result:
    """The result of the function. Raises its exception, and DeadlineError if the event loop does not answer.

    A call that has not begun at the end of the timeout is taken back.
    """

    async def call() -> Result:
        return function()

    return await_in_loop(loop, call, timeout_s)


def await_in_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[[], Coroutine[Any, Any, Result]], timeout_s: float
) -> Result:
    """`call_in_loop` for a coroutine function."""
    result: Future[Result] = Future()

    async def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(await function())
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the caller
            result.set_exception(error)

    asyncio.run_coroutine_threadsafe(run(), loop)
    wait([result], timeout_s)
    if not result.cancel() and not result.done():
        message = "the gateway has not finished this call, which may still take effect"
    elif result.cancelled():
        message = "the gateway did not answer, and the call was taken back"
    else:
        return result.result()
    raise DeadlineError(message, operation="gateway", seconds=timeout_s)
