"""Calls in daemon threads, for functions that block or hang.

A call that hangs delays neither the end of the process nor other calls. `ThreadPoolExecutor` and `asyncio.to_thread`
wait for it when the event loop or the process ends, and it keeps one of their threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import ParamSpec, TypeVar

from verl_server.errors import InfrastructureError

P = ParamSpec("P")
T = TypeVar("T")


_ENDS_THE_CALLER = (
    StopIteration, GeneratorExit, KeyboardInterrupt, SystemExit, asyncio.CancelledError, CancelledError,
)  # fmt: skip
"""Exceptions that would end, or seem to cancel, the task that waits for a call."""


def start_call(function: Callable[[], T], name: str = "verl-server-call") -> Future[T]:
    """Call a function in a daemon thread of its own, which has a copy of the caller's context variables.

    Wait for the future with a deadline: `wait([future], timeout_s)`, or `call_in_thread` in an event loop. The call
    cannot be cancelled. A KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit or CancelledError of the function
    becomes a RuntimeError: the call has failed, and nothing else ends. `name`: name of the thread. Raises
    InfrastructureError if no thread can be started.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # a caller that leaves cannot cancel it
    context = contextvars.copy_context()
    try:
        threading.Thread(target=context.run, args=(_run, future, function), name=name, daemon=True).start()
    except RuntimeError as error:
        raise InfrastructureError(
            f"{error}: this process has {threading.active_count()} threads; make the tools and rewards "
            "coroutine functions, pass a smaller max_concurrency, or raise `ulimit -u`"
        ) from error
    return future


async def call_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a daemon thread and return its result. Raises its exception, and the error of `start_call`.

    If the caller is cancelled, for example by `asyncio.timeout`, the function goes on and its result is discarded.
    """
    return await asyncio.wrap_future(start_call(functools.partial(function, *args, **kwargs)))


def _run(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except _ENDS_THE_CALLER as error:
        failure = RuntimeError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        future.set_exception(failure)
    except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
        future.set_exception(error)
    finally:
        del future, function  # the exception refers to this frame, and would stay until a garbage collection
