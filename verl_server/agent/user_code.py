"""Calls code of users (tools, rewards, agent loops), which may neither end the process nor block the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

from verl_server.agent.limits import EpisodeStopped
from verl_server.errors import DeadlineError, InfrastructureError, UserCodeError
from verl_server.threads import call_in_thread

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

USER_FAILURES = (Exception, EpisodeStopped, BaseExceptionGroup, asyncio.CancelledError)
"""What code of a user raises when it fails. `as_exception` makes an exception of it."""
CURRENT_EPISODE_STATE: contextvars.ContextVar[object] = contextvars.ContextVar(
    "verl_server_episode_state", default=None
)
"""`EpisodeState` of the episode whose agent loop calls the current code. None in all other code."""
CANCEL_TIMEOUT_S = 5.0
"""Seconds for a cancelled tool or request to end."""
END_TIMEOUT_S = 30.0
"""Seconds for other cancelled code to end, for example an agent loop that closes a sandbox."""
_LEFT_RUNNING: set[asyncio.Task[Any]] = set()
"""Tasks that ignore their cancellation. The event loop refers to them weakly: the garbage collector would end them."""


async def call_user_function(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of a user and return its result. A function that is not a coroutine function runs in a thread."""
    if inspect.iscoroutinefunction(function):
        result = function(*args, **kwargs)
    else:
        result = await await_user_code(call_in_thread(function, *args, **kwargs))
    return await await_user_code(result) if inspect.isawaitable(result) else result  # a decorated coroutine function


async def await_user_code(awaitable: Awaitable[Any]) -> Any:
    """Wait for a coroutine of a user. `exit()`, for example in code of the policy, becomes an exception of the sample.

    Cancellation and KeyboardInterrupt are raised unchanged. EpisodeStopped is raised for a limit of the episode whose
    agent loop calls the code, also in a group with other exceptions of this kind only. A limit of another episode
    becomes an exception of the code.
    """
    try:
        return await awaitable
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        leaves, state = _leaves(error), CURRENT_EPISODE_STATE.get()
        is_own_limit = all(isinstance(leaf, EpisodeStopped) and leaf.is_of(state) for leaf in leaves)
        failure = leaves[0] if is_own_limit else as_exception(error)
        if failure is error:
            raise
        raise failure from failure.__cause__


def as_exception(error: BaseException) -> Exception:
    """What code of a user has raised, as an exception that a future can raise and that does not end a run.

    `SystemExit` of a tool must end only the tool, and asyncio does not raise StopIteration through a future. An
    EpisodeStopped is a failure of the code that ran the episode. In an exception group, other exceptions come first. An
    InfrastructureError or a UserCodeError in a group without other exceptions is returned without the group. Raises
    `error` if it is the CancelledError of the current task, and not that of something that the code has cancelled.
    """
    if isinstance(error, asyncio.CancelledError):
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise error
        return RuntimeError(f"CancelledError: {str(error) or 'the code awaited something that was cancelled'}")
    leaves = _leaves(error)
    others = [leaf for leaf in leaves if not isinstance(leaf, EpisodeStopped)]
    if isinstance(error, BaseExceptionGroup) and others:
        if isinstance(first := others[0], Exception) and all(map(_is_typed, others)):
            return first
        error = error.split(EpisodeStopped)[1] or error
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    if isinstance(stopped := leaves[0], EpisodeStopped) and not others:
        failure = RuntimeError(
            f"an episode that this code ran has reached its limit {stopped.stop_reason}; catch EpisodeStopped around "
            "the turns of this episode, or raise its limits"
        )
    failure.__cause__ = error
    return failure


def raise_noted(error: BaseException, note: str) -> NoReturn:
    """Raise `as_exception(error)` with a note, for code of users that is called outside of samples."""
    failure = as_exception(error)
    failure.add_note(note)
    raise failure from failure.__cause__


def _leaves(error: BaseException) -> list[BaseException]:
    """The exceptions in a group and in its inner groups, in their order. For another exception: the exception."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]


def _is_typed(error: BaseException) -> bool:
    return isinstance(error, (InfrastructureError, UserCodeError))


# -- Tasks ------------------------------------------------------------------------------------------


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
    if await wait_until_done(task, timeout_s, name):
        raise DeadlineError(f"{name} took longer than {timeout_s:g} s", operation=name, seconds=timeout_s)
    try:
        return task.result()
    except asyncio.CancelledError as cancellation:
        raise as_exception(cancellation) from None


async def await_to_its_end(task: asyncio.Task[Any], name: str) -> Any:
    """Await a task with code of a user that has no deadline. Raises its exception.

    If the caller is cancelled, the task is cancelled and has `END_TIMEOUT_S` seconds to end. After that the task is
    left running, and a warning has its `name`.
    """
    await wait_until_done(task, None, name, END_TIMEOUT_S)
    return task.result()


async def wait_until_done(
    task: asyncio.Task[Any], timeout_s: float | None, name: str, cancel_timeout_s: float | None = None
) -> bool:
    """Wait until `task` has ended, at most `timeout_s` seconds, and cancel it if it has not. Returns whether it has
    exceeded them and has no result, see `wait_within`.

    A task that ignores its cancellation for `cancel_timeout_s` seconds (None: `CANCEL_TIMEOUT_S`) still runs when this
    function returns, and a warning has its `name`. If the caller is cancelled again, the task is cancelled again, and
    CancelledError is raised when the task has ended.
    """
    cancel_timeout_s = CANCEL_TIMEOUT_S if cancel_timeout_s is None else cancel_timeout_s
    cancelled: asyncio.CancelledError | None = None
    is_late = False
    try:
        is_late = await wait_within(task, timeout_s)
    except asyncio.CancelledError as error:
        cancelled = error
    loop = asyncio.get_running_loop()
    deadline = loop.time() + cancel_timeout_s
    task.cancel()
    while not task.done() and (remaining_s := deadline - loop.time()) > 0:
        try:
            await asyncio.wait({task}, timeout=remaining_s)
        except asyncio.CancelledError as error:
            cancelled = error
            task.cancel()
    has_result = task.done() and not task.cancelled() and task.exception() is None  # asyncio logs no unread exception
    if not task.done():
        _LEFT_RUNNING.add(task)
        task.add_done_callback(_LEFT_RUNNING.discard)
        logger.warning(
            "%s has ignored its cancellation for %g s and goes on; code that catches CancelledError or BaseException "
            "must raise CancelledError again",
            name,
            cancel_timeout_s,
        )
    if cancelled is not None:
        raise cancelled
    return is_late and not has_result


async def wait_within(future: asyncio.Future[Any], timeout_s: float | None) -> bool:
    """Wait until `future` is done, at most `timeout_s` seconds if given. Returns whether they were exceeded.

    If another coroutine blocked the event loop at the end of the timeout, the wait is extended once by the seconds that
    the event loop was blocked: a result that arrived meanwhile may not be processed yet, and is then there also if the
    timeout was exceeded.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    if not future.done():
        await asyncio.wait({future}, timeout=timeout_s)
    if timeout_s is None or future.done():
        return False
    await asyncio.wait({future}, timeout=max(loop.time() - started - timeout_s, 0.0))
    return True


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
