"""Texts of the policy that come back in the messages of later conversations: the plain rule, and its fast form."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_server.gateway import ConversationKind, label_conversations
from verl_server.gateway.sessions.history import (
    MAX_COMPARED_TURNS,
    MIN_SUMMARY_CHARS,
    Opening,
    WrittenText,
    find_main,
    kind_of,
    last_in,
)
from verl_server.trajectory import ForkReason, Span, TrajectoryGraph

SUMMARY = "The user wants a fix of the bug.\nThe file a.py was changed, and all tests pass now."


def comes_back(turn_text: str, message: str) -> bool:
    """The plain rule: the message contains lines of the turn that have at least half of its characters."""
    lines = [line for part in turn_text.splitlines() if (line := part.strip())]
    num_chars = sum(map(len, lines))
    return num_chars >= MIN_SUMMARY_CHARS and 2 * sum(len(line) for line in lines if line in message) >= num_chars


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
    assert last_in(text, [WrittenText(turn)]) == (0 if expected else None)


def test_all_lines_of_a_long_text_count() -> None:
    """A list of many short lines under a few long lines: each half alone comes back if it has most characters."""
    long, short = [f"{number}: {'x' * 80}" for number in range(16)], [f"{number}: step" for number in range(300)]
    text = WrittenText("\n".join(long + short))
    assert last_in("\n".join(short), [text]) == 0
    assert last_in("\n".join(long), [text]) is None
    assert last_in("\n".join(long + short[:150]), [text]) == 0
    assert last_in("\n".join(long[:8]), [text]) is None


LINES = st.text("ab \u00e9\u2028\U0001f642\ud800", max_size=140)
"""Lines of few letters: parts of a line are in many messages."""


@st.composite
def texts_and_messages(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Texts and messages of the same lines, which are joined, cut and indented in different ways."""
    pool = draw(st.lists(LINES, min_size=1, max_size=6))
    pool += [line[: len(line) // 2] for line in pool] + [line[1:] for line in pool]

    def some(separators: list[str], max_texts: int) -> list[str]:
        text = st.tuples(st.sampled_from(separators), st.lists(st.sampled_from(pool), max_size=8))
        return [separator.join(lines) for separator, lines in draw(st.lists(text, min_size=1, max_size=max_texts))]

    return some(["\n", "\r\n  "], 6), some(["\n", "", "b", "\n> "], 4)


@given(texts_and_messages())
def test_the_fast_form_finds_what_the_plain_rule_finds(texts_messages: tuple[list[str], list[str]]) -> None:
    texts, messages = texts_messages
    written = [WrittenText(text) for text in texts]
    for message in messages:
        found = [index for index, text in enumerate(texts) if comes_back(text, message)]
        assert last_in(message, written) == max(found, default=None)


class SearchedText(str):
    """A text that counts how often it is searched for another text."""

    num_searches = 0

    def __contains__(self, text: object) -> bool:
        type(self).num_searches += 1
        return isinstance(text, str) and super().__contains__(text)


def test_lines_that_a_message_does_not_have_are_not_searched_for() -> None:
    """The plain rule searches a message once for each line of each text."""
    texts = ["\n".join(f"{agent} has read line {line} of its file" for line in range(200)) for agent in range(32)]
    written = [WrittenText(text) for text in texts]
    message = SearchedText("\n".join(f"agent {line} should look at its file" for line in range(1000)))
    assert last_in(message, written) is None
    assert SearchedText.num_searches < 100
    assert last_in(SearchedText(f"{message}\n{texts[5]}"), written) == 5
    assert SearchedText.num_searches < 1000


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
