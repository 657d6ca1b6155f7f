"""The trainer's message to a server's weight loaders, as it travels in SGLang's `/update_weights_from_tensor`."""

from __future__ import annotations

import base64
import json
import pickle
import pickletools
from typing import TYPE_CHECKING

from verl_server.types import Json

if TYPE_CHECKING:
    import torch


def message_as_named_tensors(message: Json) -> list[tuple[str, torch.Tensor]]:
    """The loader's message in the form in which SGLang passes tensors: an empty tensor whose name is the JSON."""
    import torch

    return [(json.dumps(message), torch.empty(0, dtype=torch.uint8))]


def serialize_message(message: Json) -> str:
    """The loader's message for SGLang's endpoint `/update_weights_from_tensor`, which expects base64 of a pickle.

    It is a plain pickle without shared memory, so it can be sent again, and SGLang's patches of torch's reductions do
    not matter.
    """
    return base64.b64encode(pickle.dumps(message_as_named_tensors(message))).decode()


def parse_message(serialized: str) -> Json:
    """The message in the text of `serialize_message`. Nothing is unpickled: the JSON is the pickle's first string.

    Raises ValueError, also for other pickles.
    """
    strings = (
        str(argument)
        for opcode, argument, _ in pickletools.genops(base64.b64decode(serialized, validate=True))
        if opcode.name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
    )
    message = json.loads(next(strings, ""))
    if not isinstance(message, dict):
        raise ValueError("the message is no JSON object")  # noqa: TRY004 - as for every other text
    return message
