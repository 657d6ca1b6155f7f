"""`Dialect`: the interface of an API of the gateway; what dialects share: fields, schemas, tool choice, streams."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import orjson
import pydantic
from pydantic import Field

from verl_server.gateway.conversation import AssistantTurn, TurnDelta, TurnRequest
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.trajectory.rendering.messages import Message
from verl_server.types import Json, without_half_characters

LARGEST_TOP_K = 1 << 30
"""SGLang's value for all tokens. Larger values do not fit into its tensors."""
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


def find_last(items: Sequence[Json], name: str, value: str) -> Json:
    """The last item with a value of a field. Empty without such an item."""
    return next((item for item in reversed(items) if item.get(name) == value), {})


def join_texts(parts: Any, kind: str, name: str) -> str:
    """The texts of the content parts of a type, joined. `name`: field of the text. Empty for other values."""
    found = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join(text for part in found if part.get("type") == kind and isinstance(text := part.get(name), str))


def refuse(body: Mapping[str, Any], name: str, allowed: tuple[Any, ...], reason: str) -> None:
    """Raise GatewayError for a value that the gateway cannot honour."""
    if body.get(name) is not None and body[name] not in allowed:
        raise bad_request(f"{name!r} = {str(body[name])[:40]} is not supported: {reason}")


# -- Turn fields ------------------------------------------------------------------------------------
# The fields of bodies besides the conversation and the tools. `/openapi.json` describes them from the same models.

Count = Annotated[int, Field(ge=1)]
TopK = Annotated[int, Field(ge=-1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOP_SEQUENCES)]
TokenText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""A token id as text."""
Fields = TypeVar("Fields", bound="TurnFields")


class TurnFields(pydantic.BaseModel):
    """What all APIs have. Other fields of a body are ignored, and null is the same as a missing field."""

    model_config = pydantic.ConfigDict(strict=True)

    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: TopK | None = None
    """SGLang's `top_k`. -1 and 0: all tokens."""
    chat_template_kwargs: Json | None = None
    """Variables of the chat template, as vLLM and SGLang call them."""

    @classmethod
    def read(cls: type[Fields], body: Json) -> Fields:
        """The fields of a body. Raises GatewayError, which names the first wrong field."""
        try:
            fields = cls.model_validate(body)
        except pydantic.ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            name = str(found[0]["loc"][0])
            messages = [item["msg"].replace("Field required", "is missing") for item in found if item["loc"][0] == name]
            texts = [re.sub("^(Input|String|List) should", "must", message) for message in messages]
            raise bad_request(f"{name!r} {' or '.join(dict.fromkeys(texts))}") from None
        require_recordable("chat_template_kwargs", fields.chat_template_kwargs)
        return fields

    def sampling_params(self, **others: Any) -> Json:
        """SGLang's sampling parameters, without those that are None or empty. `others`: those of one API."""
        top_k = -1 if self.top_k == 0 else None if self.top_k is None else min(self.top_k, LARGEST_TOP_K)
        params = {"temperature": self.temperature, "top_p": self.top_p, "top_k": top_k, **others}
        return {name: value for name, value in params.items() if value is not None and value != []}


# -- Schemas ----------------------------------------------------------------------------------------
# JSON schemas of structured output. A server compiles them in threads of the process that generates the turns of all
# sessions. The compiler of xgrammar lets other threads run, and SGLang gives up after a time. So the limits are those
# of sizes: what one request may cost there.

MAX_SCHEMA_BYTES, MAX_SCHEMA_PARTS, MAX_SCHEMA_LEVELS = 64 << 10, 2000, 32
"""Size of a JSON schema that is compiled to a grammar."""
MAX_PATTERN_CHARS = 4000
"""Maximum number of characters of the regular expressions of a schema. xgrammar writes up to 2 KB to the log of the
engine for each character."""
MAX_CHOICES, MAX_PATTERN_CHOICES, MAX_COUNTS = 200, 12, 10_000
"""Maximum number of `?`, `*`, `+` and `{m,n}` of a schema, and of one of its regular expressions, and maximum sum of
the numbers in `{n}` and `{m,n}`, each times the number of choices of its expression. The time of the compiler grows
with powers of them, and each schema takes one of the engine's threads for schemas."""
FORMAT_CHOICES = 4
"""What a `format` of a schema counts for: a backend compiles it as a regular expression of its own."""
_PATTERN_TOKEN = re.compile(
    r"\\.|\[(?:\\.|[^\]\\])*\]|\(\?|(?P<choice>[?*+]|\{\d*,\d*\})|(?P<repeat>\{\d+\})", re.DOTALL
)
"""Escaped characters, classes and the beginnings of groups such as `(?:` have none of these, choices, and repeats."""


def encode_schema(name: str, schema: Any) -> str:
    """A JSON schema of structured output as text.

    Raises GatewayError for a schema that is too large, and for one that no text of finite length has.
    """
    require_recordable(name, schema)
    encoded, num_parts, level = orjson.dumps(schema), 0, [schema]
    for _ in range(MAX_SCHEMA_LEVELS):
        items = [item for part in level for item in (part.values() if isinstance(part, dict) else part)]
        num_parts += len(items)
        level = [item for item in items if isinstance(item, (dict, list))]
    objects = [] if level else list(_parts(schema))
    for part in objects:
        if isinstance(part.get("properties"), dict) and part.keys() & {"minProperties", "maxProperties"}:
            num_parts += len(part["properties"]) ** 2  # the grammar has a rule for each property and each number
    if level or len(encoded) > MAX_SCHEMA_BYTES or num_parts > MAX_SCHEMA_PARTS:
        raise bad_request(
            f"{name!r} is too large: a schema may have {MAX_SCHEMA_BYTES} bytes, {MAX_SCHEMA_PARTS} parts and "
            f"{MAX_SCHEMA_LEVELS} levels. With minProperties or maxProperties, the square of the number of properties "
            "counts"
        )
    patterns = [pattern for part in objects for pattern in _patterns_of(part)]
    num_characters = sum(map(len, patterns))  # the search takes their square
    tokens = [_PATTERN_TOKEN.findall(pattern) for pattern in patterns if num_characters <= MAX_PATTERN_CHARS]
    choices = [[choice for choice, _ in found if choice] for found in tokens]
    numbers = [sum(map(int, re.findall(r"\d+", "".join(map("".join, found))))) for found in tokens]
    num_choices = sum(map(len, choices)) + FORMAT_CHOICES * sum(isinstance(part.get("format"), str) for part in objects)
    if (
        num_characters > MAX_PATTERN_CHARS
        or num_choices > MAX_CHOICES
        or max(map(len, choices), default=0) > MAX_PATTERN_CHOICES
        or sum(max(len(found), 1) * number for found, number in zip(choices, numbers, strict=True)) > MAX_COUNTS
    ):
        raise bad_request(
            f"{name!r} has regular expressions that are too large: a schema may have {MAX_PATTERN_CHARS} characters of "
            f"them, {MAX_CHOICES} of ?, *, + and {{m,n}}, of which a format counts {FORMAT_CHOICES}, and "
            f"{MAX_PATTERN_CHOICES} in one expression; the numbers in {{m,n}}, times these, may be {MAX_COUNTS}"
        )
    if (place := _without_end(schema)) is not None:
        raise bad_request(f"{name!r} has a part that no JSON of finite length can have: {place!r:.200} needs itself")
    return encoded.decode()


def _patterns_of(part: Json) -> list[str]:
    """The regular expressions of one object of a schema."""
    by_name = part.get("patternProperties")
    found = (part.get("pattern"), *(by_name if isinstance(by_name, dict) else ()))
    return [item for item in found if isinstance(item, str)]


def _without_end(schema: Json) -> str | None:
    """A reference of a schema that needs itself without end, as `{"$ref": "#"}` does. None if there is none.

    A grammar of such a part has no text: the engine would find no token that it allows.
    """
    found = {ref for part in _parts(schema) if isinstance(ref := part.get("$ref"), str) and ref.startswith("#")}
    pending = {ref: referenced(ref, schema) for ref in found}
    while ended := [ref for ref, part in pending.items() if _ends(part, pending)]:
        for ref in ended:
            del pending[ref]
    return min(pending, default=None)


def _parts(value: Any) -> Iterator[Json]:
    """All objects within a value."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(item)


def _ends(part: Any, pending: Collection[str]) -> bool:
    """Whether a part of a schema has a value without the values of the references `pending`."""
    if not isinstance(part, dict):
        return True
    if isinstance(ref := part.get("$ref"), str):
        return ref not in pending
    for name in ("anyOf", "oneOf"):
        if isinstance(found := part.get(name), list) and found:
            return any(_ends(item, pending) for item in found)
    needed = list(part["allOf"]) if isinstance(part.get("allOf"), list) else []
    properties, required = part.get("properties"), part.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        needed += [properties[name] for name in required if isinstance(name, str) and name in properties]
    if isinstance(prefix := part.get("prefixItems"), list):
        needed += prefix
    if isinstance(part.get("minItems"), int) and part["minItems"] > 0:
        needed.append(part.get("items"))
    return all(_ends(item, pending) for item in needed)


def referenced(reference: Any, root: Json) -> Any:
    """The schema that a reference within the same document names. None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        if key:
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


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

    def begin(self, num_prompt_tokens: int) -> Iterator[Event]:
        """The events before the first delta."""
        return iter(())

    @abstractmethod
    def add(self, delta: TurnDelta) -> Iterator[Event]:
        """The events of a delta."""

    @abstractmethod
    def end(self, turn: AssistantTurn) -> Iterator[Event]:
        """The events after the last delta: the tool calls, and the end of the reply."""

    def keep_alive(self) -> bytes:
        """What is sent while there are no deltas, so that no proxy closes the connection."""
        return b": keep-alive\n\n"

    def fail(self, error: GatewayError) -> Event:
        """The event that ends the stream with an error."""
        return Event(openai_error(error)[1])


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

    def error(self, error: GatewayError) -> tuple[int, Json]:
        """HTTP status and body of an error, by default as OpenAI writes it."""
        return openai_error(error)


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
