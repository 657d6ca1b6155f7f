"""Reading of fields of request bodies, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from verl_server.gateway.errors import ErrorKind, GatewayError
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
