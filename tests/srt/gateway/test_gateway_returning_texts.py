"""Texts of the policy that come back in the messages of later conversations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_server.gateway import ConversationKind, label_conversations
from verl_server.gateway.sessions.history import (
    MAX_COMPARED_TURNS,
    MAX_SUMMARY_LINES,
    Opening,
    comes_back,
    find_main,
    kind_of,
)
from verl_server.trajectory import ForkReason, Span, TrajectoryGraph

SUMMARY = "The user wants a fix of the bug.\nThe file a.py was changed, and all tests pass now."


@pytest.mark.parametrize(
    ("turn", "text", "expected"),
    [
        (SUMMARY, f"This session continues.\n{SUMMARY}\nGo on.", True),
        (f"<summary>\n  {SUMMARY}\n</summary>", f"Summary:\n{SUMMARY}", True),
        (SUMMARY, "".join(f"> {line}\n" for line in SUMMARY.splitlines()), True),
        (SUMMARY, SUMMARY.replace("\n", " and "), True),
        (SUMMARY, "Fix the bug.", False),
        (SUMMARY, SUMMARY.replace(" ", "  "), False),
        (SUMMARY, "", False),
        (f"{SUMMARY}\n{'other ' * 40}", SUMMARY, False),
        ("\ud800 \U0001f642" * 20, "a" + "\ud800 \U0001f642" * 21, True),
        ("yes", "yes, go on", False),
        ("", "anything", False),
        ("", "", False),
    ],
)
def test_a_summary_comes_back_line_by_line(turn: str, text: str, expected: bool) -> None:
    assert comes_back(turn, text) is expected


def test_of_a_long_text_the_longest_lines_are_looked_for() -> None:
    lines = [f"{number}: {'x' * number}" for number in range(100)]
    text, end = "\n".join(lines), "\n".join(lines[-MAX_SUMMARY_LINES:])
    assert comes_back(text, f"Go on.\n{text}")
    assert comes_back(text, end)
    assert not comes_back(text, "\n".join(lines[:-MAX_SUMMARY_LINES]))


Conversation = tuple[str, bool, list[str], str]
"""System prompt, whether it has tools, messages of the user, and the text of the turn."""


@st.composite
def conversations(draw: st.DrawFn) -> list[Conversation]:
    """More conversations than are compared with a later conversation. Messages have turns of earlier conversations."""
    own, system = st.text("ab \n", max_size=60), st.sampled_from(["agent", "search"])
    found: list[Conversation] = []
    for _ in range(draw(st.integers(1, MAX_COMPARED_TURNS + 8))):
        turns = [turn for *_, turn in found] or [""]
        back = st.sampled_from(turns).map(lambda turn: f"Go on with\n{turn}\n")
        users = draw(st.lists(st.one_of(own, back), min_size=1, max_size=2))
        found.append((draw(system), draw(st.booleans()), users, draw(own)))
    return found


def graph_of(planned: list[Conversation]) -> TrajectoryGraph:
    """Conversations of one turn. The prompt of the conversation `i` is the node `2 i`, its turn is the next node."""
    graph = TrajectoryGraph("s")
    for system, has_tools, users, turn in planned:
        roles = [("system", system), *(("user", text) for text in users)]
        prompt: Any = {"messages": [{"role": role, "content": text} for role, text in roles], "tools": [0] * has_tools}
        reason = ForkReason.SUB_AGENT if graph.nodes else None
        root = graph.add_node(None, [1], sampled=False, message=prompt, fork_reason=reason, tools_digest="t").id
        reply = {"role": "assistant", "content": turn}
        graph.add_node(root, [2], sampled=True, logprobs=[-1.0], spans=[Span(1, 0, 1)], message=reply)
    return graph


@given(conversations())
def test_the_kinds_are_those_of_the_plain_rule(planned: list[Conversation]) -> None:
    openings = [Opening(system, users, "t" if has_tools else None) for system, has_tools, users, _ in planned]
    main, expected, requests = find_main(openings), dict[int, ConversationKind](), set[int]()
    for index, opening in enumerate(openings):
        before = range(max(index - MAX_COMPARED_TURNS, 0), index)
        found = [turn for turn in before if comes_back(planned[turn][-1], "\n".join(opening.users))]
        kind = ConversationKind.MAIN if index == main else kind_of(opening, openings[main], bool(found))
        expected[2 * index] = kind
        if kind is ConversationKind.COMPACTED:
            requests.add(2 * found[-1])
    kept = (ConversationKind.MAIN, ConversationKind.COMPACTED)
    expected |= {root: ConversationKind.SUMMARY for root in requests if expected[root] not in kept}
    assert label_conversations(graph_of(planned)) == expected
