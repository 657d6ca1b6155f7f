"""Return of a tensor's memory to the operating system while its address stays valid.

On Linux `madvise(MADV_DONTNEED)` drops the pages of private memory at once. The address range stays valid and reads as
zeros until it is written again (madvise(2)). So no pointer becomes invalid: tied weights, views and captured buffers
keep working, and an unexpected access costs a page instead of a segmentation fault. `MADV_POPULATE_WRITE` (Linux 5.14)
allocates the pages again in one call.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import torch

from verl_server.config import MemoryTag
from verl_server.platforms.limits import available_memory
from verl_server.platforms.scheduler_hooks import without_batch

logger = logging.getLogger(__name__)

MADV_DONTNEED = 4
MADV_POPULATE_WRITE = 23


@dataclass(frozen=True, order=True)
class Region:
    """A range of this process's memory."""

    address: int
    size: int
    """Number of bytes."""


def is_supported() -> bool:
    """Whether this operating system drops pages on MADV_DONTNEED. On other systems it is only a hint."""
    return sys.platform == "linux"


def weight_regions(models: Iterable[Any]) -> list[Region]:
    """The storages of all parameters. Buffers, such as rope tables, are kept: weight updates do not contain them."""
    return storage_regions(parameter for model in models for parameter in model.parameters())


def storage_regions(tensors: Iterable[torch.Tensor]) -> list[Region]:
    """The storages of tensors, each once."""
    found: dict[int, int] = {}
    for storage in (tensor.untyped_storage() for tensor in tensors):
        found[storage.data_ptr()] = max(storage.nbytes(), found.get(storage.data_ptr(), 0))
    return [Region(address, size) for address, size in sorted(found.items())]


def kv_regions(pool: Any) -> list[Region]:
    """The buffers of a KV pool, as the pool lists them for transfers to other machines.

    `get_contiguous_buf_infos` lists the buffers of full attention, `get_state_buf_infos` those of sliding windows and
    linear attention. Neither lists index tables, which must keep their contents.
    """
    found: dict[int, int] = {}
    for name in ("get_contiguous_buf_infos", "get_state_buf_infos"):
        if hasattr(pool, name):
            addresses, sizes, *_ = getattr(pool, name)()
            found.update(zip(addresses, sizes, strict=True))
    return [Region(address, size) for address, size in sorted(found.items())]


def whole_pages(regions: Iterable[Region]) -> Iterator[Region]:
    """The pages that lie completely inside a region. Other pages may also hold other objects."""
    page = mmap.PAGESIZE
    for region in regions:
        start = -(-region.address // page) * page
        end = (region.address + region.size) // page * page
        if end > start:
            yield Region(start, end - start)


def drop(regions: Iterable[Region]) -> int:
    """Return the pages to the operating system. The contents become zeros. Returns the number of bytes."""
    dropped = 0
    for region in whole_pages(regions):
        _madvise(region, MADV_DONTNEED)
        dropped += region.size
    return dropped


def allocate_again(regions: Iterable[Region]) -> int:
    """Allocate the pages again, so that missing memory is noticed now and not during a request. Returns bytes."""
    taken = 0
    for region in whole_pages(regions):
        try:
            _madvise(region, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: Linux before 5.14
                raise
            ctypes.memset(region.address, 0, region.size)
        taken += region.size
    return taken


def _madvise(region: Region, advice: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.madvise(ctypes.c_void_p(region.address), ctypes.c_size_t(region.size), ctypes.c_int(advice))
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"madvise({advice}) of {region.size} bytes failed")


# -- Memory hooks -----------------------------------------------------------------------------------
# Scheduler side of `release_memory_occupation` and `resume_memory_occupation` on a CPU.
#
# SGLang's own functions keep the records (tags, cache flush, barrier of the ranks, saved buffers). Their memory saver
# supports CUDA only. Therefore these hooks return the pages to the operating system after SGLang's release, and
# allocate them again before SGLang's resume. Where SGLang's assertions would end the server, these hooks refuse
# instead: a release while requests run, and a tag that SGLang does not know. Releasing or resuming twice changes
# nothing.
#
# After a resume of `weights` the parameters hold zeros until a weight update has ended. (On a GPU without a backup
# their values are undefined.) Until then, and while any memory is released, requests are refused with status 503.
#
# SGLang's replies have no success field. A refusal is sent in `rid`, which these replies do not use otherwise;
# the HTTP side turns it into status 409.

WEIGHTS, KV_CACHE = MemoryTag.WEIGHTS.value, MemoryTag.KV_CACHE.value
#: A CPU has no graphs. Callers that name this tag, or no tag, release the other memory.
CUDA_GRAPH = MemoryTag.CUDA_GRAPH.value
KNOWN_TAGS = tuple(tag.value for tag in MemoryTag)


@dataclass
class Occupation:
    """The memory that this scheduler process holds. One object per process, because a process has one scheduler."""

    released: set[str] = field(default_factory=set)
    weights_empty: bool = False
    """Whether weights were resumed and not updated since."""

    @property
    def refusal(self) -> str | None:
        """The reason for which requests cannot be served, or None."""
        if self.released:
            tags = ", ".join(sorted(self.released))
            return f"memory is released ({tags}): call resume_memory_occupation first"
        if self.weights_empty:
            return "weights were released and are empty since the resume: push weights first"
        return None


occupation = Occupation()


def release(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Replacement of `SchedulerWeightUpdaterManager.release_memory_occupation`, which it calls.

    After SGLang's function it returns the pages to the operating system, because SGLang's memory saver supports CUDA
    only. It refuses what would end the server.
    """
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput as Output

    tags = set(request.tags or KNOWN_TAGS)
    to_release = tags - occupation.released - {CUDA_GRAPH}
    refusal = _unknown_tags_refusal(tags) or (_release_refusal(manager, to_release) if to_release else None)
    if refusal is not None:
        return Output(rid=refusal)
    manager.offload_tags |= tags & {CUDA_GRAPH}  # as SGLang does on a GPU
    if not to_release:
        return Output()
    request.tags = sorted(to_release)
    reply = original(manager, request)
    occupation.released |= to_release
    dropped = drop(_regions(manager, to_release))
    _wait_for_all_ranks(manager)
    logger.info("Released %s: %.1f MB", ", ".join(sorted(to_release)), dropped / 1e6)
    return reply


def resume(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Replacement of `SchedulerWeightUpdaterManager.resume_memory_occupation`, which it calls.

    Before SGLang's function it allocates the pages again, so that missing memory is noticed now.
    """
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput as Output

    tags = set(request.tags or KNOWN_TAGS)
    refusal = _unknown_tags_refusal(tags)
    if refusal is not None:
        return Output(rid=refusal)
    manager.offload_tags -= tags & {CUDA_GRAPH}
    to_resume = tags & occupation.released
    if not to_resume:
        return Output()
    taken = allocate_again(_regions(manager, to_resume))
    request.tags = sorted(to_resume)
    reply = original(manager, request)
    _wait_for_all_ranks(manager)
    logger.info("Resumed %s: %.1f MB", ", ".join(sorted(to_resume)), taken / 1e6)
    occupation.released -= to_resume
    if WEIGHTS in to_resume and not _keeps_weights(manager):
        occupation.weights_empty = True
    return reply


def guard_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Refuse a step of a weight update while the memory of the weights is released; otherwise call SGLang's function.

    Hook of the update methods of `SchedulerWeightUpdaterManager`. Without it, the resume would lose the new weights.
    """
    if WEIGHTS in occupation.released:
        from sglang.srt.managers import io_struct

        output = getattr(io_struct, type(request).__name__.replace("ReqInput", "ReqOutput"))
        return output(success=False, message="weights are released: call resume_memory_occupation first")
    return original(manager, request)


def guard_last_update_step(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Record that the weights are no longer empty when SGLang's function, the last step of an update, has succeeded.

    Hook of the methods of `SchedulerWeightUpdaterManager` that complete an update. Requests are served again then.
    """
    reply = guard_update(original, manager, request)
    if reply.success:
        occupation.weights_empty = False
    return reply


def refuse_without_memory(original: Callable[..., Any], scheduler: Any, request: Any, **options: Any) -> Any:
    """Answer a request with status 503 instead of calling `Scheduler.handle_generate_request` while memory is empty.

    SGLang itself would compute tokens from empty memory. A paused engine queues requests as usual;
    `hold_queued_requests` prevents that the queue runs too early.
    """
    reason = occupation.refusal
    if reason is None or scheduler._engine_paused:
        return original(scheduler, request, **options)
    from sglang.srt.managers.io_struct import AbortReq

    finished = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": reason}
    # It also answers SGLang's health probe, which accepts any message of the scheduler.
    abort = AbortReq(rid=request.rid, finished_reason=finished)
    scheduler.ipc_channels.send_to_tokenizer.send_output(abort, request)
    return None


def hold_queued_requests(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Make `Scheduler.get_next_batch_to_run` return no batch while memory is released or weights are empty.

    Queued requests wait then; SGLang itself would compute them from empty memory.
    """
    return original(scheduler, *args, **kwargs) if occupation.refusal is None else without_batch(kwargs)


def _release_refusal(manager: Any, tags: set[str]) -> str | None:
    if not is_supported():
        return "memory can be released on Linux only"
    paused = manager.scheduler is not None and manager.scheduler._engine_paused
    if not manager.is_fully_idle(ignore_waiting=paused):
        return "requests are running or queued: finish, abort or pause (retract) them before a release"
    if WEIGHTS in tags and getattr(manager, "_session", None) is not None:
        return "a weight update session is open: call end_weight_update first"
    return None


def _wait_for_all_ranks(manager: Any) -> None:
    """Only rank 0 replies, so it waits until all ranks are done."""
    torch.distributed.barrier(group=manager.tp_cpu_group)


def _unknown_tags_refusal(tags: set[str]) -> str | None:
    unknown = sorted(tags - set(KNOWN_TAGS))
    return f"unknown tags {unknown}: use {', '.join(KNOWN_TAGS)}" if unknown else None


def _keeps_weights(manager: Any) -> bool:
    """Whether `--enable-weights-cpu-backup` is set.

    The weights are then kept: a copy in host memory would free nothing.
    """
    return bool(getattr(manager.tp_worker.model_runner.server_args, "enable_weights_cpu_backup", False))


def _regions(manager: Any, tags: set[str]) -> list[Region]:
    runner = manager.tp_worker.model_runner
    regions: list[Region] = []
    if KV_CACHE in tags:
        regions += kv_regions(runner.token_to_kv_pool)
    if WEIGHTS in tags and not _keeps_weights(manager):
        regions += weight_regions([runner.model])
    return regions


# -- Kv cache size ----------------------------------------------------------------------------------
# Default size of the KV cache on a CPU, in tokens.

# A server shares the machine with the trainer and with the user's programs. By default it takes at most an eighth of
# the free memory, and at most the memory of sixteen requests of full length.
SHARE_OF_FREE_MEMORY = 1 / 8
FULL_LENGTH_REQUESTS = 16
SMALLEST_POOL_TOKENS = 2048


def pool_tokens(context_length: int, bytes_per_token: int, free_bytes: int) -> int:
    """Number of tokens in the KV pool, limited by the context length and by free memory; at least the smallest pool."""
    useful = context_length * FULL_LENGTH_REQUESTS
    affordable = int(free_bytes * SHARE_OF_FREE_MEMORY) // max(bytes_per_token, 1)
    return max(SMALLEST_POOL_TOKENS, min(useful, affordable))


def default_kv_cache_tokens(model: Any) -> int:
    """The default of `max_total_tokens` for this model (SGLang's `ModelConfig`) and the memory that is free now."""
    element_bytes = 2 if str(model.dtype) in ("torch.bfloat16", "torch.float16") else 4
    # Keys and values of all layers. All TP ranks use the same host memory, so the size is not divided by the TP size.
    bytes_per_token = (
        model.num_hidden_layers
        * model.get_total_num_kv_heads()
        * (model.head_dim + getattr(model, "v_head_dim", model.head_dim))
        * element_bytes
    )
    tokens = pool_tokens(model.context_len, bytes_per_token, available_memory())
    logger.info("KV cache: %d tokens of %d bytes (set --max-total-tokens to change)", tokens, bytes_per_token)
    return tokens
