"""Runs functions of users (tools, rewards) in threads that cannot block the event loop or the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


async def run_in_daemon_thread(function: Callable[[], Any]) -> Any:
    """Call `function` in a daemon thread of its own, and return its result or raise its exception.

    A thread pool is not used: a pool waits for a function that hangs, at the latest when the process ends.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def resolve(value: Any, error: Exception | None) -> None:
        if future.done():  # the caller was cancelled or reached its timeout
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def target() -> None:
        value, failure = None, None
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001 - raised in the coroutine that waits
            failure = _as_exception(error)
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so no coroutine waits any more
            loop.call_soon_threadsafe(resolve, value, failure)

    threading.Thread(target=target, name="verl-server-agent", daemon=True).start()
    return await future


def _as_exception(error: BaseException) -> Exception:
    """An exception that a future can raise.

    `SystemExit` of a tool must end only the tool, and asyncio does not raise StopIteration through a future.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
