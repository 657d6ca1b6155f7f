"""The two ends that every transport has, and what goes between them.

One update: `Sender.prepare` -> (servers are paused, sessions open) -> every server's loader gets `Sender.wire`
by HTTP and makes a `Receiver`, while `Sender.deliver` runs -> `Sender.reports` -> `Sender.settle`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_server.types import Member
from verl_server.weights.arena import Arena
from verl_server.weights.layout import Layout
from verl_server.weights.reports import Received, Report

if TYPE_CHECKING:
    import torch

Json = dict[str, Any]


@dataclass(frozen=True)
class Update:
    """One attempt at one update."""

    id: str
    names: Sequence[str]
    """The tensors that it brings, in the order of the layout."""
    verify: bool
    members: Sequence[Member]
    """The servers that it goes to."""


@dataclass(frozen=True)
class Settings:
    """What senders are made with."""

    arena: Arena
    layout: Layout
    timeout_s: float
    paths: Sequence[str] = ()
    """The arena of each node of one server that spans several; the first is `arena`."""
    ranks_per_node: int = 0
    """TP ranks on each node of such a server, 0 without nodes."""
    node_rank: int = 0
    folder: str | None = None
    """A folder that trainer and servers share."""
    host: str = "127.0.0.1"
    """The trainer's address as the servers reach it."""


class Sender(ABC):
    """Trainer rank 0's end."""

    name: str

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.arena, self.layout = settings.arena, settings.layout

    def prepare(self, update: Update) -> None:
        """What can be done before generation is paused. Raises VerlServerError: then nothing has happened."""
        return

    @abstractmethod
    def wire(self, update: Update, server: int) -> Json:
        """What the loader of that server is told; JSON of a few kilobytes."""

    def deliver(self, update: Update, loading: Callable[[], bool]) -> None:
        """While the servers load; give up when `loading` turns false. Raises VerlServerError."""
        return

    def reports(self, update: Update) -> dict[str, Received | None]:
        """When the servers have answered: what each TP rank says, None where it says nothing. Keys are for people."""
        return {who: self.received(update, receiver) for receiver, _, who in self.receivers(update)}

    def receivers(self, update: Update) -> Iterator[tuple[int, int, str]]:
        """All TP ranks of all servers: their number, their TP rank, and who it is for people."""
        return receivers(update.members)

    def first_receiver(self, update: Update, server: int) -> int:
        """The number of a server's TP rank 0."""
        return sum(member.tp_size for member in update.members[:server])

    @abstractmethod
    def received(self, update: Update, receiver: int) -> Received | None:
        """What that TP rank says of this update, or None."""

    def settle(self, update: Update, whole: bool) -> None:
        """The update is over."""
        return

    @property
    def sent_bytes(self) -> int:
        """Bytes of tensors that the last update wrote to a network or a file."""
        return 0

    def close(self) -> None:
        """Give everything back. Safe to call twice."""
        return


class Receiver(ABC):
    """One server TP rank's end, made for one update. What is worth keeping between updates is kept by the module."""

    def __init__(self, wire: Json, rank: int) -> None:
        self.wire, self.rank = wire, rank

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The update's tensors in the order of the layout, valid until `close`. Raises when they do not come."""

    @abstractmethod
    def report(self, report: Report, sums: list[int]) -> None:
        """Tell the sender."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of the model lives where the next update comes, and would change under its feet."""
        return False

    def close(self) -> None:
        """After the load."""
        return


def in_layout_order(layout: Layout, names: Sequence[str]) -> list[str]:
    """`names` as their tensors stand in the arena."""
    return sorted(names, key=lambda name: layout.slots[name].offset)


def receivers(members: Sequence[Member]) -> Iterator[tuple[int, int, str]]:
    """The TP ranks of servers: number, TP rank, and who it is for people."""
    ranks = [(member, rank) for member in members for rank in range(member.tp_size)]
    for number, (member, rank) in enumerate(ranks):
        yield number, rank, f"TP rank {rank} of {'the server' if len(members) == 1 else member.name}"
