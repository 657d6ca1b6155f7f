"""`Dialect`: converts the requests of one API to `TurnRequest`, and turns and errors to its replies. Pure, no I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

from verl_server.gateway.conversation import AssistantTurn, TurnRequest
from verl_server.gateway.dialects.reply_stream import ReplyStream
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.trajectory.rendering.messages import Message
from verl_server.types import Json


class IssuedTurns(Protocol):
    """The turns of a session, by the ids that their replies have."""

    def find_turn(self, issued_id: str) -> AssistantTurn | None:
        """The turn with a call or a reply of an id, without the prefix of the dialect. None without such a turn."""

    def conversation_to(self, turn: AssistantTurn) -> list[Message]:
        """The messages from the beginning of a conversation to a turn."""


class Dialect(ABC):
    """One API through which agents talk to the gateway."""

    path: str
    """Path of the endpoint, for example `/v1/chat/completions`."""
    count_path: str | None = None
    """Path of the endpoint that counts the tokens of a prompt. None without such an endpoint."""

    def resolve(self, body: Json, issued: IssuedTurns) -> Json:
        """A body in which earlier turns stand in place of their ids. Raises GatewayError for an unknown id."""
        return body

    @abstractmethod
    def parse(self, body: Json) -> TurnRequest:
        """The request of a body. Raises GatewayError for a body that the dialect does not allow."""

    def parse_count(self, body: Json) -> TurnRequest:
        """The request of a body whose prompt is counted. Raises GatewayError as `parse` does."""
        return self.parse(body)

    def count_reply(self, num_tokens: int) -> Json:
        """The body of the reply with the number of tokens of a prompt."""
        return {"input_tokens": num_tokens}

    def identity(self, body: Json) -> Mapping[str, bytes]:
        """Bytes for the fields that a client changes when it sends a request again. The bytes stay equal."""
        return {}

    @abstractmethod
    def reply(self, request: TurnRequest, turn: AssistantTurn) -> Json:
        """The body of the reply with a turn."""

    @abstractmethod
    def open_stream(self, request: TurnRequest, reply_id: str) -> ReplyStream:
        """The stream of a reply. `reply_id`: id of the reply, without the prefix of the dialect."""

    @abstractmethod
    def error(self, error: GatewayError) -> tuple[int, Json]:
        """HTTP status and body of an error."""


OPENAI_ERROR_TYPES = {
    ErrorKind.INVALID_REQUEST: "invalid_request_error",
    ErrorKind.CONTEXT_OVERFLOW: "invalid_request_error",
    ErrorKind.AUTHENTICATION: "authentication_error",
    ErrorKind.PERMISSION: "permission_error",
    ErrorKind.NOT_FOUND: "not_found_error",
    ErrorKind.TOO_LARGE: "invalid_request_error",
    ErrorKind.UNSUPPORTED_ENCODING: "invalid_request_error",
    ErrorKind.LIMIT_REACHED: "rate_limit_error",
    ErrorKind.TOO_MANY_REQUESTS: "rate_limit_error",
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
