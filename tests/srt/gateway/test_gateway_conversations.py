"""Kinds of the conversations of a session: the rules, and a session with side calls on a real server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from verl_server.gateway import ConversationKind, label_conversations
from verl_server.gateway.sessions.history import MAX_COMPARED_TURNS, Opening, find_main, kind_of
from verl_server.trajectory import ForkReason, Span, TrajectoryGraph
from verl_server.trajectory.exports.common import find_links
from verl_server.trajectory.graph import KIND_NOTE

AGENT = Opening("You are an agent.", ["<env>x</env>\nFix the bug."], "t1", num_turns=5, max_new_tokens=32000)
CHAT = Opening("You are an agent.", ["Fix the bug."], None, num_turns=5, max_new_tokens=4000)
NAMER = Opening("Write a title.", ["Fix the bug."], None)
RAW = Opening(is_raw=True)
SUMMARY = "The user wants a fix of the bug.\nThe file a.py was changed, and all tests pass now."
ASK_TITLE = f"Write a title.\n<env>x</env>\nFix the bug.\n{SUMMARY}"
BARE = replace(AGENT, system="")
BARE_CHAT = replace(BARE, tools=None, max_new_tokens=4000)


@pytest.mark.parametrize(
    ("opening", "main", "has_summary", "kind"),
    [
        # an agent with tools
        (NAMER, AGENT, False, "title"),
        (replace(NAMER, users=['{"text": "<env>x</env>\nFix the bug.", "n": 1}']), AGENT, False, "title"),
        (replace(NAMER, users=["quota"], max_new_tokens=1), AGENT, False, "side_call"),
        (replace(NAMER, users=["What does this page say?"]), AGENT, False, "side_call"),
        (replace(NAMER, num_turns=2), AGENT, False, "sub_agent"),
        (Opening("You search files.", ["Find the bug."], "t2", 3), AGENT, False, "sub_agent"),
        (Opening("You search files.", ["Find the bug."], "t1", 3), AGENT, False, "sub_agent"),
        (Opening("You are an agent.", ["Find the bug."], "t2", 3), AGENT, False, "sub_agent"),
        (replace(AGENT, users=["Continue:", SUMMARY]), AGENT, True, "compacted"),
        (replace(AGENT, users=[*AGENT.users, SUMMARY]), AGENT, True, "compacted"),
        (replace(AGENT, system="It is noon.", users=[SUMMARY]), AGENT, True, "compacted"),
        (Opening("You check.", [SUMMARY], "t2"), AGENT, True, "sub_agent"),
        (replace(NAMER, users=[f"Fix the bug.\n{SUMMARY}"]), AGENT, True, "side_call"),
        (replace(AGENT, has_foreign_turns=True), AGENT, False, "edited"),
        (replace(AGENT, users=["More."], has_foreign_turns=True), AGENT, False, "edited"),
        (replace(AGENT, system="It is noon.", has_foreign_turns=True), AGENT, False, "edited"),
        (replace(AGENT, tools="t2", has_foreign_turns=True), AGENT, False, "other_tools"),
        (replace(AGENT, tools="t2"), AGENT, False, "other_tools"),
        (replace(AGENT, tools="t2", users=["More."], has_foreign_turns=True), AGENT, False, "other_tools"),
        (replace(AGENT, tools=None, system="Summarise.", has_foreign_turns=True), AGENT, False, "other_tools"),
        (replace(AGENT, users=["Another task."]), AGENT, False, "main"),
        # an agent without tools
        (replace(CHAT, users=["Another task."]), CHAT, False, "main"),
        (replace(CHAT, users=["Another task."], num_turns=1, max_new_tokens=5), CHAT, False, "main"),
        (replace(NAMER, max_new_tokens=30), CHAT, False, "title"),
        (replace(NAMER, max_new_tokens=128), CHAT, False, "title"),
        (replace(NAMER, max_new_tokens=129), CHAT, False, "sub_agent"),
        (NAMER, CHAT, False, "sub_agent"),
        (Opening("You review.", ["Fix the bug.\nIs this right?"], None, 1, False, 2000), CHAT, False, "sub_agent"),
        (replace(CHAT, users=["Hi"], max_new_tokens=1, num_turns=1), CHAT, False, "side_call"),
        (replace(CHAT, users=[SUMMARY]), CHAT, True, "compacted"),
        (replace(CHAT, has_foreign_turns=True), CHAT, False, "edited"),
        # agents without a system prompt
        (Opening(users=[ASK_TITLE]), BARE, True, "title"),
        (Opening(users=[f"Is this right?\n{SUMMARY}"]), BARE, True, "side_call"),
        (replace(BARE, users=[SUMMARY]), BARE, True, "compacted"),
        (replace(BARE, users=[SUMMARY], tools=None, num_turns=2), BARE, True, "compacted"),
        (Opening(users=[ASK_TITLE], max_new_tokens=30), BARE_CHAT, True, "title"),
        (Opening(users=[ASK_TITLE], max_new_tokens=30), BARE_CHAT, False, "title"),
        (Opening(users=[ASK_TITLE], max_new_tokens=30), replace(BARE_CHAT, max_new_tokens=30), True, "compacted"),
        (Opening(users=BARE.users, max_new_tokens=30), BARE, False, "other_tools"),
        (Opening(users=BARE.users, max_new_tokens=1), BARE_CHAT, False, "edited"),
        (Opening(users=[ASK_TITLE], max_new_tokens=4000), BARE_CHAT, True, "compacted"),
        # prompts that are no chats
        (RAW, AGENT, False, "main"),
        (RAW, RAW, False, "main"),
    ],
)
def test_the_kind_of_a_conversation(opening: Opening, main: Opening, has_summary: bool, kind: str) -> None:
    assert kind_of(opening, main, has_summary) == kind


@pytest.mark.parametrize(
    ("openings", "index"),
    [
        ([AGENT], 0),
        ([replace(NAMER, max_new_tokens=1), NAMER, AGENT, replace(AGENT, tools="t2")], 2),
        ([NAMER, CHAT], 1),
        ([replace(NAMER, max_new_tokens=1), replace(CHAT, num_turns=1)], 1),
        ([NAMER], 0),
        ([replace(NAMER, max_new_tokens=1)], 0),
        ([RAW, RAW], 0),
    ],
)
def test_the_main_conversation_may_begin_later(openings: list[Opening], index: int) -> None:
    assert find_main(openings) == index


def graph_with(*parents: int | None) -> TrajectoryGraph:
    """A graph in which a turn follows each prompt and a prompt follows each turn. `parents`: parent of each node."""
    graph, depths = TrajectoryGraph("s"), list[int]()
    for parent in parents:
        depths.append(0 if parent is None else depths[parent] + 1)
        is_turn = depths[-1] % 2 == 1
        content = message("assistant", "x") if is_turn else {"messages": [message("user", "a")], "tools": []}
        fields: Any = {"logprobs": [-1.0], "spans": [Span(1, 0, 1)]} if is_turn else {}
        reason = ForkReason.SAMPLE if graph.children(parent) else None
        graph.add_node(parent, [1], sampled=is_turn, message=content, fork_reason=reason, **fields)
    return graph


@pytest.mark.parametrize(
    ("parents", "samples"),
    [
        ((None, 0, 0, 2, 3), [1]),  # the agent went on with the second turn
        ((None, 0, 0, 1, 3), [2]),  # or with the first turn
        ((None, 0, 1, 2, 0, 4, 5), [1]),  # an attempt that died, and the attempt after it
        ((None, 0, 0, 1, 3, 2, 5), [1]),  # with both, and at last with the second turn
        ((None, 0, 0, 2, 3, 1, 5), [2]),
        ((None, 0, 1, 2, 0), [4]),  # the sample was recorded after the turns with which the agent went on
        ((None, 0, 0), [1]),  # with none: the reply that it received last
    ],
)
def test_the_branch_that_went_on_last_is_no_sample(parents: tuple[int | None, ...], samples: list[int]) -> None:
    found = label_conversations(graph_with(*parents))
    assert [node for node, kind in found.items() if kind is ConversationKind.SAMPLE] == samples


@pytest.mark.parametrize(
    ("parents", "edited"),
    [
        ((None, 0, 1, 1, 3, 4, 5), [2]),  # the turn after the first prompt failed
        ((None, 0, 1, 2, 1), [4]),  # the turn after the last prompt failed
        ((None, 0, 1, 1), [2]),  # both failed
        ((None, 0, 1, 2, 1, 4), [2]),  # the agent went on with the last prompt
        ((None, 0, 1, 2, 1, 4, 3), [4]),  # or with the first prompt
    ],
)
def test_the_prompt_that_went_on_last_is_not_edited(parents: tuple[int | None, ...], edited: list[int]) -> None:
    graph = graph_with(*parents)
    found = label_conversations(graph)
    assert found == {0: "main"} | dict.fromkeys(edited, "edited")


def test_the_request_for_a_summary_is_not_the_branch_that_went_on() -> None:
    """The agent has asked for the summary in place of its last message."""
    graph = graph_with(None, 0, 1, 2, 1)
    summary: Any = {"logprobs": [-1.0], "spans": [Span(1, 0, 1)], "message": message("assistant", SUMMARY)}
    graph.add_node(4, [1], sampled=True, **summary)
    prompt = {"messages": [message("user", SUMMARY)], "tools": []}
    root = graph.add_node(None, [1], sampled=False, message=prompt, fork_reason=ForkReason.COMPACTED).id
    graph.add_node(root, [1], sampled=True, **summary)
    assert label_conversations(graph) == {0: "main", 4: "summary", root: "compacted"}


def test_of_two_summaries_the_one_with_which_the_agent_went_on_is_no_sample() -> None:
    graph = graph_with(None, 0, 1)
    summaries = [SUMMARY, "Another summary of the conversation, with which the agent did not go on."]
    for text in summaries:
        reason = ForkReason.SAMPLE if graph.children(2) else None
        turn: Any = {"logprobs": [-1.0], "spans": [Span(1, 0, 1)], "message": message("assistant", text)}
        graph.add_node(2, [1], sampled=True, fork_reason=reason, **turn)
    prompt = {"messages": [message("user", SUMMARY)], "tools": []}
    graph.add_node(None, [1], sampled=False, message=prompt, fork_reason=ForkReason.COMPACTED)
    assert label_conversations(graph) == {0: "main", 2: "summary", 4: "sample", 5: "compacted"}
    for note in label_conversations(graph).items():
        graph.add_note(note[0], KIND_NOTE, note[1].value)
    assert [(link.source, link.target) for link in find_links(graph, set(range(6)))] == [(3, 5)]


@pytest.mark.parametrize(("num_others", "kind"), [(MAX_COMPARED_TURNS - 1, "compacted"), (MAX_COMPARED_TURNS, "main")])
def test_a_summary_is_looked_for_in_the_last_turns(num_others: int, kind: str) -> None:
    """Other conversations have ended after the summary was written."""
    graph = TrajectoryGraph("s")

    def add_conversation(system: str, task: str, turn: str) -> int:
        """The first node of a conversation of one turn."""
        prompt = {"messages": [message("system", system), message("user", task)], "tools": [tool("read")]}
        reason = ForkReason.SUB_AGENT if graph.nodes else None
        root = graph.add_node(None, [1], sampled=False, message=prompt, fork_reason=reason, tools_digest="t").id
        content = message("assistant", turn)
        graph.add_node(root, [2], sampled=True, logprobs=[-1.0], spans=[Span(1, 0, 1)], message=content)
        return root

    add_conversation("You are an agent.", "Fix the bug.", SUMMARY)
    for number in range(num_others):
        add_conversation("You search files.", f"Find the bug {number}.", "It is in a.py.")
    root = add_conversation("You are an agent.", f"The session continues.\n{SUMMARY}", "Done.")
    assert label_conversations(graph)[root] == kind


# -- a session on a real server ---------------------------------------------------------------------------


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
