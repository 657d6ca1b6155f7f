"""Calls a function in the event loop of the gateway from another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from verl_server.errors import DeadlineError

Result = TypeVar("Result")


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], Result], timeout_s: float) -> Result:
    """The result of the function. Raises its exception, and DeadlineError if the event loop does not answer.

    A call that has not begun at the end of the timeout is taken back.
    """
    result: Future[Result] = Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the caller
            result.set_exception(error)

    loop.call_soon_threadsafe(run)
    wait([result], timeout_s)
    if not result.cancel() and not result.done():
        message = "the gateway has not finished this call, which may still take effect"
    elif result.cancelled():
        message = "the gateway did not answer, and the call was taken back"
    else:
        return result.result()
    raise DeadlineError(message, operation="gateway", seconds=timeout_s)
