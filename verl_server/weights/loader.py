"""The weight loader that runs inside each SGLang scheduler: receive an update's tensors, load them, send a report.

SGLang calls `load` by its `--custom-weight-loader` hook with the JSON message that `message.serialize_message` wrapped.
An exception here would end the server. Therefore every outcome goes to the trainer as a report of this TP rank;
SGLang's HTTP reply speaks for TP rank 0 only.
"""

from __future__ import annotations

import itertools
import json
import logging
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from verl_server.weights.arena import Report
from verl_server.weights.device import copies_on, wait_for_device
from verl_server.weights.transports import receiver_class
from verl_server.weights.transports.base import Receiver, note_loaded, require_owner
from verl_server.weights.verification import XXH3, Checksums, Coverage, ReadTensors, verified_share

logger = logging.getLogger(__name__)

MAX_ERROR_CHARACTERS = 1500
"""Maximum number of characters of an error message, and of its traceback, in a report."""
MAX_COPIED_BYTES = 2**20
"""Size of the largest tensors that the model gets as copies. SGLang 0.5.23 changes some tensors in place while it loads
them: it adds 1 to the norms of Gemma, and on TP ranks after the first it sets biases of gpt-oss to 0. Other TP ranks
and the trainer use the same memory."""
MAX_UNWRITTEN_NAMES = 5
"""Maximum number of parameter names in a report."""
MAX_UNREAD_NAMES = 200
"""Maximum number of names in a report of tensors that were not read."""


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """SGLang's custom weight loader, `fn(model, named_tensors)`. Never raises."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    try:
        message = json.loads(named_tensors[0][0])
        transport, tp_rank = receiver_class(message["transport"]), get_tensor_model_parallel_rank()
        if message.get("opens_only"):
            transport.open_only(message, tp_rank)
            return
        receiver = transport(message, tp_rank)
        receiver.send_report(*load_weights(receiver, model, message["update_id"], message["verify"]))
    except Exception:  # an exception would end the server; the trainer misses the report and refers to the log
        logger.exception("the weight loader could not receive the update or could not send its report")


def load_weights(receiver: Receiver, model: Any, update_id: str, verify: bool) -> tuple[Report, list[int]]:
    """Load the receiver's tensors into the model. Returns the report and the checksum of each tensor of its share.

    Without `verify` there are no checksums and no checks for unwritten parameters and unread tensors.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    is_copied = device.type != "cpu"
    # A model may change a tensor in place while it loads it. Without copies, each TP rank verifies all tensors, because
    # another TP rank does not see such a change. With copies, TP ranks that read the same memory divide the tensors.
    share = verified_share(receiver.tp_rank, receiver.num_sharing) if is_copied else (0, 1)
    checksums = Checksums(receiver.message.get("checksum", XXH3))
    unwritten: list[str] = []
    read = ReadTensors()
    num_tensors = 0

    def received_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        """The checksum of each tensor is computed just before the model reads the same bytes."""
        nonlocal num_tensors
        tensors = copies_on(device, receiver.tensors_to_copy()) if is_copied else receiver.tensors()
        for name, tensor in tensors:
            if verify and num_tensors % share[1] == share[0]:
                checksums.add(tensor)
            num_tensors += 1
            if tensor.nbytes <= MAX_COPIED_BYTES:
                tensor = tensor.clone()
            yield name, read.watch(name, tensor) if verify else tensor
            del tensor  # the receiver reuses the memory when no reference is left

    try:
        try:
            require_owner(receiver.message)
            wait_for_device(device)  # a pause in place does not wait for the batch that is computed
            coverage = Coverage(model) if verify else None
            try:
                model.load_weights(received_tensors())
            finally:
                if coverage is not None:
                    unwritten = coverage.remove_marks()  # also when the load fails: no mark may stay in the model
            if unwritten:
                # Some models compute tensors of all layers from their parameters at the end of every load (MLA). They
                # have read marks, and compute the tensors again.
                model.load_weights(iter(()))
            wait_for_device(device)
            _require_own_memory(model, receiver)
            checksum_values = checksums.values()
            note_loaded(receiver.message)
        finally:
            receiver.close()
    except Exception as error:  # noqa: BLE001 - the error goes into the report
        message = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]
        trace = traceback.format_exc()[-MAX_ERROR_CHARACTERS:]
        return Report(update_id, ok=False, error=message, trace=trace), []
    report = Report(
        update_id,
        ok=True,
        num_tensors=num_tensors,
        unwritten=unwritten[:MAX_UNWRITTEN_NAMES],
        num_unwritten=len(unwritten),
        unread=read.unread()[:MAX_UNREAD_NAMES],
        share=share,
    )
    return report, checksum_values


def _require_own_memory(model: Any, receiver: Receiver) -> None:
    """Raise RuntimeError if a parameter of the model is a view of the staging memory instead of a copy."""
    for name, parameter in itertools.chain(model.named_parameters(), model.named_buffers()):
        if receiver.contains(parameter):
            raise RuntimeError(f"the model keeps {name} in the staging memory instead of copying it")
