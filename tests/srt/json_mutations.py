"""JSON bodies with changed parts, for tests of parsers of requests."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st


def _nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value] if depth % 2 else {"a": value}
    return value


STRANGE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**70, -0.5, 1e308, float("nan"), "", "x", "none", "required", "\ud800", "data:",
    "{", "[1]", '{"a":' * 600 + "1" + "}" * 600, [], {}, [None], [[]], [{}], [5], ["x"], {"type": 5}, {"type": None},
    {"type": []}, {"type": {}}, {"type": "function"}, {"type": "message"}, {"type": "input_text", "text": []},
    {"role": []}, {"role": "tool"}, {"role": "user"}, _nested(301), _nested(300),
)  # fmt: skip
"""Values that clients should not send."""


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a JSON value with each of its keys or indices."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


@st.composite
def mutated_bodies(draw: st.DrawFn, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One of the bodies, of which one to three parts are replaced, removed or moved to another place."""
    body: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(bodies)))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(body))
        if not places:
            break
        container, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.sampled_from(("replace", "remove", "move")))
        if kind == "remove":
            del container[key]
        elif kind == "replace":
            container[key] = copy.deepcopy(draw(st.sampled_from(STRANGE_VALUES)))
        else:
            source, source_key = places[draw(st.integers(0, len(places) - 1))]
            container[key] = copy.deepcopy(source[source_key])
    return body
