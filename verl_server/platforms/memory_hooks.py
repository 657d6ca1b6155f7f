"""Scheduler side of `release_memory_occupation` and `resume_memory_occupation` on a CPU.

SGLang's own functions do the bookkeeping (tags, cache flush, rank barrier, saved buffers); their memory
saver is CUDA only, so here the pages go back to the operating system right after, and come back right
before. Where SGLang asserts and takes the server down with it, these hooks refuse instead: release while
requests run, a tag that SGLang does not know. Releasing or resuming twice changes nothing.

After a resume of `weights` the parameters hold zeros until a weight push ends: like on a GPU without a
backup, only defined. Until then, and while anything is released, requests are turned away (503).

Replies carry no success field. A refusal travels in `rid`, which these replies leave unused; `front_hooks`
turns it into an HTTP 409.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import torch

from verl_server.platforms import memory

logger = logging.getLogger(__name__)

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
# A CPU has no graphs: callers that name this tag too (or no tag at all) get what there is.
CUDA_GRAPH = "cuda_graph"
KNOWN_TAGS = (KV_CACHE, WEIGHTS, CUDA_GRAPH)


@dataclass
class Occupation:
    """What this scheduler process holds. One per process, because SGLang has one scheduler in each."""

    released: set[str] = field(default_factory=set)
    weights_empty: bool = False  # resumed, and nothing pushed since

    @property
    def why_not_serving(self) -> str | None:
        if self.released:
            tags = ", ".join(sorted(self.released))
            return f"memory is released ({tags}): call resume_memory_occupation first"
        if self.weights_empty:
            return "weights were released and are empty since the resume: push weights first"
        return None


occupation = Occupation()


def release(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.release_memory_occupation`."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput as Output

    tags = set(request.tags or KNOWN_TAGS)
    fresh = tags - occupation.released - {CUDA_GRAPH}
    refusal = _unknown(tags) or (_release_refusal(manager, fresh) if fresh else None)
    if refusal is not None:
        return Output(rid=refusal)
    if not fresh:
        return Output()
    request.tags = sorted(fresh)
    reply = original(manager, request)
    occupation.released |= fresh
    dropped = memory.drop(_regions(manager, fresh))
    _wait_for_all_ranks(manager)
    logger.info("Released %s: %.1f MB", ", ".join(sorted(fresh)), dropped / 1e6)
    return reply


def resume(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """AROUND `SchedulerWeightUpdaterManager.resume_memory_occupation`."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput as Output

    tags = set(request.tags or KNOWN_TAGS)
    refusal = _unknown(tags)
    if refusal is not None:
        return Output(rid=refusal)
    due = tags & occupation.released
    if not due:
        return Output()
    taken = memory.take_back(_regions(manager, due))
    request.tags = sorted(due)
    reply = original(manager, request)
    _wait_for_all_ranks(manager)
    logger.info("Resumed %s: %.1f MB", ", ".join(sorted(due)), taken / 1e6)
    occupation.released -= due
    if WEIGHTS in due and not _keeps_weights(manager):
        occupation.weights_empty = True
    return reply


def guard_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """AROUND every step of a weight update: refused while there is no memory to load into."""
    if WEIGHTS in occupation.released:
        from sglang.srt.managers import io_struct

        output = getattr(io_struct, type(request).__name__.replace("ReqInput", "ReqOutput"))
        return output(success=False, message="weights are released: call resume_memory_occupation first")
    return original(manager, request)


def guard_last_update_step(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """AROUND the step that completes an update: from here on the weights are somebody's again."""
    reply = guard_update(original, manager, request)
    if reply.success:
        occupation.weights_empty = False
    return reply


def turn_away(original: Callable[..., Any], scheduler: Any, request: Any, **options: Any) -> Any:
    """AROUND `Scheduler.handle_generate_request`: 503 instead of an answer out of empty memory.

    A paused engine queues as always; `hold_back` keeps the queue from running too early.
    """
    reason = occupation.why_not_serving
    if reason is None or scheduler._engine_paused:
        return original(scheduler, request, **options)
    from sglang.srt.managers.io_struct import AbortReq

    finished = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": reason}
    # Also answers SGLang's health probe, which takes any word from here as a sign of life.
    abort = AbortReq(rid=request.rid, finished_reason=finished)
    scheduler.ipc_channels.send_to_tokenizer.send_output(abort, request)
    return None


def hold_back(original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any, **options: Any) -> Any:
    """AROUND `Scheduler.get_next_batch_to_run`: nothing runs on empty memory, queued requests wait."""
    if occupation.why_not_serving is None:
        return original(scheduler, running_batch=running_batch, last_batch=last_batch, **options)
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)


def _release_refusal(manager: Any, tags: set[str]) -> str | None:
    if not memory.supported():
        return "only Linux gives memory of a running process back on request"
    paused = manager.scheduler is not None and manager.scheduler._engine_paused
    if not manager.is_fully_idle(ignore_waiting=paused):
        return "requests are running or queued: finish, abort or pause (retract) them before a release"
    if WEIGHTS in tags and getattr(manager, "_session", None) is not None:
        return "a weight update session is open: call end_weight_update first"
    return None


def _wait_for_all_ranks(manager: Any) -> None:
    """Only rank 0 answers, so its answer has to mean that all of them are done."""
    torch.distributed.barrier(group=manager.tp_cpu_group)


def _unknown(tags: set[str]) -> str | None:
    strange = sorted(tags - set(KNOWN_TAGS))
    return f"unknown tags {strange}: use {', '.join(KNOWN_TAGS)}" if strange else None


def _keeps_weights(manager: Any) -> bool:
    """`--enable-weights-cpu-backup` promises the weights back: a copy in the same memory frees nothing."""
    return bool(getattr(manager.tp_worker.model_runner.server_args, "enable_weights_cpu_backup", False))


def _regions(manager: Any, tags: set[str]) -> list[memory.Region]:
    runner = manager.tp_worker.model_runner
    regions: list[memory.Region] = []
    if KV_CACHE in tags:
        regions += memory.kv_regions(runner.token_to_kv_pool)
    if WEIGHTS in tags and not _keeps_weights(manager):
        regions += memory.weight_regions([runner.model])
    return regions
