"""Runs inside each SGLang scheduler: take an update's tensors from its transport, load them, report.

SGLang calls it by its `--custom-weight-loader` hook with what `payload` made. An exception here would end
the server, so every outcome goes to the trainer as a report of this TP rank: the HTTP reply speaks for
rank 0 only.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
import pickle
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from verl_server.weights.checksum import checksum_of
from verl_server.weights.coverage import Coverage
from verl_server.weights.reports import Report
from verl_server.weights.transports import end_of
from verl_server.weights.transports.base import Receiver

logger = logging.getLogger(__name__)

Json = dict[str, Any]
#: How much of an error, and how many names, fit into a report.
WORDS, NAMED = 1500, 5


def named_tensors_of(wire: Json) -> list[tuple[str, torch.Tensor]]:
    """`wire` in the form in which SGLang takes tensors: one name, and one empty tensor."""
    return [(json.dumps(wire), torch.empty(0, dtype=torch.uint8))]


def payload(wire: Json) -> str:
    """The same for `/update_weights_from_tensor`, which wants it pickled, in base64.

    Plain pickle, no shared memory: it can be sent again, and no patch of torch's reductions matters.
    """
    return base64.b64encode(pickle.dumps(named_tensors_of(wire))).decode()


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """SGLang's custom weight loader: `fn(model, named_tensors)`. Never raises."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    try:
        wire = json.loads(named_tensors[0][0])
        receiver = end_of(wire["transport"], "Receiver")(wire, get_tensor_model_parallel_rank())
        receiver.report(*load_from(receiver, model, wire["update_id"], wire["verify"]))
    except Exception:  # raising would end the server; the trainer misses the report and looks into the log
        logger.exception("the staged weights could not be reached")


def load_from(receiver: Receiver, model: Any, update_id: str, verify: bool) -> tuple[Report, list[int]]:
    """Load what comes; with `verify` also the checksum of each tensor and what was not written."""
    sums: list[int] = []
    unwritten: list[str] = []
    count = 0

    def taken() -> Iterator[tuple[str, torch.Tensor]]:
        """The checksum of each tensor is taken when its bytes are about to be needed anyway."""
        nonlocal count
        for name, tensor in receiver.tensors():
            if verify:
                sums.append(checksum_of(tensor))
            count += 1
            yield name, tensor
            del tensor

    try:
        try:
            coverage = Coverage(model) if verify else None
            try:
                model.load_weights(taken())
            finally:
                if coverage is not None:
                    unwritten = coverage.unwritten()  # takes the marks away: none may stay when the load fails
            _require_own_memory(model, receiver)
        finally:
            receiver.close()
    except Exception as error:  # noqa: BLE001 - it goes into the report
        words = f"{type(error).__name__}: {error}"[:WORDS]
        return Report(update_id, ok=False, error=words, trace=traceback.format_exc()[-WORDS:]), sums
    return Report(update_id, True, tensors=count, unwritten=unwritten[:NAMED], unwritten_count=len(unwritten)), sums


def _require_own_memory(model: Any, receiver: Receiver) -> None:
    """A model may take a tensor instead of copying it."""
    for name, parameter in itertools.chain(model.named_parameters(), model.named_buffers()):
        if receiver.holds(parameter):
            raise RuntimeError(f"the model keeps {name} in the staging memory instead of copying it")
