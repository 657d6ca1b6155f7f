"""Parses the bodies of requests. Each message and each tool is parsed once, although agents repeat them.

An agent sends its whole conversation and all of its tools with each request. `KnownItems` finds each object in a list
of a body by its digest. An object that an earlier request had is not parsed again, and what a dialect makes of the
object (`derive`) is not computed again. For an object that is repeated, only its digest is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import orjson

from verl_server.gateway.dialects.fields import require_recordable
from verl_server.types import Json

Result = TypeVar("Result")

MAX_ITEMS, MAX_BYTES = 2048, 4 << 20
"""Number of objects, and bytes of their JSON, after which the objects that no later request repeats are forgotten."""

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
    """The objects in the lists of the latest bodies. May be used in several threads."""

    def __init__(self) -> None:
        self._latest, self._earlier = dict[bytes, KnownItem](), dict[bytes, KnownItem]()
        """Objects by their digests. Those in use move from `_earlier` to `_latest`, and the others are forgotten."""
        self._num_bytes = 0
        """Size of the JSON of the objects in `_latest`."""

    def parse(self, raw: bytes) -> ParsedBody:
        """Parse a body.

        Raises `orjson.JSONDecodeError`, NoObjectError, and GatewayError for a value with too many levels.
        """
        if len(self._latest) > MAX_ITEMS or self._num_bytes > MAX_BYTES:
            self._earlier, self._latest, self._num_bytes = self._latest, {}, 0
        try:
            return self._parse(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, orjson.JSONDecodeError, RecursionError):
            body = orjson.loads(raw)  # its error has the position in the whole body
            if not isinstance(body, dict):
                raise NoObjectError from None
            require_recordable("body", body)
            raise

    def _parse(self, raw: bytes) -> ParsedBody:
        fields, parts, others = Json(), dict[str, bytes](), Json()
        for name, value in _FIELDS.decode(raw).items():
            if _is_list_of_objects(memoryview(value)):
                items = _ITEMS.decode(value)
                digests = [hashlib.sha256(item).digest() for item in items]  # CPUs have instructions for SHA-256
                fields[name] = list(map(self._item, digests, items))
                parts[name] = b"digests" + b"".join(digests)  # no JSON begins with this letter
            else:
                parts[name] = bytes(value)
                fields[name] = others[name] = orjson.loads(parts[name])
        require_recordable("body", others)
        return ParsedBody(fields, parts)

    def _item(self, digest: bytes, raw: msgspec.Raw) -> Any:
        found = self._latest.get(digest)
        if found is None:
            found = self._earlier.get(digest)
            if found is None:
                value = orjson.loads(bytes(raw))
                require_recordable("body", [[value]])  # an object and a list of the body are around it
                if not isinstance(value, dict):
                    return value
                found = KnownItem(value)
            self._latest[digest] = found
            self._num_bytes += len(memoryview(raw))
        return found


def _is_list_of_objects(value: memoryview) -> bool:
    """Whether the first item of a JSON list is an object. Prompts are lists of many numbers."""
    if value[0] != ord("["):
        return False
    return next((byte for byte in value[1:] if byte not in _SPACE), None) == ord("{")
