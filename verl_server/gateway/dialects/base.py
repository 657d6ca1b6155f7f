"""`Dialect`: the interface of an API of the gateway; what dialects share: fields, items, tool choice, streams."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import orjson

from verl_server.adapter.json_body import without_half_characters
from verl_server.gateway.conversation import AssistantTurn, TurnDelta, TurnRequest
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.trajectory.rendering.messages import Message
from verl_server.types import Json

LARGEST_TOP_K = 1 << 30
"""SGLang's value for all tokens. Larger values do not fit into its tensors."""
MAX_TOKEN_DIGITS = 9
"""Maximum number of digits of a token id."""
MAX_STOP_SEQUENCES, MAX_STOP_CHARS = 64, 1000
"""Maximum number of stop sequences of a request, and of characters of each: servers look for all of them after each
token.
"""
OUTER_LEVELS = 100
"""Number of levels of objects and lists that the gateway may put around a value of a body in its record."""


def bad_request(message: str) -> GatewayError:
    """The error for a body that the dialect does not allow."""
    return GatewayError(ErrorKind.INVALID_REQUEST, message)


def read_list(body: Mapping[str, Any], name: str, *, is_needed: bool = False) -> list[Any]:
    """A list. Empty if the field is missing or null, unless it is needed."""
    value = body.get(name)
    if value is None and not is_needed:
        return []
    if not isinstance(value, list) or (is_needed and not value):
        raise bad_request(f"{name!r} must be a list{' that is not empty' if is_needed else ''}")
    return value


def read_objects(body: Mapping[str, Any], name: str, *, is_needed: bool = False) -> list[Json]:
    """A list of JSON objects."""
    values = read_list(body, name, is_needed=is_needed)
    if not all(isinstance(value, dict) for value in values):
        raise bad_request(f"{name!r} must be a list of objects")
    return values


def read_text(body: Mapping[str, Any], name: str, *, default: str | None = None) -> str:
    """A string. Raises GatewayError if the field is missing and there is no default."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise bad_request(f"{name!r} must be a string")
    return value


def require_recordable(name: str, value: Any) -> None:
    """Raise GatewayError for a value with so many levels that a record with the value cannot be written."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if not any(isinstance(item, (dict, list)) for item in items):
        return  # one level: the arguments of most tool calls
    for _ in range(OUTER_LEVELS):
        value = [value]
    try:
        orjson.dumps(value)
    except TypeError:
        raise bad_request(f"{name!r} has too many levels of objects and lists") from None


def read_object(body: Mapping[str, Any], name: str) -> Json:
    """A JSON object. Empty if the field is missing or null."""
    value = body.get(name)
    if not isinstance(value, dict | None):
        raise bad_request(f"{name!r} must be an object")
    return value or {}


def read_template_arguments(body: Mapping[str, Any]) -> Json:
    """Variables of the chat template from the field `chat_template_kwargs`, as vLLM and SGLang call it."""
    arguments = read_object(body, "chat_template_kwargs")
    require_recordable("chat_template_kwargs", arguments)
    return arguments


def read_number(body: Mapping[str, Any], name: str, minimum: float, maximum: float) -> float | None:
    """A number, or None if the field is missing or null."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not minimum <= value <= maximum:
        raise bad_request(f"{name!r} must be a number from {minimum:g} to {maximum:g}")
    return value


def read_count(body: Mapping[str, Any], *names: str) -> int | None:
    """A whole number of at least 1: the first of the fields that is given."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise bad_request(f"{name!r} must be a whole number of at least 1")
            return value
    return None


def read_top_k(body: Mapping[str, Any]) -> int | None:
    """SGLang's `top_k` from the field of this name: -1 for all tokens, or at least 1. SGLang has 32 bits for it."""
    if body.get("top_k") in (-1, 0) and not isinstance(body["top_k"], bool):
        return -1
    count = read_count(body, "top_k")
    return None if count is None else min(count, LARGEST_TOP_K)


def read_seed(body: Mapping[str, Any]) -> int | None:
    """SGLang's `sampling_seed` from the field `seed`: a whole number of 64 bits."""
    seed = body.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
        raise bad_request("'seed' must be a whole number of 64 bits")
    return seed


def read_logit_bias(body: Mapping[str, Any]) -> Json | None:
    """SGLang's `logit_bias`: numbers from -100 to 100 by token ids as texts. The engine refuses unknown token ids."""
    biases = read_object(body, "logit_bias")
    for token, bias in biases.items():
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        is_token = token.isdecimal() and token.isascii() and len(token) <= MAX_TOKEN_DIGITS
        if not (is_token and is_number and -100 <= bias <= 100):
            raise bad_request("'logit_bias' must have numbers from -100 to 100 by token ids")
    return biases or None


def find_last(items: Sequence[Json], name: str, value: str) -> Json:
    """The last item with a value of a field. Empty without such an item."""
    return next((item for item in reversed(items) if item.get(name) == value), {})


def join_texts(parts: Any, kind: str, name: str) -> str:
    """The texts of the content parts of a type, joined. `name`: field of the text. Empty for other values."""
    found = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for part in found if part.get("type") == kind and isinstance(text := part.get(name), str))


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """True or false. False if the field is missing or null."""
    value = body.get(name)
    if not (value is None or isinstance(value, bool)):
        raise bad_request(f"{name!r} must be true or false")
    return bool(value)


def read_stop(body: Mapping[str, Any], name: str) -> list[str]:
    """Stop sequences: a string or a list of strings. Raises GatewayError for too many or too long strings."""
    value = body.get(name)
    stop = [value] if isinstance(value, str) else value or []
    if not isinstance(stop, Sequence) or not all(isinstance(item, str) and item for item in stop):
        raise bad_request(f"{name!r} must be a string or a list of strings that are not empty")
    if len(stop) > MAX_STOP_SEQUENCES or any(len(item) > MAX_STOP_CHARS for item in stop):
        raise bad_request(
            f"{name!r} is too large: a request may have {MAX_STOP_SEQUENCES} stop sequences of {MAX_STOP_CHARS} "
            "characters each"
        )
    return list(stop)


def refuse(body: Mapping[str, Any], name: str, allowed: tuple[Any, ...], reason: str) -> None:
    """Raise GatewayError for a value that the gateway cannot honour."""
    if body.get(name) is not None and body[name] not in allowed:
        raise bad_request(f"{name!r} = {str(body[name])[:40]} is not supported: {reason}")


def sampling_params(**values: Any) -> Json:
    """SGLang's sampling parameters without those that are None or empty."""
    return {name: value for name, value in values.items() if value is not None and value != []}


# -- Reply stream -----------------------------------------------------------------------------------
# `ReplyStream`: the server-sent events of one reply in one dialect. Pure, no I/O.


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


# -- Dialect ----------------------------------------------------------------------------------------
# `Dialect`: converts the requests of one API to `TurnRequest`, and turns and errors to its replies. Pure, no I/O.


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


# -- Tool choice ------------------------------------------------------------------------------------
# The field `tool_choice`: which tools a turn may call, or must call.

SUPPORTED = "use auto, none, required or one function"


def force_call(tools: Sequence[Json], name: Any = None) -> tuple[str, ...]:
    """The names of the tools of which the turn must call one: all tools, or the tool `name`.

    Raises GatewayError if there is no such tool.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    if not names:
        raise bad_request("'tool_choice' forces a call, but the request has no tools that the policy can call")
    if name is None:
        return names
    if not isinstance(name, str) or name not in names:
        raise bad_request(f"'tool_choice' names the tool {str(name)[:80]!r}, which is not in 'tools'")
    return (name,)


def parse_openai_choice(body: Json, tools: Sequence[Json]) -> tuple[str, ...] | None:
    """The names of the tools of which the turn must call one. None: no call is forced. Empty: the turn has no call.

    A function is named in the way of chat completions, or in that of responses.
    """
    choice = body.get("tool_choice")
    if choice is None or choice == "auto":
        return None
    if choice == "none":
        return ()
    if choice == "required":
        return force_call(tools)
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        named = function.get("name") if isinstance(function, dict) else choice.get("name")
        return force_call(tools, "" if named is None else named)
    raise bad_request(f"'tool_choice' = {str(choice)[:40]} is not supported: {SUPPORTED}")


# -- Known items ------------------------------------------------------------------------------------
# Parses the bodies of requests. Each message and each tool is parsed once, although agents repeat them.
#
# An agent sends its whole conversation and all of its tools with each request. `KnownItems` finds each of them in a
# body by its digest. An object that an earlier request had is not parsed again, and what a dialect makes of the object
# (`derive`) is not computed again. For an object that is repeated, only its digest is computed.

Result = TypeVar("Result")

FIELDS = ("messages", "input", "tools")
"""Fields whose lists agents repeat."""
MAX_ITEMS = 2048
"""Maximum number of objects of a list that are looked up. A longer list is parsed as a whole."""
MAX_SIZE = 4 << 20
"""Bytes of memory after which the objects that no later request repeats are forgotten."""
MAX_ITEM_SIZE = 1 << 20
"""Maximum bytes of memory of an object that is kept."""
VALUE_BYTES = 64
"""Memory of a value besides its JSON: about that of a small object of Python."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_SPACE = b" \t\n\r"


class KnownItem(dict[str, Any]):
    """An object in a list of a body. Several requests share it: do not change it."""

    __slots__ = ("derived",)

    def __init__(self, fields: Json) -> None:
        super().__init__(fields)
        self.derived = dict[Callable[[Any], Any], Any]()
        """What `derive` has computed, by function."""


def derive(compute: Callable[[Any], Result], item: Any) -> Result:
    """`compute(item)`, once for each `KnownItem`. Requests share the result: do not change it.

    `compute` is a function of a module. A result of None is computed each time.
    """
    if type(item) is not KnownItem:
        return compute(item)
    found: Result | None = item.derived.get(compute)
    if found is None:
        found = item.derived[compute] = compute(item)
    return found


class NoObjectError(Exception):
    """A body is JSON, but no object."""


@dataclass(frozen=True)
class ParsedBody:
    """A JSON object."""

    fields: Json
    parts: Mapping[str, bytes]
    """What identifies the value of each field: its JSON, or the digests of the objects of a list."""


class KnownItems:
    """The messages and tools of the latest bodies. May be used in several threads."""

    def __init__(self) -> None:
        self._latest, self._earlier = dict[bytes, KnownItem](), dict[bytes, KnownItem]()
        """Objects by their digests. Those in use move from `_earlier` to `_latest`, and the others are forgotten."""
        self._size = 0
        """Estimated memory of the objects in `_latest`, in bytes."""

    def parse(self, raw: bytes) -> ParsedBody:
        """Parse a body. Half of a character outside of the basic plane, which agents cut from results, becomes U+FFFD.

        Raises `orjson.JSONDecodeError`, NoObjectError, and GatewayError for a value with too many levels.
        """
        raw = without_half_characters(raw)
        try:
            return self._parse(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, orjson.JSONDecodeError, RecursionError):
            body = orjson.loads(raw)  # its error has the position in the whole body
            if not isinstance(body, dict):
                raise NoObjectError from None
            require_recordable("body", body)
            raise

    def _parse(self, raw: bytes) -> ParsedBody:
        fields, parts, others, new = Json(), dict[str, bytes](), Json(), dict[bytes, tuple[Any, int]]()
        for name, value in _FIELDS.decode(raw).items():
            has_objects = name in FIELDS and _is_list_of_objects(memoryview(value))
            items = _ITEMS.decode(value) if has_objects else ()
            if 0 < len(items) <= MAX_ITEMS:
                digests = [hashlib.sha256(item).digest() for item in items]  # CPUs have instructions for SHA-256
                fields[name] = [self._find(*item, new) for item in zip(digests, items, strict=True)]
                parts[name] = b"digests" + b"".join(digests)  # no JSON begins with this letter
            else:
                parts[name] = bytes(value)
                fields[name] = others[name] = orjson.loads(parts[name])
        require_recordable("body", [others, [item for item, _ in new.values()]])
        for digest, (item, size) in new.items():
            self._keep(digest, item, size)
        return ParsedBody(fields, parts)

    def _find(self, digest: bytes, raw: msgspec.Raw, new: dict[bytes, tuple[Any, int]]) -> Any:
        """The item of a list with this JSON. `new`: gets the item and its size if `_latest` does not have the item."""
        found = self._latest.get(digest)
        if found is not None:
            return found
        if digest not in new:
            encoded, item = bytes(raw), self._earlier.get(digest)
            if item is None:
                value = orjson.loads(encoded)
                item = KnownItem(value) if isinstance(value, dict) else value
            new[digest] = item, len(encoded) + VALUE_BYTES * sum(map(encoded.count, (b",", b"[", b"{")))
        return new[digest][0]

    def _keep(self, digest: bytes, item: Any, size: int) -> None:
        if size > MAX_ITEM_SIZE or not isinstance(item, KnownItem):
            return
        if self._size + size > MAX_SIZE:
            self._earlier, self._latest, self._size = self._latest, {}, 0
        self._latest[digest] = item
        self._size += size


def _is_list_of_objects(value: memoryview) -> bool:
    """Whether the first item of a JSON list is an object. Prompts are lists of many numbers."""
    if value[0] != ord("["):
        return False
    return next((byte for byte in value[1:] if byte not in _SPACE), None) == ord("{")
