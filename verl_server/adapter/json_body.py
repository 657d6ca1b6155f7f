"""JSON bodies of HTTP requests. A value that JSON does not have raises BadInputError with the name of its field."""

from __future__ import annotations

from typing import Any

import orjson

from verl_server.errors import BadInputError


def encode_json(body: Any) -> bytes:
    """The JSON text of `body`; numpy scalars become numbers. Raises BadInputError for a value that is not JSON."""
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        name, value = _find_invalid(body, "")
        raise BadInputError(
            f"{name or 'the request'} cannot be sent as JSON, got {type(value).__name__} {value!r:.100}: "
            f"{error}{tolist_hint(value)}"
        ) from error


def tolist_hint(value: Any) -> str:
    """The end of an error about a tensor or an array, which must be a list instead. Empty for other values."""
    return "; convert it with .tolist()" if hasattr(value, "tolist") else ""


def _find_invalid(value: Any, name: str) -> tuple[str, Any]:
    """Name and value of the first part of `value` that is not JSON. Runs only after the encoding has failed."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{name}[{key!r}]" if name else str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    for item_name, item in items:
        try:
            orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY)
        except TypeError:
            return _find_invalid(item, item_name)
    return name, value
