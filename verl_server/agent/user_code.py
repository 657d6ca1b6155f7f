"""Calls code of users (tools, rewards, agent loops), which may neither end the process nor block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import os
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from verl_server.agent.limits import EpisodeStopped
from verl_server.errors import DeadlineError, InfrastructureError, UserCodeError

logger = logging.getLogger(__name__)


# -- User failures ----------------------------------------------------------------------------------
# What code of users raises: limits of the episode that it belongs to, and failures.

USER_FAILURES = (Exception, EpisodeStopped, BaseExceptionGroup)
"""What code of a user raises when it fails. `as_exception` makes an exception of it."""
CURRENT_EPISODE_STATE: contextvars.ContextVar[object] = contextvars.ContextVar(
    "verl_server_episode_state", default=None
)
"""`EpisodeState` of the episode whose agent loop calls the current code. None in all other code."""


def find_own_stop(error: BaseException) -> EpisodeStopped | None:
    """The limit of the episode whose agent loop calls the current code, if `error` is its EpisodeStopped.

    This includes an exception group, for example of a task group, that has only exceptions of this kind: the first of
    them is returned.
    """
    leaves, state = _leaves(error), CURRENT_EPISODE_STATE.get()
    own = [leaf for leaf in leaves if isinstance(leaf, EpisodeStopped) and leaf.is_of(state)]
    return own[0] if len(own) == len(leaves) else None


def as_exception(error: BaseException) -> Exception:
    """What code of a user has raised, as an exception that a future can raise and that does not end a run.

    `SystemExit` of a tool must end only the tool, and asyncio does not raise StopIteration through a future. An
    EpisodeStopped is a failure of the code that ran the episode. In an exception group, other exceptions come first. An
    InfrastructureError or a UserCodeError in a group without other exceptions is returned without the group.
    """
    leaves = _leaves(error)
    stops = [leaf for leaf in leaves if isinstance(leaf, EpisodeStopped)]
    if isinstance(error, BaseExceptionGroup):
        typed = [leaf for leaf in leaves if isinstance(leaf, (InfrastructureError, UserCodeError))]
        if typed and len(typed) + len(stops) == len(leaves):
            return typed[0]
        if stops and isinstance(others := error.split(EpisodeStopped)[1], ExceptionGroup):
            return others
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    text = f"{type(error).__name__}: {error}"
    if len(stops) == len(leaves):
        text = (
            f"an episode that this code ran has reached its limit {stops[0].stop_reason}; catch EpisodeStopped around "
            "the turns of this episode, or raise its limits"
        )
    failure = RuntimeError(text)
    failure.__cause__ = error
    return failure


def _leaves(error: BaseException) -> list[BaseException]:
    """The exceptions in a group and in its inner groups, in their order. For another exception: the exception."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]


class NotedFailures:
    """Raises what code of a user raises in the block as an `Exception` with a note.

    Raises the CancelledError of the current task unchanged. It is no generator: `contextlib` would raise the
    StopIteration of a user's code instead of the exception with the note.
    """

    def __init__(self, note: str) -> None:
        self._note = note

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, asyncio.CancelledError):
            raise as_failure(error) from None
        if isinstance(error, USER_FAILURES):
            failure = as_exception(error)
            failure.add_note(self._note)
            raise failure from failure.__cause__


def as_failure(cancellation: asyncio.CancelledError) -> Exception:
    """The failure of user code that raised CancelledError by itself, for example of a task that it has cancelled.

    Raises `cancellation` if the current task is being cancelled.
    """
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise cancellation
    return RuntimeError(f"CancelledError: {str(cancellation) or 'the code awaited something that was cancelled'}")


# -- User code --------------------------------------------------------------------------------------

Result = TypeVar("Result")

CANCEL_TIMEOUT_S = 5.0
"""Seconds for a cancelled tool or request to end."""
END_TIMEOUT_S = 30.0
"""Seconds for other cancelled code to end, for example an agent loop that closes a sandbox."""
_LEFT_RUNNING: set[asyncio.Task[Any]] = set()
"""Tasks that ignore their cancellation. The event loop refers to them weakly: the garbage collector would end them."""

IDLE_THREAD_S = 10.0
"""Seconds after which a thread without work ends."""
_Call = Callable[[], Callable[[], object]]
_Calls = queue.SimpleQueue[_Call]
_IDLE_THREADS: list[_Calls] = []
"""Queues of the threads that wait for a function."""
os.register_at_fork(after_in_child=_IDLE_THREADS.clear)


async def call_user_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of a user and return its result. A function that is not a coroutine function runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await await_user_code(function(*args, **kwargs))
    result = await _run_in_daemon_thread(lambda: function(*args, **kwargs))
    return await await_user_code(result) if inspect.isawaitable(result) else result  # a decorated coroutine function


async def await_user_code(awaitable: Awaitable[Any]) -> Any:
    """Wait for a coroutine of a user. `exit()`, for example in code of the policy, becomes an exception of the sample.

    Cancellation and KeyboardInterrupt are raised unchanged. EpisodeStopped is raised for a limit of the episode whose
    agent loop calls the code (see `find_own_stop`). A limit of another episode becomes an exception of the code.
    """
    try:
        return await awaitable
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, BaseExceptionGroup):
            raise
        failure = find_own_stop(error) or as_exception(error)
        raise failure from failure.__cause__


def create_user_task(awaitable: Awaitable[Any], state: object = None) -> asyncio.Task[Any]:
    """A task of `await_user_code`. Its coroutine is closed also if the task is cancelled before it begins.

    `state`: the `EpisodeState` of the episode whose agent loop the code is. None for all other code.
    """
    context = contextvars.copy_context()
    context.run(CURRENT_EPISODE_STATE.set, state)
    task = asyncio.get_running_loop().create_task(await_user_code(awaitable), context=context)
    if inspect.iscoroutine(awaitable):
        task.add_done_callback(lambda _: awaitable.close())
    return task


async def call_within(awaitable: Awaitable[Any], timeout_s: float, name: str) -> Any:
    """Await a coroutine of a user. Raises its exception, and DeadlineError after `timeout_s` seconds.

    `name`: what is awaited, for the error.
    """
    task = create_user_task(awaitable)
    is_late = await wait_until_done(task, timeout_s, name)
    if is_late and not has_result(task):
        raise DeadlineError(f"{name} took longer than {timeout_s:g} s", operation=name, seconds=timeout_s)
    try:
        return task.result()
    except asyncio.CancelledError as cancellation:
        raise as_failure(cancellation) from None


async def await_to_its_end(task: asyncio.Task[Any], name: str) -> Any:
    """Await a task with code of a user that has no deadline. Raises its exception.

    If the caller is cancelled, the task is cancelled and has `END_TIMEOUT_S` seconds to end. After that the task is
    left running, and a warning has its `name`.
    """
    await wait_until_done(task, None, name, END_TIMEOUT_S)
    return task.result()


def has_result(task: asyncio.Task[Any]) -> bool:
    """Whether a task has ended without an exception."""
    return task.done() and not task.cancelled() and task.exception() is None


async def wait_uncancelled(awaitable: Awaitable[Result]) -> Result:
    """The result of a coroutine that is awaited also while this task is being cancelled. CancelledError comes after."""
    task = asyncio.ensure_future(awaitable)
    cancelled = await wait_despite_cancellation(task)
    if cancelled is not None and (task.cancelled() or task.exception() is None):
        raise cancelled
    return task.result()


async def wait_despite_cancellation(future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until `future` is done, also while this task is being cancelled. Returns the last CancelledError."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def wait_within(future: asyncio.Future[Any], timeout_s: float | None) -> bool:
    """Wait until `future` is done, at most `timeout_s` seconds if given. Returns whether they were exceeded.

    If another coroutine blocked the event loop at the end of the timeout, the wait is extended once by the seconds that
    the event loop was blocked: a result that arrived meanwhile may not be processed yet, and is then there also if the
    timeout was exceeded.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    await _wait(future, timeout_s)
    if timeout_s is None or future.done():
        return False
    await _wait(future, max(loop.time() - started - timeout_s, 0.0))
    return True


async def _wait(future: asyncio.Future[Any], timeout_s: float | None) -> None:
    """As `asyncio.wait` for one future, with less work: each turn and each call of a tool waits."""
    if future.done():
        return
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def release(_: asyncio.Future[Any] | None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    future.add_done_callback(release)
    timer = None if timeout_s is None else loop.call_later(timeout_s, release, None)
    try:
        await waiter
    finally:
        future.remove_done_callback(release)
        if timer is not None:
            timer.cancel()


async def wait_until_done(
    task: asyncio.Task[Any], timeout_s: float | None, name: str, cancel_timeout_s: float | None = None
) -> bool:
    """Wait until `task` has ended. Cancel it if it does not end. Returns whether `timeout_s` seconds were exceeded.

    See `wait_within`. A task that ignores its cancellation for `cancel_timeout_s` seconds (None: `CANCEL_TIMEOUT_S`)
    still runs when this function returns, and a warning has its `name`. If the caller is cancelled again, the task is
    cancelled again.
    """
    try:
        is_late = await wait_within(task, timeout_s)
    finally:
        await _end(task, name, CANCEL_TIMEOUT_S if cancel_timeout_s is None else cancel_timeout_s)
    return is_late


async def _end(task: asyncio.Task[Any], name: str, timeout_s: float) -> None:
    """Cancel a task and wait until it has ended, also while the caller is cancelled. CancelledError comes after."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    cancelled: asyncio.CancelledError | None = None
    task.cancel()
    while not task.done() and (remaining_s := deadline - loop.time()) > 0:
        try:
            await asyncio.wait({task}, timeout=remaining_s)
        except asyncio.CancelledError as error:
            cancelled = error
            task.cancel()
    if not task.done():
        _LEFT_RUNNING.add(task)
        task.add_done_callback(_LEFT_RUNNING.discard)
        logger.warning(
            "%s has ignored its cancellation for %g s and goes on; code that catches CancelledError or BaseException "
            "must raise CancelledError again",
            name,
            timeout_s,
        )
    elif not task.cancelled():
        task.exception()  # so that asyncio does not log it if the caller is cancelled
    if cancelled is not None:
        raise cancelled


async def _run_in_daemon_thread(function: Callable[[], Any]) -> Any:
    """Call `function` in a daemon thread that calls nothing else meanwhile. Return its result or raise its exception.

    The function sees a copy of the caller's context variables.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def resolve(value: Any, error: BaseException | None) -> None:
        if future.done():  # the caller was cancelled or reached its timeout
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def target() -> Callable[[], object]:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001 - raised in the coroutine that waits
            failure = find_own_stop(error) or as_exception(error)
        return functools.partial(loop.call_soon_threadsafe, resolve, value, failure)

    context = contextvars.copy_context()
    _call_in_thread(functools.partial(context.run, target))
    return await future


def _call_in_thread(function: _Call) -> None:
    """Call a function that raises nothing in a daemon thread: one that waits for work, or a new one.

    The thread waits for work again before it calls what the function returns, so that whoever is told of the result
    finds the thread.

    `ThreadPoolExecutor` is not used: it waits for a function that hangs, at the latest when the process ends.
    """
    try:
        calls = _IDLE_THREADS.pop()
    except IndexError:
        calls = queue.SimpleQueue()
        thread = threading.Thread(target=_serve_calls, args=(calls,), name="verl-server-agent", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise InfrastructureError(
                f"{error}: this process has {threading.active_count()} threads; make the tools and rewards coroutine "
                "functions, or pass a smaller max_concurrency"
            ) from error
    calls.put(function)


def _serve_calls(calls: _Calls) -> None:
    """Call the functions of a thread, until none has come for some seconds."""
    while True:
        try:
            function = calls.get(timeout=IDLE_THREAD_S)
        except queue.Empty:
            try:
                _IDLE_THREADS.remove(calls)
            except ValueError:  # another thread has taken this one, and sends a function
                continue
            return
        tell_result = function()
        _IDLE_THREADS.append(calls)
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so no coroutine waits any more
            tell_result()
        del function, tell_result  # they refer to the sample
