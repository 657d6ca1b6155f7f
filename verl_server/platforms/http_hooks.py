"""HTTP side of memory release and resume: a scheduler's refusal becomes an HTTP error. And what a scheduler reports.

SGLang's own functions wait for the replies of all schedulers and ignore them. It does not report which memory is
released: several clients may release and resume the memory of one server, so that none of them knows it from its own
calls. Importing this module imports neither torch nor sglang.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from verl_server.platforms.parameter_dtypes import PARAMETER_DTYPES, report_dtypes

RELEASED_MEMORY = "verl_server_released_memory"
"""Key of the released memory tags, in each element of `internal_states` in a reply to `/server_info`."""


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


def add_state(reply: Any, controller: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook after `SchedulerInternalStateController.get_internal_state`, on every platform: the state that
    `/server_info` returns names the memory tags that are released, and the dtypes of the model's parameters.
    """
    scheduler = controller.scheduler
    reply.internal_state[RELEASED_MEMORY] = sorted(scheduler.weight_updater.offload_tags)
    model = scheduler.tp_worker.model_runner.model
    reply.internal_state[PARAMETER_DTYPES] = report_dtypes(model.state_dict().items())


def _raise_refusal(replies: list[Any]) -> None:
    refusals = sorted({reply.rid for reply in replies if reply.rid})
    if refusals:
        raise MemoryOccupationRefused("; ".join(refusals))
