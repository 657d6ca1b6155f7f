"""The two ends that every staged transport has, and the messages between them.

The order of calls in one update:

    1. `Sender.prepare`. Then the servers are paused and open a session. TP ranks of new servers call
       `Receiver.open_only`: what they lack is found before their weights change.
    2. Every server's loader gets the message of `Sender.loader_message` by HTTP and creates a `Receiver`.
       `Sender.deliver` runs at the same time.
    3. `Sender.reports`, when the servers have answered.
    4. `Sender.finish`.

A transport with `Sender.stages` brings the tensors to the servers' machines before that: `Receiver.open_only` starts a
thread in each TP rank, and `Sender.deliver` returns when all of them have reported. The servers serve meanwhile.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import json
import os
import pickle
import pickletools
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from verl_server.config import TRANSPORTS
from verl_server.errors import BadInputError, UnsupportedError
from verl_server.types import Json, ServerInfo
from verl_server.weights.arena import MAX_TP_RANKS, XXH3, Arena, Layout, ReceivedReport, Report


@dataclass(frozen=True)
class UpdateAttempt:
    """One attempt at one update."""

    id: str
    """A random id. The second attempt at an update has an id of its own."""
    names: Sequence[str]
    """Names of the tensors that the update contains, in the order of the layout."""
    verify: bool
    """Whether checksums and unwritten parameters are checked."""
    members: Sequence[ServerInfo]
    """The servers that the update is sent to."""

    @cached_property
    def first_receivers(self) -> Sequence[int]:
        """The number of each member's TP rank 0 among the TP ranks of all members, and the number of all TP ranks."""
        return list(itertools.accumulate((member.tp_size for member in self.members), initial=0))

    @property
    def num_receivers(self) -> int:
        """Number of TP ranks of all members."""
        return self.first_receivers[-1]


@dataclass(frozen=True)
class SenderSettings:
    """Settings of a sender."""

    arena: Arena
    layout: Layout
    timeout_s: float
    """Deadline of one step of an update in seconds."""
    arena_locations: Sequence[str] = ()
    """Path of the arena on each node of one server that spans several nodes. The first is that of `arena`."""
    ranks_per_node: int = 0
    """Number of TP ranks on each node of such a server. 0 for servers that do not span nodes."""
    node_rank: int = 0
    """Number of this trainer rank's node."""
    folder: str | None = None
    """Folder that trainer and servers share."""
    host: str = "127.0.0.1"
    """The trainer's address as the servers reach it."""
    checksum: str = XXH3
    """Name of the algorithm with which trainer and servers compute checksums."""


class ReceivingRank(NamedTuple):
    """One TP rank of one server that an update is sent to."""

    receiver: int
    """Number among the TP ranks of all servers."""
    tp_rank: int
    """TP rank in its server."""
    label: str
    """Description for error messages."""
    server: str
    """Name of its server."""


class Sender(ABC):
    """The end of a transport on trainer rank 0."""

    name: str
    stages: ClassVar[bool] = False
    """Whether the tensors are sent to the servers' machines while the servers serve, instead of while they load."""

    def __init__(self, settings: SenderSettings) -> None:
        self.settings = settings
        self.arena, self.layout = settings.arena, settings.layout
        self.opened_members: Sequence[ServerInfo] = ()
        """The servers whose TP ranks have opened what the transport needs, see `Receiver.open_only`."""
        self.sent_bytes = 0
        """Number of tensor bytes that the last update wrote to a network or a file."""

    def prepare(self, attempt: UpdateAttempt) -> None:
        """Do what can be done before generation is paused. Raises VerlServerError; then nothing has changed."""
        return

    @abstractmethod
    def loader_message(self, attempt: UpdateAttempt, member_index: int) -> Json:
        """The message for the loader of one member: JSON of a few kilobytes, whatever the size of the model."""

    def deliver(self, attempt: UpdateAttempt, checksums: Sequence[int], is_wanted: Callable[[], bool]) -> None:
        """Send the tensors while the servers load, or before, see `stages`. Stops when `is_wanted()` becomes false.

        `checksums`: those of the tensors, if the update is verified. Raises VerlServerError.
        """
        return

    def abandon(self, error: BaseException) -> None:
        """Let no receiver wait any longer: `error` has ended the attempt. Also called when `deliver` was not."""
        return

    def reports(self, attempt: UpdateAttempt) -> dict[str, ReceivedReport | None]:
        """The report of each TP rank by its label, when the servers have answered. None for a missing report."""
        return {rank.label: self.read_report(attempt, rank.receiver) for rank in self.receiving_ranks(attempt)}

    def receiving_ranks(self, attempt: UpdateAttempt) -> Iterator[ReceivingRank]:
        """The TP ranks of all members whose reports this sender reads."""
        return receiving_ranks(attempt.members)

    @abstractmethod
    def read_report(self, attempt: UpdateAttempt, receiver: int) -> ReceivedReport | None:
        """The report of one TP rank on this attempt, or None."""

    def finish(self, attempt: UpdateAttempt, succeeded: bool) -> None:
        """Release what `prepare` made. Called at the end of every attempt."""
        return

    def close(self) -> None:
        """Release everything. Safe to call twice."""
        return


class Receiver(ABC):
    """The end of a transport in one TP rank of a server, created for one update.

    Resources that are worth keeping between updates are kept by the module.
    """

    def __init__(self, message: Json, tp_rank: int) -> None:
        self.message, self.tp_rank = message, tp_rank

    @classmethod
    def open_only(cls, message: Json, tp_rank: int) -> None:
        """Open what an update needs, load nothing, and send a report."""
        cls(message, tp_rank).send_report(Report(message["update_id"], ok=True), [])

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The update's named tensors in the order of the layout, valid until `close`. Raises if they do not arrive."""

    def tensors_to_copy(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`tensors` for a caller that copies them to an accelerator and does not change them. See `weights/device.py`.

        Where possible, they are in pinned memory.
        """
        return self.tensors()

    @property
    def num_sharing(self) -> int:
        """Number of consecutive TP ranks of the server, this one included, that read the same memory."""
        return 1

    @abstractmethod
    def send_report(self, report: Report, checksums: list[int]) -> None:
        """Send the trainer this TP rank's report, with the checksum of each tensor."""

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the model is in the memory that the next update overwrites."""
        return False

    def close(self) -> None:
        """Release what this update needed. Called after the load."""
        return


def receiving_ranks(members: Sequence[ServerInfo]) -> Iterator[ReceivingRank]:
    """The TP ranks of all members, numbered in the order of `members`."""
    ranks = [(member, tp_rank) for member in members for tp_rank in range(member.tp_size)]
    for receiver, (member, tp_rank) in enumerate(ranks):
        server = "the server" if len(members) == 1 else member.name
        yield ReceivingRank(receiver, tp_rank, f"TP rank {tp_rank} of {server}", member.name)


def require_few_receivers(members: Sequence[ServerInfo]) -> None:
    """Raise UnsupportedError if the servers have more TP ranks than one trainer has memory for reports."""
    tp_ranks = sum(member.tp_size for member in members)
    if tp_ranks > MAX_TP_RANKS:
        raise UnsupportedError(
            f"the servers have {tp_ranks} TP ranks, but one trainer serves at most {MAX_TP_RANKS}: use fewer servers"
        )


# -- Message ----------------------------------------------------------------------------------------
# The trainer's message to a server's weight loaders, as it travels in SGLang's `/update_weights_from_tensor`.


def message_as_named_tensors(message: Json) -> list[tuple[str, torch.Tensor]]:
    """The loader's message in the form in which SGLang passes tensors: an empty tensor whose name is the JSON."""
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


# -- Owner ------------------------------------------------------------------------------------------
# Whose weights the model of a server's process holds. So two trainers that update one server are noticed.
#
# The trainer adds `owner_fields` to the message of each update, and every TP rank calls `require_owner` before it
# changes a weight. The check is made in the server, so it holds for updates that come at the same time.

_NONCE = secrets.token_hex(4)
_owner: list[tuple[str, int]] = []
"""The trainer that has updated this process's model last, and the version of the weights. Empty before."""


def owner_fields(weight_version: int, base: int | None) -> dict[str, Any]:
    """What the message of an update says about this process, which is the trainer.

    `base`: weight version that the server had when this trainer connected to it. Its weights may be replaced, whoever
    has pushed them. None: the server holds weights of this trainer, or those of its checkpoint.
    """
    trainer = f"process {os.getpid()} on {socket.gethostname()} ({_NONCE})"
    return {"trainer": trainer, "weight_version": weight_version, "base": base}


def require_owner(message: Mapping[str, Any]) -> None:
    """Make the trainer that has sent `message` the owner of the weights, before they change.

    Raises RuntimeError if another trainer has updated the model since the trainer connected.
    """
    if "trainer" not in message:
        return
    trainer, version, base = message["trainer"], message["weight_version"], message["base"]
    owner, owned_version = _owner[0] if _owner else (trainer, 0)
    if owner != trainer and (base is None or owned_version > base):
        raise RuntimeError(
            f"two trainers update this server: {owner} has pushed weight version {owned_version}, and now {trainer} "
            f"pushes version {version}. Stop one of them. The next VerlEngine that connects takes over"
        )
    _owner[:] = [(trainer, owned_version)]


def note_loaded(message: Mapping[str, Any]) -> None:
    """The update of `message` is loaded. After one that fails, the trainer owns torn weights of the version before."""
    if "trainer" in message:
        _owner[:] = [(message["trainer"], message["weight_version"])]


# -- transports by name ------------------------------------------------------------


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
    return importlib.import_module(f"{__package__}.{transport}")
