"""What code of users raises: limits of the episode that it belongs to, and failures."""

from __future__ import annotations

import asyncio
import contextvars

from verl_server.agent.limits import EpisodeStopped
from verl_server.errors import InfrastructureError, UserCodeError

USER_FAILURES = (Exception, EpisodeStopped, BaseExceptionGroup)
"""What code of a user raises when it fails. `as_exception` makes an exception of it."""
PRESENT_EPISODE: contextvars.ContextVar[object] = contextvars.ContextVar("verl_server_episode", default=None)
"""State of the episode whose agent loop calls the present code. None in all other code."""


def find_own_stop(error: BaseException) -> EpisodeStopped | None:
    """The limit of the episode whose agent loop calls the present code, if `error` is its EpisodeStopped.

    This includes an exception group, for example of a task group, that has only exceptions of this kind: the first of
    them is returned.
    """
    episode = PRESENT_EPISODE.get()

    def is_own(leaf: BaseException) -> bool:
        return isinstance(leaf, EpisodeStopped) and leaf.is_of(episode)

    if isinstance(error, BaseExceptionGroup):
        own, others = error.split(is_own)
        return _first_stop(own) if own is not None and others is None else None
    return error if isinstance(error, EpisodeStopped) and is_own(error) else None


def as_exception(error: BaseException) -> Exception:
    """What code of a user has raised, as an exception that a future can raise and that does not end a run.

    `SystemExit` of a tool must end only the tool, and asyncio does not raise StopIteration through a future. An
    EpisodeStopped is a failure of the code that ran the episode. In an exception group, other exceptions come first. An
    InfrastructureError or a UserCodeError in a group without other exceptions is returned without the group.
    """
    if isinstance(error, BaseExceptionGroup):
        matching, rest = error.split((InfrastructureError, UserCodeError, EpisodeStopped))
        found: BaseException | None = None if matching is None or rest else matching.split(EpisodeStopped)[1]
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if isinstance(found, Exception):
            return found
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    text = f"{type(error).__name__}: {error}"
    others: BaseException | None = None if isinstance(error, EpisodeStopped) else error
    if isinstance(error, BaseExceptionGroup):
        _, others = error.split(EpisodeStopped)
        if isinstance(others, ExceptionGroup):
            return others
    if others is None and (stop := _first_stop(error)) is not None:
        text = (
            f"an episode that this code ran has reached its limit {stop.stop_reason}; catch EpisodeStopped around the "
            "turns of this episode, or raise its limits"
        )
    failure = RuntimeError(text)
    failure.__cause__ = error
    return failure


def _first_stop(error: BaseException | None) -> EpisodeStopped | None:
    """The EpisodeStopped that `error` is, or that is first in the group `error`. None for other exceptions."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, EpisodeStopped) else None


def as_failure(cancellation: asyncio.CancelledError) -> Exception:
    """The failure of user code that raised CancelledError by itself, for example of a task that it has cancelled.

    Raises `cancellation` if the present task is being cancelled.
    """
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise cancellation
    return RuntimeError(f"CancelledError: {str(cancellation) or 'the code awaited something that was cancelled'}")
