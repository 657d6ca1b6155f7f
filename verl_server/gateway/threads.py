"""Where work on conversations runs: long work in a worker thread, so that other sessions go on, short work at once."""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, ParamSpec, TypeVar

from verl_server.agent.user_code import call_user_function
from verl_server.errors import DeadlineError
from verl_server.threads import start_call

MAX_PARSED_BYTES = 128 * 1024
"""Size of a body that is parsed or compared at once: about a millisecond. A worker thread costs 0.1 ms."""
MAX_RENDERED_CHARS = 4 * 1024
"""Number of characters that are rendered and tokenized at once: a few milliseconds."""

MAX_WORKERS = 6
"""Maximum number of worker threads of an event loop that work at a time. Python code runs in one thread at a time:
more threads bring no throughput, and the event loop waits longer until it runs again. Six threads are enough for the
work that runs at the same time, such as the tokenization in Rust."""

END_TIMEOUT_S = 60.0
"""Seconds that the end of the process waits for work in threads."""

_RUNNING = set[Future[Any]]()
"""Work that runs in threads."""
os.register_at_fork(after_in_child=_RUNNING.clear)
_WORKERS = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
"""Free worker threads of each event loop."""

Params = ParamSpec("Params")
Result = TypeVar("Result")


async def run_aside(
    is_short: bool, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs
) -> Result:
    """Call a function: at once if its work is short, otherwise in a worker thread (see `call_in_thread`)."""
    if is_short:
        return function(*args, **kwargs)
    async with _WORKERS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_WORKERS)):
        return await call_in_thread(function, *args, **kwargs)


async def call_in_thread(function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Result:
    """Call a function in a daemon thread. One that hangs holds up the end of the process for `END_TIMEOUT_S` seconds,
    but not the end of the event loop.
    """
    call = start_call(functools.partial(function, *args, **kwargs), "verl-gateway-work")
    _RUNNING.add(call)
    call.add_done_callback(_RUNNING.discard)
    return await asyncio.wrap_future(call)


class OneAtATime:
    """Calls one function at a time in a daemon thread: replies that take seconds do not slow down all turns."""

    def __init__(self) -> None:
        self._running = asyncio.Semaphore(1)

    async def call(
        self,
        has_left: Callable[[], Awaitable[bool]],
        function: Callable[Params, Result],
        *args: Params.args,
        **kwargs: Params.kwargs,
    ) -> Result | None:
        """The result of the function for a client. None if the client has left (`has_left`) before the call began."""
        async with self._running:
            return None if await has_left() else await call_in_thread(function, *args, **kwargs)


@atexit.register
def _wait_for_work() -> None:
    """Wait for functions that still run: Python aborts the process if a daemon thread runs native code at its end."""
    wait(list(_RUNNING), END_TIMEOUT_S)


def is_short_body(num_bytes: int) -> bool:
    """Whether a body of this size is parsed, and its messages are compared, at once."""
    return num_bytes <= MAX_PARSED_BYTES


def is_short_prompt(messages: Sequence[Mapping[str, Any]], num_bytes: int | None = None) -> bool:
    """Whether messages can be rendered at once: they have texts only, and few characters.

    `num_bytes`: size of the whole request, if all of it is rendered: its tools, too.
    """
    contents: list[Any] = [message.get("content") for message in messages]
    if not all(isinstance(content, str) for content in contents):
        return False
    return (sum(map(len, contents)) if num_bytes is None else num_bytes) <= MAX_RENDERED_CHARS


# -- Loop calls -------------------------------------------------------------------------------------


def await_in_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[[], Coroutine[Any, Any, Result]], timeout_s: float
) -> Result:
    """The result of a coroutine function, which is called in the event loop `loop` from another thread.

    Raises its exception, and DeadlineError if the event loop does not answer. A call that has not begun at the end of
    the timeout is taken back.
    """
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


# -- Hanging calls ----------------------------------------------------------------------------------
# `CallThatMayHang`: calls a function that may block for ever, for example on a disk that hangs.


class CallThatMayHang:
    """Calls a function in a daemon thread. Callers with equal arguments wait for the call that runs already."""

    def __init__(self, name: str, function: Callable[..., Any], *, uses_late_results: bool = True) -> None:
        """`name`: what the function does, for the error.

        `uses_late_results`: a result that came after the timeout of its callers goes to the next caller. Otherwise, the
        next caller calls the function again.
        """
        self._name, self._function, self._uses_late_results = name, function, uses_late_results
        self._calls = dict[tuple[Hashable, ...], tuple[asyncio.Task[Any], float]]()
        """By arguments, the call whose result nobody has got yet, and the end of its timeout (`loop.time`)."""

    async def result(self, timeout_s: float, *args: Hashable) -> Any:
        """Call the function, or wait for the call with equal arguments that still runs.

        Raises TimeoutError when the call has run for `timeout_s` seconds, and the exceptions of the function.
        """
        now = asyncio.get_running_loop().time()
        task, deadline = self._calls.get(args, (None, 0.0))
        if task is not None and task.done() and not self._uses_late_results:
            task.exception()  # so that asyncio does not log it
            task = None
        if task is None:
            task, deadline = asyncio.create_task(call_user_function(self._function, *args)), now + timeout_s
            self._calls[args] = task, deadline
        await asyncio.wait((task,), timeout=max(deadline - now, 0.0))
        if not task.done():
            raise TimeoutError(f"{self._name} took more than {timeout_s:g} s")
        if self._calls.get(args, (None,))[0] is task:
            del self._calls[args]
        return task.result()

    async def cancel(self) -> None:
        """Stop waiting for all calls. A function that hangs does so in its daemon thread."""
        tasks = [task for task, _ in self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
