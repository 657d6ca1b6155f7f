"""What code of users raises: limits of the episode that it belongs to, and failures."""

from __future__ import annotations

import asyncio
import contextvars

from verl_server.agent.limits import EpisodeStopped
from verl_server.errors import InfrastructureError, UserCodeError

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
