"""Methods that vLLM adds to its workers (`--worker-extension-cls`).

They are called through `/collective_rpc`, and never raise. When a method of one worker raises, vLLM leaves the replies
of the other workers in their queues, and every later call gets the replies of the call before. Therefore each method
returns a report with the id of its call, and methods of vLLM that may raise are called or tried here first.

Release and resume of memory are called while generation is paused and no request is held. vLLM's own sleep frees
nothing on a CPU. After a release of "weights" the model is torn until a whole update.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform

from verl_server.platforms.parameter_dtypes import PARAMETER_DTYPES, report_dtypes
from verl_server.vllm_server import register
from verl_server.weights.transports import receiver_class

WEIGHTS, KV_CACHE = "weights", "kv_cache"
MADV_DONTNEED = 4
MAX_ERROR_CHARACTERS = 1500
TRIED_LORA_ID = 2**31 - 1
"""vLLM's id of an adapter that is loaded as a trial. Ids of other adapters count from 1."""
_libc = ctypes.CDLL(None, use_errno=True)

if os.environ.get("TORCH_COMPILE_DISABLE") == "1":  # torch reads it when it is imported; a forked worker has done so
    torch._dynamo.config.disable = True
register()  # vLLM imports this module in each worker before it creates the weight transfer engine


def _keep_base_requests_without_lora() -> None:
    """Let vLLM's LoRA operations for CPUs add nothing to a request without an adapter, whose index is -1.

    They would take the last adapter: beside a request with an adapter, and for an output head always. What the first of
    an adapter's two factors computes becomes 0 for such a request.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(inputs: Any, weights: Any, output: torch.Tensor, indices: torch.Tensor, scale: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scale)
        output.masked_fill_((indices < 0)[:, None], 0.0)

    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink


if current_platform.is_cpu():
    _keep_base_requests_without_lora()


class WorkerExtension:
    """Methods of vLLM's worker class. Each returns the report of one worker."""

    rank: int
    model_runner: Any
    weight_transfer_engine: Any
    verl_server_released: set[str]
    _weight_update_active: bool
    finish_weight_update: Callable[[], None]

    def verl_server_release_memory(self, tags: str, call_id: str = "") -> dict[str, Any]:
        """Return memory to the system. `tags`: JSON list of "weights" and "kv_cache", on an accelerator both."""
        return _report(self, lambda: _release(self, set(json.loads(tags))), call_id)

    def verl_server_resume_memory(self, tags: str, call_id: str = "") -> dict[str, Any]:
        """Take the memory again, so that missing memory is noticed now. Weights are undefined until a whole update."""
        return _report(self, lambda: _resume(self, set(json.loads(tags))), call_id)

    def verl_server_close_update(self, call_id: str = "") -> dict[str, Any]:
        """Close an update that a client of vLLM's own routes has left open. vLLM refuses to start another one."""
        found = {"was_open": False}

        def close() -> None:
            found["was_open"] = self._weight_update_active
            if self._weight_update_active:
                self.finish_weight_update()

        return {**_report(self, close, call_id), **found}

    def verl_server_open(self, message: str, call_id: str = "") -> dict[str, Any]:
        """Open what the transport of an update needs, see `Receiver.open_only`. `message`: the loader's, as JSON."""
        from vllm.distributed import get_tensor_model_parallel_rank

        fields = json.loads(message)
        transport = receiver_class(fields["transport"])
        return _report(self, lambda: transport.open_only(fields, get_tensor_model_parallel_rank()), call_id)

    def verl_server_update_outcome(self, call_id: str = "") -> dict[str, Any]:
        """The outcome of the last update of this worker, see `WeightEngine.outcome`."""
        outcome: dict[str, Any] = self.weight_transfer_engine.outcome()
        return {"rank": self.rank, "call_id": call_id, **outcome}

    def verl_server_try_lora(self, folder: str, call_id: str = "") -> dict[str, Any]:
        """Load a LoRA adapter with vLLM's own method, and remove it."""
        return _report(self, lambda: _try_adapter(self.model_runner.lora_manager, folder), call_id)

    def verl_server_memory(self, call_id: str = "") -> dict[str, Any]:
        """What is released, the resident memory of the worker, which tensors vLLM loads together, which
        it cannot load again, and the dtypes of the parameters."""
        rehearsal = getattr(self.weight_transfer_engine, "rehearsal", None)
        found: dict[str, Any] = {PARAMETER_DTYPES: None}
        report = _report(self, lambda: found.update({PARAMETER_DTYPES: _dtypes_of(self.model_runner.model)}), call_id)
        return {**report, **found, "fused_modules": [], "unloadable": []} | (
            {}
            if rehearsal is None
            else {"fused_modules": rehearsal.fused_modules(), "unloadable": rehearsal.unloadable}
        )


def _dtypes_of(model: torch.nn.Module) -> dict[str, Any]:
    """The report on the parameters as the model's loader fills them: vLLM drops weights that it has packed."""
    from verl_server.vllm_server.loading.reloaded_modules import raw_parameters

    return report_dtypes(
        (f"{path}.{name}", tensor)
        for path, module in model.named_modules()
        for name, tensor in raw_parameters(module).items()
    )


def _report(worker: Any, action: Callable[[], object], call_id: str) -> dict[str, Any]:
    error = None
    try:
        action()
    except Exception:  # noqa: BLE001 - goes into the report, see the docstring of the module
        error = traceback.format_exc()[-MAX_ERROR_CHARACTERS:]
    report = {"rank": worker.rank, "call_id": call_id, "ok": error is None, "error": error}
    return {**report, "released": sorted(_released(worker)), "rss_bytes": _resident()}


def _try_adapter(manager: Any, folder: str) -> None:
    """All steps of a load: some adapters fail only when their tensors are copied. vLLM reads an adapter that it had to
    drop for this one again when it is used next."""
    from vllm.lora.request import LoRARequest

    try:
        manager.add_adapter(LoRARequest("trial", TRIED_LORA_ID, folder))
    finally:
        manager.remove_adapter(TRIED_LORA_ID)


def _released(worker: Any) -> set[str]:
    return set(getattr(worker, "verl_server_released", ()))


def _release(worker: Any, tags: set[str]) -> None:
    released = _released(worker)
    if not _is_cpu(tags):
        if tags - released:  # a second sleep would read buffers whose memory is gone
            worker.verl_server_released = released | tags  # also if it raises, which it may do after the release
            worker.sleep(level=2)  # its level 1 would keep the weights in host memory
        return
    if WEIGHTS in tags - released:
        for module in worker.model_runner.model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = None  # holds a packed copy of the weight
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None  # may hold packed copies of the experts
        _drop(worker.model_runner.model.parameters())
    if KV_CACHE in tags - released:
        _drop(worker.model_runner.kv_caches)
    worker.verl_server_released = released | tags
    gc.collect()
    _libc.malloc_trim(0)


def _resume(worker: Any, tags: set[str]) -> None:
    released = _released(worker)
    if not _is_cpu(tags):
        worker.wake_up(sorted(tags))  # can be called again when memory was missing
        worker.verl_server_released = released - tags
        return
    if WEIGHTS in tags & released:
        _touch(worker.model_runner.model.parameters())
    if KV_CACHE in tags & released:
        _touch(worker.model_runner.kv_caches)
    worker.verl_server_released = released - tags


def _is_cpu(tags: set[str]) -> bool:
    """Whether the worker computes on a CPU. Raises ValueError for unknown tags."""
    if unknown := tags - {WEIGHTS, KV_CACHE}:
        raise ValueError(f"unknown tags {sorted(unknown)}")
    return bool(current_platform.is_cpu())


def _resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * mmap.PAGESIZE


def _pages(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Address and length of the whole pages of the tensors' memory."""
    ranges = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            ranges.add((start, stop - start))
    return sorted(ranges)


def _drop(tensors: Iterable[torch.Tensor]) -> None:
    """Give the pages back. The memory stays mapped and reads as zeros."""
    for address, length in _pages(tensors):
        if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), f"madvise: {os.strerror(ctypes.get_errno())}")


def _touch(tensors: Iterable[torch.Tensor]) -> None:
    """Write zeros to all pages."""
    for address, length in _pages(tensors):
        ctypes.memset(address, 0, length)
