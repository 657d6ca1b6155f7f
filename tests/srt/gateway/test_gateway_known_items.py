"""Parsing of bodies that repeat their messages and tools: the same result as for a body that repeats nothing."""

from __future__ import annotations

import copy
import json
from typing import Any

import orjson
import pytest
from gateway_fuzz_bodies import GOOD
from hypothesis import given
from hypothesis import strategies as st
from json_mutations import mutated_bodies

from verl_server.gateway.dialects import DIALECTS, base
from verl_server.gateway.dialects.base import Dialect, KnownItem, KnownItems, NoObjectError, derive
from verl_server.gateway.errors import GatewayError
from verl_server.gateway.http.app import fingerprint_of, parse_body

BY_PATH = {dialect.path: dialect for dialect in DIALECTS}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def parsed(raw: bytes, known: KnownItems) -> Any:
    try:
        return known.parse(raw).fields
    except (orjson.JSONDecodeError, NoObjectError) as error:
        return type(error)


def expected(raw: bytes) -> Any:
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if "surrogate" in str(error):  # test_half_a_character_does_not_end_a_conversation
            return parsed(raw, KnownItems())
        return type(error)
    return value if isinstance(value, dict) else NoObjectError


@given(st.lists(st.dictionaries(st.text(max_size=3), JSON, max_size=4), min_size=1, max_size=4), st.data())
def test_bodies_are_parsed_as_orjson_parses_them(bodies: list[Any], data: st.DataObject) -> None:
    known = KnownItems()
    for body in bodies:
        for raw in (orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS), json.dumps(body, indent=1).encode()):
            at = data.draw(st.integers(0, len(raw) - 1))
            changed = raw[:at] + data.draw(st.binary(max_size=3)) + raw[at + data.draw(st.integers(0, 2)) :]
            for content in (raw, changed, raw):
                found = parsed(content, known)
                assert repr(found) == repr(expected(content))  # 1, 1.0 and True are different values


@pytest.mark.parametrize("raw", [b'{"a":[{"b":1},]}', b'{"a":[{"b":"\xff"}]}', b'{"\xff":1}', b'{"a":1}x', b"[", b""])
def test_an_error_has_the_position_in_the_whole_body(raw: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError) as whole:
        orjson.loads(raw)
    with pytest.raises(orjson.JSONDecodeError) as found:
        KnownItems().parse(raw)
    assert str(found.value) == str(whole.value)


@pytest.mark.parametrize("where", ["messages", "metadata"])
def test_a_body_has_as_many_levels_as_a_record_can_have(where: str) -> None:
    def nested(levels: int) -> bytes:
        value: Any = {"a": 1}
        for _ in range(levels):
            value = {"a": value}
        return json.dumps({where: [value]}).encode()

    assert parse_body(nested(100), KnownItems()).fields
    for levels in (200, 900, 1100, 100_000):
        raw = nested(levels) if levels < 1100 else b'{"a":' * levels + b"1" + b"}" * levels
        with pytest.raises(GatewayError, match=r"levels|depth"):
            parse_body(raw, KnownItems())


def _conversation(path: str) -> Any:
    return st.lists(mutated_bodies([GOOD[path]]), min_size=1, max_size=4)


def _outcome(dialect: Dialect, raw: bytes, known: KnownItems) -> Any:
    try:
        body = parse_body(raw, known)
        return repr(dialect.parse(body.fields)), fingerprint_of(dialect, "", body)
    except GatewayError as error:
        return error.message


@pytest.mark.parametrize("path", list(BY_PATH))
@given(data=st.data())
def test_a_dialect_reads_repeated_items_as_new_ones(path: str, data: st.DataObject) -> None:
    """Also a request whose items were read by other dialects, and by requests that were refused."""
    known = KnownItems()
    for body in data.draw(_conversation(path)):
        try:
            raw = orjson.dumps(body)
        except TypeError:  # a value that a client cannot send
            continue
        for dialect in (BY_PATH[path], *DIALECTS, BY_PATH[path]):
            assert _outcome(dialect, raw, known) == _outcome(dialect, raw, KnownItems())


@pytest.mark.parametrize("path", list(BY_PATH))
def test_what_requests_share_is_not_changed(path: str) -> None:
    known, dialect = KnownItems(), BY_PATH[path]
    body = known.parse(orjson.dumps(GOOD[path])).fields
    request = dialect.parse(body)
    before = copy.deepcopy((dict(body), list(request.messages), list(request.tools)))
    for _ in range(3):
        again = dialect.parse(known.parse(orjson.dumps(GOOD[path])).fields)
        assert (list(again.messages), list(again.tools)) == before[1:]
    assert body == before[0]


def test_calls_of_responses_are_added_to_copies() -> None:
    """An assistant message is one item, and the calls that belong to it are others: they may follow it only once."""
    message = {"type": "message", "role": "assistant", "content": "a"}
    calls = [{"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"} for number in range(2)]
    user, known, dialect = {"role": "user", "content": "b"}, KnownItems(), BY_PATH["/v1/responses"]
    for items in ([message, *calls, user], [message, user], [message, calls[1], user], [message, *calls, user]):
        messages = dialect.parse(known.parse(orjson.dumps({"input": items})).fields).messages
        found = [call["id"] for call in messages[0].get("tool_calls", ())]
        assert found == [item["call_id"] for item in items if "call_id" in item]


def test_fingerprints_tell_requests_apart() -> None:
    dialect, known = BY_PATH["/v1/chat/completions"], KnownItems()
    good = GOOD[dialect.path]
    messages = good["messages"]
    bodies = [
        good, {**good, "temperature": 0.5}, {**good, "temperature": 1},
        {**good, "temperature": True}, {**good, "messages": messages[:1]},
        {**good, "messages": [*messages, messages[0]]},
        {**good, "messages": messages[::-1]}, {**good, "other": messages}, {**good, "tools": messages},
        {**good, "a": 1, "b": 2}, {**good, "a": "1", "b": 2}, {**good, "a1": "", "b": 2},
    ]  # fmt: skip
    first = [fingerprint_of(dialect, "", known.parse(orjson.dumps(body))) for body in bodies]
    assert len(set(first)) == len(bodies)
    assert [fingerprint_of(dialect, "", known.parse(orjson.dumps(body))) for body in bodies] == first
    assert [fingerprint_of(dialect, "", KnownItems().parse(orjson.dumps(body))) for body in bodies] == first


NUM_COMPUTED = [0]


def _count(item: Any) -> int:
    NUM_COMPUTED[0] += 1
    return len(item)


def sizes(known: KnownItems) -> int:
    return len(known._latest) + len(known._earlier)


def test_an_item_is_parsed_once_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_SIZE", 4000)
    known, NUM_COMPUTED[0] = KnownItems(), 0
    conversation = [{"role": "user", "content": str(number)} for number in range(20)]
    for end in range(1, 21):
        items = known.parse(orjson.dumps({"messages": conversation[:end]})).fields["messages"]
        assert [derive(_count, item) for item in items] == [2] * end
    assert NUM_COMPUTED[0] == 20
    for number in range(200):
        known.parse(orjson.dumps({"messages": [{"other": number}]}))
    assert sizes(known) < 2 * 4000 / base.VALUE_BYTES
    (item,) = known.parse(orjson.dumps({"messages": conversation[:1]})).fields["messages"]
    assert derive(_count, item) == 2
    assert NUM_COMPUTED[0] == 21


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"content": "a" * 4000}]},
        {"messages": [{"content": [[]] * 40}]},
        {"messages": [{}] * 3000},
        {"metadata": [{"a": 1}] * 3},
        {"tools": [1, {"a": 1}]},
    ],
)
def test_a_body_is_not_kept_if_it_is_large_or_not_repeated(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_ITEM_SIZE", 2000)
    known = KnownItems()
    assert known.parse(orjson.dumps(body)).fields == body
    assert sizes(known) == 0


def test_one_body_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_SIZE", 2000)
    known = KnownItems()
    for name in ("messages", "input", "tools"):
        known.parse(orjson.dumps({name: [{"content": f"{name}{number:0500}"} for number in range(500)]}))
    assert sizes(known) <= 2 * 2000 / 500


def test_new_items_of_a_body_are_checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check encodes what it checks, with a hundred lists around it."""
    num_checks = list[None]()
    monkeypatch.setattr(base, "require_recordable", lambda *_: num_checks.append(None))
    KnownItems().parse(orjson.dumps({"messages": [{"a": number} for number in range(1000)]}))
    assert len(num_checks) == 1


def test_a_turn_can_have_many_calls() -> None:
    calls = [{"type": "function_call", "call_id": f"c{n}", "name": "f", "arguments": "{}"} for n in range(50_000)]
    body = {"input": [*calls, {"role": "user", "content": "b"}]}
    messages = BY_PATH["/v1/responses"].parse(body).messages
    assert [call["id"] for call in messages[0]["tool_calls"]] == [call["call_id"] for call in calls]


def test_lists_without_objects_are_no_items() -> None:
    raw = b'{"prompt": [1, 2, 3], "stop": [ "a" ], "none": [], "messages": [{"a": 1}, 5, null]}'
    fields = KnownItems().parse(raw).fields
    assert fields == {"prompt": [1, 2, 3], "stop": ["a"], "none": [], "messages": [{"a": 1}, 5, None]}
    assert type(fields["messages"][0]) is KnownItem
