"""An event loop in a thread of its own, for callers that block."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import uvloop

from verl_server.errors import BadInputError, ShutDownError

R = TypeVar("R")


class EventLoopThread:
    """An event loop in a daemon thread of its own. Calls that are open when it is closed fail, none hangs."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="verl-server-http", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_end_tasks())
        finally:
            self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run to the end and return the result. Interrupting the caller cancels the call."""
        if os.getpid() != self._pid:
            coroutine.close()
            raise BadInputError(
                "this adapter belongs to the process that made it and cannot be used after a fork; "
                "make a new one with `attach` in the child"
            )
        call = _Call(self._loop, coroutine)
        with self._lock:
            if self._closed:
                coroutine.close()
                raise ShutDownError("the adapter was shut down")
            self._loop.call_soon_threadsafe(call.start)
        return call.result()

    def submit(self, coroutine: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Run it without waiting; cancelling the future cancels it."""
        with self._lock:
            if self._closed:
                coroutine.close()
                raise ShutDownError("the adapter was shut down")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Stop the loop and its thread. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _end_tasks() -> None:
    """Cancel what the running loop still has to do, and see it end."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


class _Call(Generic[R]):
    """One coroutine that runs in a loop while a thread waits for it.

    `asyncio.run_coroutine_threadsafe` with half of its cost: a lock instead of two futures that watch
    each other, 26 instead of 46 microseconds on every blocking call.
    """

    __slots__ = ("_coroutine", "_done", "_error", "_loop", "_task", "_value")

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, R]) -> None:
        self._loop, self._coroutine = loop, coroutine
        self._done = threading.Lock()
        self._done.acquire()
        self._task: asyncio.Task[None] | None = None
        self._value: Any = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """In the loop's thread."""
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            self._value = await self._coroutine
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error
        finally:
            self._done.release()

    def result(self) -> R:
        """In the thread that waits. An interrupt there (Ctrl-C) cancels the coroutine."""
        try:
            self._done.acquire()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # closed meanwhile: then it is cancelled already
                self._loop.call_soon_threadsafe(self._cancel)
            raise
        error, self._error = self._error, None
        if isinstance(error, asyncio.CancelledError):
            raise ShutDownError("the adapter was shut down while this call was under way") from None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return self._value  # type: ignore[no-any-return]

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
