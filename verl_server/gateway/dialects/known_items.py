"""Parses the bodies of requests. Each message and each tool is parsed once, although agents repeat them.

An agent sends its whole conversation and all of its tools with each request. `KnownItems` finds each of them in a body
by its digest. An object that an earlier request had is not parsed again, and what a dialect makes of the
object (`derive`) is not computed again. For an object that is repeated, only its digest is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import orjson

from verl_server.adapter.json_body import without_half_characters
from verl_server.gateway.dialects.fields import require_recordable
from verl_server.types import Json

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
