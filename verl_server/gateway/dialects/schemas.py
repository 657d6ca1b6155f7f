"""JSON schemas of structured output: those that a grammar backend might compile for minutes are refused.

A server compiles a schema in the process that generates the turns of all sessions. The limits are those of xgrammar
with a vocabulary of 150,000 tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

import orjson

from verl_server.gateway.dialects.base import bad_request, require_recordable
from verl_server.types import Json

MAX_SCHEMA_BYTES, MAX_SCHEMA_PARTS, MAX_SCHEMA_LEVELS = 64 << 10, 2000, 32
"""Size of a JSON schema that is compiled to a grammar."""
MAX_PATTERN_CHARS, MAX_SCHEMA_COUNT, MAX_SUM_OF_COUNTS = 500, 1000, 20_000
COUNTS = frozenset({"minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"})
"""Fields of a schema whose numbers a grammar writes out."""
MAX_COUNTED_PROPERTIES, MAX_COUNTED_OBJECTS = 20, 10
"""Maximum number of properties beside `minProperties` or `maxProperties`, and of such objects: a grammar has a rule for
each number of properties that may still come at each property.
"""
MAX_PATTERN_COST = 200
"""Maximum sum of `_cost_of_pattern` of the patterns of a schema, and of the costs of its formats."""
FORMAT_COSTS = {"email": 10, "hostname": 10, "uri": 10, "uri-reference": 10, "uri-template": 10}
"""Costs of a `format`, which a backend compiles as a pattern of its own. All other formats cost 1."""
_PATTERN_TOKEN = re.compile(
    r"\\.|\[(?:\\.|[^\]\\])*\]|(?P<count>[?*+]|\{(?P<low>\d+)(?P<comma>,?)(?P<high>\d*)\})|\((?:\?[:=!])?|.", re.DOTALL
)
_CLASSES = (".", "[", "\\w", "\\W", "\\d", "\\D", "\\s", "\\S", "\\p", "\\P")
"""How parts of a pattern begin that match many tokens."""
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_KNOWN_ESCAPES = frozenset("0abcdefnrstuvwxDSW !\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
"""Characters after a backslash about which xgrammar writes no warning."""


def encode_schema(name: str, schema: Any) -> str:
    """A JSON schema of structured output as text.

    Raises GatewayError for a schema that the grammar backend of the server might compile for minutes, or not survive.
    """
    require_recordable(name, schema)
    encoded = orjson.dumps(schema)
    num_parts, num_counted, pattern_cost, sum_of_counts, level = 0, 0, 0, 0.0, [schema]
    for _ in range(MAX_SCHEMA_LEVELS):
        objects = [part for part in level if isinstance(part, dict)]
        items = [item for part in level for item in (part.items() if isinstance(part, dict) else enumerate(part))]
        num_parts += len(items)
        num_counted += sum(_counts_properties(name, part) for part in objects)
        pattern_cost += sum(_cost_of_pattern(name, pattern) for part in objects for pattern in _patterns_of(part))
        pattern_cost += sum(_cost_of_format(part.get("format")) for part in objects)
        for key, value in items:
            if key in COUNTS and isinstance(value, (int, float)):
                sum_of_counts += max(value, 0)
                if value > MAX_SCHEMA_COUNT or sum_of_counts > MAX_SUM_OF_COUNTS:
                    raise bad_request(
                        f"{name!r} has a {key!r} that is too large: numbers of items, properties and characters may "
                        f"be {MAX_SCHEMA_COUNT}, and their sum in a schema {MAX_SUM_OF_COUNTS}"
                    )
        level = [value for _, value in items if isinstance(value, (dict, list))]
        if not level or num_parts > MAX_SCHEMA_PARTS:
            break
    if level or len(encoded) > MAX_SCHEMA_BYTES:
        raise bad_request(
            f"{name!r} is too large: a schema may have {MAX_SCHEMA_BYTES} bytes, {MAX_SCHEMA_PARTS} parts and "
            f"{MAX_SCHEMA_LEVELS} levels"
        )
    if pattern_cost > MAX_PATTERN_COST:
        raise bad_request(
            f"{name!r} has patterns and formats that are too large: use fewer of them, and fewer ?, *, + and {{m,n}}"
        )
    if num_counted > MAX_COUNTED_OBJECTS:
        raise bad_request(
            f"{name!r} is too large: {MAX_COUNTED_OBJECTS} objects may have properties and minProperties or "
            "maxProperties"
        )
    if (place := _without_end(schema)) is not None:
        raise bad_request(f"{name!r} has a part that no JSON of finite length can have: {place!r:.200} needs itself")
    return encoded.decode()


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


def _counts_properties(name: str, part: Json) -> bool:
    """Whether an object has properties beside a limit of their number. Raises GatewayError if it has too many."""
    properties = part.get("properties")
    if not isinstance(properties, dict) or not properties or part.keys().isdisjoint(("minProperties", "maxProperties")):
        return False
    if len(properties) > MAX_COUNTED_PROPERTIES:
        raise bad_request(
            f"{name!r} is too large: beside minProperties and maxProperties, an object may have "
            f"{MAX_COUNTED_PROPERTIES} properties"
        )
    return True


def _patterns_of(part: Json) -> list[str]:
    """The regular expressions of one object of a schema."""
    by_name = part.get("patternProperties")
    return [
        item for item in (part.get("pattern"), *(by_name if isinstance(by_name, dict) else ())) if isinstance(item, str)
    ]


def _cost_of_format(value: Any) -> int:
    """The cost of a `format`. 0 for other values: a property can have this name."""
    return FORMAT_COSTS.get(value, 1) if isinstance(value, str) else 0


def _cost_of_pattern(name: str, pattern: str) -> int:
    """The number of characters that a regular expression writes out, times the number of its choices of a length.

    Counts of groups multiply those within the groups. Characters without a count cost nothing. Each part about which
    xgrammar writes warnings to the log of the engine costs 1 more. Raises GatewayError for a pattern with too many
    characters.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise bad_request(f"{name!r} has a pattern that is too large: patterns may have {MAX_PATTERN_CHARS} characters")
    groups, steps, choices = [(0, 0)], 0, 0  # of the groups that are open, and of the last part
    for token in _PATTERN_TOKEN.finditer(pattern):
        text = token.group()
        if text.startswith("("):
            groups.append((0, 0))
            continue
        if text == ")" and len(groups) > 1:
            steps, choices = groups.pop()
        elif token["count"]:
            groups[-1] = (groups[-1][0] - steps, groups[-1][1] - choices)
            low, high = int(token["low"] or 0), int(token["high"] or 0)
            count = max(low, high, 1)
            is_choice = token["low"] is None or (bool(token["comma"]) and low != high)
            steps, choices = max(steps, 1) * count, choices * count + is_choice
        else:
            steps, choices = int(text.startswith(_CLASSES)), 0
        groups[-1] = (groups[-1][0] + steps, groups[-1][1] + choices)
    cost = sum(group[0] for group in groups) * max(sum(group[1] for group in groups), 1)
    return max(cost, 1) + _num_warnings(pattern)


def _num_warnings(pattern: str) -> int:
    """The number of parts of a regular expression that xgrammar ignores or guesses, with warnings of up to 2 KB each.

    `^` and `$` in the middle, lookaheads, and unknown escape sequences.
    """
    count, last = 0, len(pattern) - 1
    for token in _PATTERN_TOKEN.finditer(pattern):
        text, start = token.group(), token.start()
        count += (text == "^" and start > 0) or (text == "$" and start < last) or text in ("(?=", "(?!")
        if "\\" in text:
            count += sum(escaped not in _KNOWN_ESCAPES for escaped in _ESCAPE.findall(text))
    return count
