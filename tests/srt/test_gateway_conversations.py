"""Kinds of the conversations of a session: the rules, and a session with side calls on a real server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_helpers import RecordingGenerateFn
from transformers import AutoTokenizer

from verl_server import VerlEngine
from verl_server.agent import RolloutLimits
from verl_server.errors import BadInputError
from verl_server.gateway import ConversationKind, Gateway, label_conversations, trained_ends
from verl_server.gateway.sessions.history import MAX_COMPARED_TURNS, Opening, find_main, kind_of
from verl_server.trajectory import ChatRenderer, ForkReason, Span, TrajectoryGraph, load_session
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


class Agent:
    """An agent program with side calls."""

    def __init__(self, gateway: Gateway, key: str) -> None:
        self._gateway, self._key = gateway, key

    def ask(self, system: str, messages: list[Any], tools: list[str], **fields: Any) -> dict[str, Any]:
        """The message of the next turn."""
        body = {"model": "m", "messages": [message("system", system), *messages], "max_tokens": 100, **fields}
        headers = {"Authorization": f"Bearer {self._key}"}
        if tools:
            body["tools"] = [tool(name) for name in tools]
        url = f"{self._gateway.openai_url}/chat/completions"
        reply = httpx.post(url, json=body, headers=headers, timeout=60.0)
        assert reply.status_code == 200, reply.text
        turn: dict[str, Any] = reply.json()["choices"][0]["message"]
        return turn

    def run(self) -> None:
        """A title, the task, a sub-agent, a summary of the task, the task with the summary, and an edited message."""
        task, system, tools = [message("user", "<env>x</env>\nFix the bug.")], "You are an agent.", ["read", "task"]
        self.ask("Write a title.", [message("user", "Fix the bug.")], [])
        task += [self.ask(system, task, tools), message("user", "go on")]
        self.ask("You search files.", [message("user", "Find the bug.")], ["read"])
        task += [self.ask(system, task, tools), message("user", "Summarise the conversation.")]
        summary = self.ask(system, task, tools)
        going_on = [message("user", f"This session continues. Summary:\n{summary['content']}")]
        going_on += [self.ask(system, going_on, tools), message("user", "now test")]
        self.ask(system, going_on, tools)
        going_on[-1] = message("user", "now test all")
        self.ask(system, going_on, tools)
        self.ask(system, going_on, tools)  # another sample


KINDS = ["title", "main", "sub_agent", "compacted", "summary", "edited", "sample"]


@pytest.fixture(scope="module")
def start(shared_engine: VerlEngine, tiny: Callable[..., Path]) -> Callable[..., Gateway]:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    generate = RecordingGenerateFn(shared_engine)
    limits = RolloutLimits(max_context_tokens=3000, max_turns=1000)
    return lambda run_dir: Gateway(generate, run_dir, renderer=renderer, limits=limits)


def labels(graph: TrajectoryGraph) -> dict[int | None, str]:
    return {note.node: note.value for note in graph.notes if note.name == "conversation"}


def text_of(graph: TrajectoryGraph, node: int) -> str:
    return str((graph.node(node).message or {}).get("messages"))


def test_side_calls_are_labelled_and_titles_are_not_trained(start: Callable[[Path], Gateway], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with start(tmp_path) as gateway:
        _, key = gateway.create_session("a", sampling_params={"regex": "[a-z]{50}", "temperature": 1.0})
        Agent(gateway, key).run()
        graph = load_session(path)
        found = label_conversations(graph)
    with start(tmp_path) as gateway:
        gateway.end_session("a", reward=0.5)
        graph = load_session(path)
        assert labels(graph) == found, "the restart changes no label"
        starts = {kind: text_of(graph, node) for node, kind in found.items()}
        assert sorted(starts) == sorted(KINDS)
        assert "Write a title" in starts[ConversationKind.TITLE]
        assert "Fix the bug" in starts[ConversationKind.MAIN]
        assert "Find the bug" in starts[ConversationKind.SUB_AGENT]
        assert "Summarise" in starts[ConversationKind.SUMMARY]
        assert "session continues" in starts[ConversationKind.COMPACTED]
        assert "now test" in starts[ConversationKind.EDITED]
        assert "test all" not in starts[ConversationKind.EDITED], "the agent went on with this message"
        compacted = next(node for node, kind in found.items() if kind is ConversationKind.COMPACTED)
        assert graph.node(compacted).fork_reason is ForkReason.COMPACTED
        (title,) = (node for node, kind in found.items() if kind is ConversationKind.TITLE)
        trained = [leaf for leaf, _ in graph.trained_segments or ()]
        assert len(trained) == 5
        assert all(graph.path(leaf)[0].id != title for leaf in trained)
        assert graph.rewards == {leaf: [0.5] for leaf in trained}
        gateway.end_session("a", train=["main"])
        graph = load_session(path)
        (main,) = (leaf for leaf, _ in graph.trained_segments or ())
        assert graph.num_turns(main) == 2, "the summary is a turn of its own kind"
        assert graph.rewards == {main: [0.5]}
        (chosen,) = trained_ends(graph, label_conversations(graph), trained={"title"})
        assert graph.path(chosen)[0].id == title, "the reader can choose other kinds"
        with pytest.raises(BadInputError, match="train has the kind 'titles'"):
            gateway.end_session("a", train=["titles"])


def test_a_prompt_that_is_too_long_is_noted(start: Callable[[Path], Gateway], tmp_path: Path) -> None:
    with start(tmp_path) as gateway:
        _, key = gateway.create_session("a", sampling_params={"max_new_tokens": 5})
        agent = Agent(gateway, key)
        turn = agent.ask("s", [message("user", "a")], [])
        with pytest.raises(AssertionError, match="context_length_exceeded"):
            agent.ask("s", [message("user", "a"), turn, message("user", "word " * 1500)], [])
    (note,) = load_session(tmp_path / "a.jsonl").notes
    assert (note.node, note.name, note.value["limit"]) == (1, "refused", "max_context_tokens")
    assert note.value["num_tokens"] > 3000
