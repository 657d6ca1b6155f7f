"""Malformed requests for a gateway: bodies of the right and of the wrong shape, broken text, broken connections."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Iterator
from typing import Any

import orjson

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")
TOOL = {"type": "object", "properties": {"a": {"type": "integer"}}}
GOOD: dict[str, Any] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "b"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": TOOL}}],
        "max_tokens": 2, "temperature": 1.0, "top_p": 0.5, "top_k": 5, "stop": ["x"], "stream": False, "logprobs": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": TOOL}},
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {
        "model": "m", "prompt": "a", "max_tokens": 2, "temperature": 1.0, "top_p": 0.5, "stop": "x", "logprobs": 1,
        "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "model": "m", "instructions": "i", "max_output_tokens": 2, "store": False,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": TOOL}, {"type": "web_search"}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": TOOL}},
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 2, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "b"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": TOOL}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"},
    },
}  # fmt: skip
GOOD["/v1/messages/count_tokens"] = GOOD["/v1/messages"]
ADMIN_PATHS = ("/admin/sessions", "/admin/sessions/fuzz/end")
GOOD_ADMIN: dict[str, Any] = {
    ADMIN_PATHS[0]: {
        "metadata": {"a": 1}, "limits": {"max_turns": 3}, "sampling_params": {"temperature": 1.0}, "expires_in_s": 60.0,
    },
    ADMIN_PATHS[1]: {"stop_reason": "done", "reward": 1.0, "rewards": {"a": 0.5}, "metadata": {}},
}  # fmt: skip
STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1e308, -1e308, 5e-324, 2**53, 2**63, 2**64 - 1, -(2**63), "", "a", "\x00", "\ufffe",
    "a" * 3000, "日本", "<|im_end|>", "<tool_call>", "</think>", "../../etc/passwd", "/etc/passwd", "file:///etc/passwd",
    "http://127.0.0.1:1/a.png", "data:image/png;base64,AAAA", "data:image/png;base64,", "{", "{}", "[]", "NaN",
    [], {}, [[]], [None], [{}], {"type": "object"}, {"type": []}, {"$ref": "#"}, {"type": "string", "pattern": "("},
    {"a": {"$ref": "http://127.0.0.1:1/"}}, [1, "a", None], {"": ""}, {"a": None}, {"text": "a", "type": "text"},
)  # fmt: skip
#: Texts that no JSON encoder writes. The marker `MARK` is replaced by them.
RAW_VALUES = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1" * 5000, b'"\\ud800"', b'"\\udfff\\ud800"', b'"\xff"',
    b'"\xed\xa0\x80"', b"[" * 5000 + b"]" * 5000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"[" * 120 + b"]" * 120, b"",
    b"nul", b"'a'", b'"\n"', b"0x10", b"01", b"1.", b'{"a":1,"a":2}', b"/*c*/1", b"1,",
)  # fmt: skip
MARK = "fuzz-mark-5f1d"


def random_bodies(seed: int) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Endless requests: path, body, headers."""
    source = random.Random(seed)
    makers: tuple[Callable[[random.Random, Any], tuple[bytes, dict[str, str]]], ...] = (
        _changed, _changed, _changed, _changed, _raw, _raw, _cut, _random_json, _other_encoding,
    )  # fmt: skip
    bodies = {**GOOD, **GOOD_ADMIN}
    while True:
        path = source.choice((*PATHS, *PATHS, *ADMIN_PATHS))
        body, headers = source.choice(makers)(source, bodies[path])
        yield path, body, headers


def _changed(source: random.Random, good: Any) -> tuple[bytes, dict[str, str]]:
    """A good body with one to three values that are strange, missing, repeated, or those of another place."""
    body = orjson.loads(orjson.dumps(good))
    for _ in range(source.randint(1, 3)):
        places = list(_places(body))
        if not places:
            break
        owner, key = source.choice(places)
        action = source.randrange(4)
        if action == 0:
            del owner[key]
        elif action == 1 and isinstance(owner, list):
            owner[key:key] = [owner[key]] * source.choice((1, 2, 50))
        elif action == 2:
            other, name = source.choice(places)
            owner[key] = orjson.loads(orjson.dumps(other[name]))
        else:
            owner[key] = source.choice(STRANGE)
    if isinstance(body, dict) and source.random() < 0.3:
        body["stream"] = True
    return orjson.dumps(body), {}


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All values inside of a value, as their container and their key."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _raw(source: random.Random, good: Any) -> tuple[bytes, dict[str, str]]:
    """A good body in which one value is text that no JSON encoder writes."""
    body = orjson.loads(orjson.dumps(good))
    owner, key = source.choice(list(_places(body)))
    owner[key] = MARK
    return orjson.dumps(body).replace(f'"{MARK}"'.encode(), source.choice(RAW_VALUES)), {}


def _cut(source: random.Random, good: Any) -> tuple[bytes, dict[str, str]]:
    body = orjson.dumps(good)
    return body[: source.randrange(len(body))], {}


def _random_json(source: random.Random, _: Any) -> tuple[bytes, dict[str, str]]:
    return orjson.dumps(_random_value(source, source.randint(0, 4))), {}


def _random_value(source: random.Random, levels: int) -> Any:
    if levels and source.random() < 0.5:
        return [_random_value(source, levels - 1) for _ in range(source.randint(0, 4))]
    if levels:
        names = ("messages", "model", "input", "prompt", "role", "content", "type", "tools", "text", "max_tokens", "")
        return {source.choice(names): _random_value(source, levels - 1) for _ in range(source.randint(0, 5))}
    return source.choice(STRANGE)


def _other_encoding(source: random.Random, good: Any) -> tuple[bytes, dict[str, str]]:
    """A good body in an encoding that is another one than its headers say."""
    body = orjson.dumps(good)
    return source.choice(
        (
            (gzip.compress(body), {"content-encoding": "gzip"}),
            (body, {"content-encoding": "gzip"}),
            (body, {"content-encoding": "br"}),
            (body.decode().encode("utf-16"), {"content-type": "application/json; charset=utf-16"}),
            (b"\xef\xbb\xbf" + body, {}),
            (body, {"content-type": "multipart/form-data; boundary=a"}),
            (body, {"content-type": "text/plain"}),
            (body, {"content-type": "\\x"}),
            (b"model=m&messages=a", {"content-type": "application/x-www-form-urlencoded"}),
            (random.Random(source.random()).randbytes(200), {}),
        )
    )
