"""The text of what a tool returns, which the policy reads."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Mapping, Sequence, Set, ValuesView
from numbers import Number
from typing import Any

import orjson
import pydantic

from verl_server.errors import UserCodeError

JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def as_result_text(name: str, value: Any) -> str:
    """A text as it is, data as JSON, and any other object as Python writes it. `name`: name of the tool.

    Raises UserCodeError for a coroutine, and for an object that Python writes with its address in memory, also within
    lists and dicts: the text would say nothing, and it would differ when a sample is replayed.
    """
    if isinstance(value, (bytes, bytearray, os.PathLike, Number)) and not isinstance(value, (int, float)):
        value = _as_json(value)
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value, default=_as_json, option=JSON_OPTIONS).decode()
    except TypeError:  # an integer of more than 64 bits, a lone surrogate, or a value that is not JSON
        pass
    try:
        return json.dumps(value, default=_as_json, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError):
        _require_texts(name, value)
        return str(value)


def _require_texts(name: str, value: Any) -> None:
    """Raise UserCodeError if a value has a part that is no data and has no text of its own."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:  # a list that contains itself
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, Set)):
            pending += item
        elif inspect.isawaitable(item):
            if inspect.iscoroutine(item):
                item.close()
            raise UserCodeError(f"tool {name!r} returned a value with a coroutine, {item!r:.80}; write `await` there")
        elif _shows_address(item):
            raise UserCodeError(
                f"tool {name!r} returned a value with an object of the type {type(item).__name__}, of which Python "
                "writes only the address in memory; return a text, JSON values or a pydantic model"
            )


def _shows_address(item: object) -> bool:
    """Whether the text of an object is only its address in memory, which differs in each process."""
    return re.fullmatch(r"<.* at 0x[0-9a-fA-F]+>", str(item)) is not None


def _as_json(value: Any) -> Any:
    """A value of another library as JSON values. Raises TypeError for other values."""
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, (bytes, bytearray)):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (Set, Sequence, ValuesView)):
        return list(value)
    if isinstance(value, Number):  # a decimal or a fraction, with all of its digits
        return str(value)
    raise TypeError(type(value).__name__)
