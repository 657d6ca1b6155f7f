"""HTTP side of memory release and resume: a scheduler's refusal becomes an HTTP error instead of status 200.

SGLang's own functions wait for the replies of all schedulers and ignore them.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


class MemoryOccupationRefused(RuntimeError):
    """A scheduler refused, and nothing was released or resumed. SGLang's error handler reads `status_code` (409)."""

    status_code = HTTPStatus.CONFLICT


async def release(manager: Any, obj: Any, request: Any = None) -> None:
    """Replacement of `TokenizerControlMixin.release_memory_occupation` that raises a scheduler's refusal."""
    manager.auto_create_handle_loop()
    _raise_refusal(await manager.release_memory_occupation_communicator(obj))


async def resume(manager: Any, obj: Any, request: Any = None) -> None:
    """Replacement of `TokenizerControlMixin.resume_memory_occupation` that raises a scheduler's refusal."""
    manager.auto_create_handle_loop()
    _raise_refusal(await manager.resume_memory_occupation_communicator(obj))


def _raise_refusal(replies: list[Any]) -> None:
    refusals = sorted({reply.rid for reply in replies if reply.rid})
    if refusals:
        raise MemoryOccupationRefused("; ".join(refusals))
