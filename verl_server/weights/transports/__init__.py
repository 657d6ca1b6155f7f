"""Weight transports. Each module is one way from the trainer to the servers, and contains both of its ends.

`Sender` runs on trainer rank 0 and sends what is staged in the arena. A transport without a `Sender` takes tensors as
they come, through a pair of buckets. `Receiver` runs in every TP rank of every server (see `base`).
A new module in this folder with a `Receiver` is a new transport. Its name is the value of
`WeightsConfig(transport=...)` and is listed in `verl_server.config.TRANSPORTS`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from verl_server.config import TRANSPORTS
from verl_server.errors import BadInputError

if TYPE_CHECKING:
    from verl_server.weights.transports.base import Receiver, Sender


def is_streamed(transport: str) -> bool:
    """Whether the transport takes tensors as they come, instead of from the arena."""
    return not hasattr(_module_of(transport), "Sender")


def sender_class(transport: str) -> type[Sender]:
    """The `Sender` of a transport. Raises BadInputError for an unknown name."""
    sender: type[Sender] = _module_of(transport).Sender
    return sender


def receiver_class(transport: str) -> type[Receiver]:
    """The `Receiver` of a transport. Raises BadInputError for an unknown name."""
    receiver: type[Receiver] = _module_of(transport).Receiver
    return receiver


def _module_of(transport: str) -> Any:
    if transport not in TRANSPORTS:
        raise BadInputError(f"weight transport {transport!r} does not exist; the transports are {list(TRANSPORTS)}")
    return importlib.import_module(f"{__name__}.{transport}")
