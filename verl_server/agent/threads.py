"""Work of users (tools, rewards) that must hold up nobody."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


def _as_exception(error: BaseException) -> Exception:
    """What may be raised through a future: `exit()` in a tool ends the tool, and StopIteration would end nothing."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


async def in_thread(call: Callable[[], Any]) -> Any:
    """In a daemon thread of its own: a pool would wait for one that hangs, at the latest when the process ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if done.done():  # given up
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, failure = None, None
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            failure = _as_exception(error)
        with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=work, name="verl-server-agent", daemon=True).start()
    return await done
