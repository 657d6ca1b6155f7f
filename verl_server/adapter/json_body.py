"""JSON bodies of HTTP requests. A value that JSON does not have raises BadInputError."""

from __future__ import annotations

import re
from typing import Any

import orjson

from verl_server.errors import BadInputError

_SURROGATES = re.compile(
    rb"\\(?:\\|u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|u([dD][89a-fA-F][\da-fA-F]{2}))"
)
"""An escaped backslash, a surrogate pair, or half of a pair (group 1) in JSON."""


def without_half_characters(raw: bytes) -> bytes:
    """JSON with U+FFFD in place of each half of a surrogate pair. Agents cut pairs; no tokenizer reads a half."""
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return raw
    return _SURROGATES.sub(lambda found: rb"\ufffd" if found[1] else found[0], raw)


def encode_json(body: Any) -> bytes:
    """The JSON text of `body`; numpy scalars become numbers. Raises BadInputError for a value that is not JSON."""
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise BadInputError(
            f"the request cannot be sent as JSON: {error}; convert tensors and arrays with .tolist()"
        ) from error


def tolist_hint(value: Any) -> str:
    """The end of an error about a tensor or an array, which must be a list instead. Empty for other values."""
    return "; convert it with .tolist()" if hasattr(value, "tolist") else ""
