"""Updates in a vLLM worker: weight transfer engine, session, and the methods that vLLM adds to its workers.

They are called through `/collective_rpc`, and never raise. When a method of one worker raises, vLLM leaves the replies
of the other workers in their queues, and every later call gets the replies of the call before. Therefore each method
returns a report with the id of its call, and methods of vLLM that may raise are called or tried here first.

Release and resume of memory are called while generation is paused and no request is held. vLLM's own sleep frees
nothing on a CPU. After a release of "weights" the model is torn until a whole update.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform

from verl_server.config import WHOLE_MODEL_TRANSPORTS
from verl_server.platforms.server_report import PARAMETER_DTYPES, report_dtypes
from verl_server.types import Json
from verl_server.vllm_plugin import register
from verl_server.vllm_plugin.reload import LayerwiseLoad, NamedTensors, PartialModuleError, Rehearsal, WeightLoad
from verl_server.weights.arena import MAX_ERROR_CHARACTERS, XXH3, Report, compute_checksum, error_text
from verl_server.weights.loader import (
    MAX_COPIED_BYTES,
    MAX_UNREAD_NAMES,
    MAX_UNWRITTEN_NAMES,
    ReadTensors,
)
from verl_server.weights.manifest import read_manifest
from verl_server.weights.transports.base import Receiver, note_loaded, receiver_class, require_owner

# -- Weight session ---------------------------------------------------------------------------------
# What happened in one update on one worker.


@dataclass
class WeightSession:
    """The outcome between `start_weight_update` and `finish_weight_update` on one worker."""

    error: str | None = None
    """Type and message of the first exception."""
    trace: str | None = None
    """End of the traceback of the first exception."""
    read: ReadTensors = field(default_factory=ReadTensors)
    """The tensors of the update, and which of them the model has read."""
    num_tensors: int = 0
    """Number of tensors that the model took."""
    is_unchanged: bool = False
    """Whether it is known that no module has new weights."""
    unwritten: list[str] = field(default_factory=list)
    """Modules with weights that keep their old weights: they got no tensor, or only a part of their tensors."""
    checksums: list[int] = field(default_factory=list)
    """Checksum of each tensor as this worker read it. Empty without verification."""

    @property
    def ok(self) -> bool:
        """Whether no step has failed."""
        return self.error is None

    def fail(self, error: BaseException) -> None:
        """Record an exception. Only the first one is kept."""
        if self.error is None:
            self.error = error_text(error)
            self.trace = "".join(traceback.format_exception(error))[-MAX_ERROR_CHARACTERS:]

    def report(self, update_id: str) -> Report:
        """The report for the trainer. Each worker verifies all tensors, as on SGLang's CPU path."""
        return Report(
            update_id,
            ok=self.ok,
            error=self.error,
            trace=self.trace,
            num_tensors=self.num_tensors,
            unwritten=self.unwritten[:MAX_UNWRITTEN_NAMES],
            num_unwritten=len(self.unwritten),
            unread=self.read.unread()[:MAX_UNREAD_NAMES],
        )


# -- Weight engine ----------------------------------------------------------------------------------
# The weight transfer engine of vLLM's workers: it reads an update through this library's transports.
#
# The engine never raises. An exception would become an error of the HTTP call, but it would also leave modules without
# memory, so that the next token ends the server, and with several workers it would mix up their later replies.
# Therefore every outcome goes to the trainer as a report of each worker.

logger = init_logger("vllm.verl_server")


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The engine has no settings."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One update: the message that the weight loader gets in SGLang."""

    message: Json = field(default_factory=dict)


class WeightEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads the weights of one worker. A session has one update."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._session = WeightSession()
        self._receiver: Receiver | None = None
        self._load: WeightLoad = choose_weight_load(self.model, self.model_config)
        self.rehearsal: Rehearsal | None = None
        """Which tensors are loaded together. None: it is not known, and an incomplete module fails in `finish`."""
        try:
            served = {name: getattr(self.model_config, name) for name in ("revision", "trust_remote_code")}
            tensors = read_manifest({**served, "model_path": self.model_config.model}).tensors
            self.rehearsal = Rehearsal(self.model, tensors)
        except Exception:
            logger.exception("it is not known which tensors this model loads together")

    def parse_init_info(self, init_dict: Json) -> InitInfo:
        return InitInfo()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing has to be prepared."""

    def start_weight_update(self) -> None:
        """Prepare the model. Generation must be paused."""
        self._close_receiver()
        self._session = WeightSession()
        with self._step("start"):
            self._load.start()

    def update_weights(self, update_info: Json) -> None:
        """Load the tensors of the update."""
        with self._step("load"):
            message = dict(update_info)["message"]
            if self._receiver is not None:
                raise RuntimeError("a session takes one update")
            if message["transport"] not in WHOLE_MODEL_TRANSPORTS:
                raise ValueError(
                    f"vLLM servers take the transports {WHOLE_MODEL_TRANSPORTS}, got {message['transport']}"
                )
            self._receiver = receiver_class(message["transport"])(message, get_tensor_model_parallel_rank())
            require_owner(message)
            if self._session.ok:
                self.receive_weights(UpdateInfo(message))
                note_loaded(message)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the tensors of the receiver. Raises what the model's loader raises."""
        assert self._receiver is not None
        tensors = list(self._receiver.tensors())
        names = [name for name, _ in tensors]
        if self.rehearsal is not None:
            self.rehearsal.require_whole_modules(names)
        algorithm = update_info.message.get("checksum", XXH3) if update_info.message["verify"] else None
        checksums: dict[str, int] = {}
        watched = self._session.read = ReadTensors()

        def read(ordered: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
            """Small tensors are copied, because some models change them in place while they load them."""
            for name, tensor in ordered:
                if algorithm is not None:
                    checksums[name] = compute_checksum(tensor, algorithm)
                self._session.num_tensors += 1
                own = tensor.clone() if tensor.nbytes <= MAX_COPIED_BYTES else tensor
                yield name, own if algorithm is None else watched.watch(name, own)

        self._load.load(tensors, read)
        self._session.checksums = [checksums[name] for name in names] if checksums else []

    def finish_weight_update(self) -> None:
        """Make the model usable again, and send the report."""
        with self._step("finish"):
            untouched, incomplete, self._session.is_unchanged = self._load.finish(is_loaded=self._session.ok)
            self._session.unwritten = [*untouched, *incomplete]
            if incomplete:
                raise PartialModuleError(f"only a part of the tensors came for {incomplete[:5]}")
        self._send_report()

    def _send_report(self) -> None:
        receiver, session = self._receiver, self._session
        if receiver is None:
            logger.error("a session had no update that could be read: %s", session)
            return
        try:
            checksums = session.checksums if session.ok else []
            receiver.send_report(session.report(receiver.message["update_id"]), checksums)
        except Exception:  # the trainer misses the report and refers to the log
            logger.exception("the report of an update could not be sent: %s", session)
        self._close_receiver()

    def _close_receiver(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            with contextlib.suppress(OSError, BufferError):  # a tensor of the model's loader still uses the memory
                receiver.close()

    def outcome(self) -> Json:
        """The error of the last update, whether it has loaded tensors, and whether it has written all weights."""
        error, has_loaded = self._session.error, self._session.num_tensors > 0 and not self._session.is_unchanged
        return {
            "error": error,
            "has_loaded": has_loaded,
            "is_whole": error is None and has_loaded and not self._session.unwritten,
        }

    def shutdown(self) -> None:
        """Nothing is kept between sessions."""

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """Record an exception of a step instead of raising it, see the docstring of the module."""
        try:
            with torch.no_grad():
                yield
        except Exception as error:
            logger.exception("the step %r of a weight update failed", name)
            self._session.fail(error)


def choose_weight_load(model: Any, model_config: Any) -> WeightLoad:
    """The fast load on a CPU that knows all modules of the model, otherwise vLLM's own reload. The choice is logged."""
    if not current_platform.is_cpu():
        logger.info("weight updates use vLLM's layerwise reload")
        return LayerwiseLoad(model, model_config)
    from verl_server.cpu.vllm_reload import FastLoad, UnknownModuleError

    try:
        load = FastLoad(model)
    except UnknownModuleError as error:
        logger.info("weight updates use vLLM's layerwise reload, because the fast load does not know %s", error)
    except Exception:
        logger.exception("weight updates use vLLM's layerwise reload, because the fast load could not be prepared")
    else:
        logger.info("weight updates use the fast load")
        return load
    return LayerwiseLoad(model, model_config)


# -- Worker extension -------------------------------------------------------------------------------

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TRIED_LORA_ID = 2**31 - 1
"""vLLM's id of an adapter that is loaded as a trial. Ids of other adapters count from 1."""

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
    from verl_server.vllm_plugin.reload import raw_parameters

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
    from verl_server.cpu.memory import drop

    if WEIGHTS in tags - released:
        for module in worker.model_runner.model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = None  # holds a packed copy of the weight
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None  # may hold packed copies of the experts
    drop(_regions(worker, tags - released))
    worker.verl_server_released = released | tags
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _resume(worker: Any, tags: set[str]) -> None:
    released = _released(worker)
    if not _is_cpu(tags):
        worker.wake_up(sorted(tags))  # can be called again when memory was missing
    else:
        from verl_server.cpu.memory import allocate_again

        allocate_again(_regions(worker, tags & released))
    worker.verl_server_released = released - tags


def _regions(worker: Any, tags: set[str]) -> list[Any]:
    """The memory of a worker on a CPU."""
    from verl_server.cpu.memory import storage_regions

    weights = worker.model_runner.model.parameters() if WEIGHTS in tags else ()
    return storage_regions([*weights, *(worker.model_runner.kv_caches if KV_CACHE in tags else ())])


def _is_cpu(tags: set[str]) -> bool:
    """Whether the worker computes on a CPU. Raises ValueError for unknown tags."""
    if unknown := tags - {WEIGHTS, KV_CACHE}:
        raise ValueError(f"unknown tags {sorted(unknown)}")
    return bool(current_platform.is_cpu())


def _resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * mmap.PAGESIZE
