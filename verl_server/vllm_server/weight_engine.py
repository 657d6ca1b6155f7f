"""The weight transfer engine of vLLM's workers: it reads an update through this library's transports.

The engine never raises. An exception would become an error of the HTTP call, but it would also leave modules without
memory, so that the next token ends the server, and with several workers it would mix up their later replies. Therefore
every outcome goes to the trainer as a report of each worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from verl_server.types import Json
from verl_server.vllm_server.loading.fast_load import FastLoad
from verl_server.vllm_server.loading.layerwise_load import LayerwiseLoad
from verl_server.vllm_server.loading.module_kinds import UnknownModuleError
from verl_server.vllm_server.loading.reloaded_modules import PartialModuleError, Rehearsal
from verl_server.vllm_server.loading.weight_load import NamedTensors, WeightLoad
from verl_server.vllm_server.weight_session import WeightSession
from verl_server.weights.checksum import XXH3, compute_checksum
from verl_server.weights.coverage import ReadTensors
from verl_server.weights.loader import MAX_COPIED_BYTES
from verl_server.weights.owner import note_loaded, require_owner
from verl_server.weights.read_manifest import read_manifest
from verl_server.weights.transports import receiver_class
from verl_server.weights.transports.base import Receiver

logger = init_logger("vllm.verl_server")

SUPPORTED_TRANSPORTS = ("shared_memory", "disk")
"""Transports whose tensors are all available at once: vLLM reads tensors of a module when the last of them arrives."""


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
            if message["transport"] not in SUPPORTED_TRANSPORTS:
                raise ValueError(f"vLLM servers take the transports {SUPPORTED_TRANSPORTS}, got {message['transport']}")
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
    """The fast load if it knows all modules of the model, otherwise vLLM's own reload. The choice is logged."""
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
