"""`Dialect`: converts the requests of one API to `TurnRequest`, and turns and errors to its replies. Pure, no I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from verl_server.gateway.conversation import AssistantTurn, TurnRequest
from verl_server.gateway.errors import ErrorKind, GatewayError
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


class Dialect(ABC):
    """One API through which agents talk to the gateway."""

    path: str
    """Path of the endpoint, for example `/v1/chat/completions`."""
    count_path: str | None = None
    """Path of the endpoint that counts the tokens of a prompt. None without such an endpoint."""

    @abstractmethod
    def parse(self, body: Json) -> TurnRequest:
        """The request of a body. Raises GatewayError for a body that the dialect does not allow."""

    def parse_count(self, body: Json) -> TurnRequest:
        """The request of a body whose prompt is counted. Raises GatewayError as `parse` does."""
        return self.parse(body)

    def count_reply(self, num_tokens: int) -> Json:
        """The body of the reply with the number of tokens of a prompt."""
        return {"input_tokens": num_tokens}

    @abstractmethod
    def reply(self, request: TurnRequest, turn: AssistantTurn) -> Json:
        """The body of the reply with a turn."""

    @abstractmethod
    def begin(self, request: TurnRequest, reply_id: str, num_prompt_tokens: int) -> list[Event]:
        """The events at the start of a stream, before the turn is known."""

    @abstractmethod
    def keep_alive(self) -> bytes:
        """What is sent while the turn is being generated, so that no proxy closes the connection."""

    @abstractmethod
    def events(self, request: TurnRequest, turn: AssistantTurn, reply_id: str) -> Iterator[Event]:
        """The events of a turn, up to the end of the stream."""

    @abstractmethod
    def error(self, error: GatewayError) -> tuple[int, Json]:
        """HTTP status and body of an error."""

    def error_event(self, error: GatewayError) -> Event:
        """The event that ends a stream with an error."""
        return Event(self.error(error)[1], "error")

    def failure(self, request: TurnRequest, error: GatewayError, reply_id: str) -> Event:
        """The event that ends the stream of a request with an error, after the events of `begin`."""
        del request, reply_id
        return self.error_event(error)


OPENAI_ERROR_TYPES = {
    ErrorKind.INVALID_REQUEST: "invalid_request_error",
    ErrorKind.CONTEXT_OVERFLOW: "invalid_request_error",
    ErrorKind.AUTHENTICATION: "authentication_error",
    ErrorKind.PERMISSION: "permission_error",
    ErrorKind.NOT_FOUND: "not_found_error",
    ErrorKind.TOO_LARGE: "invalid_request_error",
    ErrorKind.LIMIT_REACHED: "rate_limit_error",
    ErrorKind.OVERLOADED: "server_error",
    ErrorKind.INTERNAL: "server_error",
}


def openai_error(error: GatewayError) -> tuple[int, Json]:
    """HTTP status and body of an error as OpenAI writes it."""
    message, code = error.message, None
    if error.kind is ErrorKind.CONTEXT_OVERFLOW:
        code = "context_length_exceeded"
        message = f"This model's maximum context length is {error.max_tokens} tokens. However, {error.message}."
    fields = {"message": message, "type": OPENAI_ERROR_TYPES[error.kind], "param": None, "code": code}
    return error.kind.status, {"error": fields}
