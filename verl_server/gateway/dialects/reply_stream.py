"""`ReplyStream`: the server-sent events of one reply in one dialect. Pure, no I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from verl_server.gateway.conversation import AssistantTurn, TurnDelta, TurnRequest
from verl_server.gateway.errors import GatewayError
from verl_server.types import Json


@dataclass(frozen=True)
class Event:
    """A server-sent event."""

    data: Json | str
    name: str | None = None
    """Value of the field `event`. None leaves the field out."""

    def encode(self) -> bytes:
        """The bytes of the event."""
        data = self.data.encode() if isinstance(self.data, str) else orjson.dumps(self.data)
        return (b"" if self.name is None else f"event: {self.name}\n".encode()) + b"data: " + data + b"\n\n"


class ReplyStream(ABC):
    """The events of one reply. Call `begin`, `add` for each delta, and `end`; or `fail` at any time after `begin`."""

    def __init__(self, request: TurnRequest, reply_id: str) -> None:
        """`reply_id`: id of the reply, without the prefix of the dialect."""
        self.request, self.reply_id = request, reply_id

    @abstractmethod
    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        """The events before the first delta."""

    @abstractmethod
    def add(self, delta: TurnDelta) -> Iterator[Event]:
        """The events of a delta."""

    @abstractmethod
    def end(self, turn: AssistantTurn) -> Iterator[Event]:
        """The events after the last delta: the tool calls, and the end of the reply."""

    def keep_alive(self) -> bytes:
        """What is sent while there are no deltas, so that no proxy closes the connection."""
        return b": keep-alive\n\n"

    @abstractmethod
    def fail(self, error: GatewayError) -> Event:
        """The event that ends the stream with an error."""
