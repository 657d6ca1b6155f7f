"""The tests of `test_gateway_conversations.py` that need servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_helpers import RecordingGenerateFn
from test_gateway_conversations import message, tool
from transformers import AutoTokenizer

from verl_server import VerlEngine
from verl_server.agent import RolloutLimits
from verl_server.errors import BadInputError
from verl_server.gateway import ConversationKind, Gateway, label_conversations, trained_ends
from verl_server.trajectory import ChatRenderer, ForkReason, TrajectoryGraph, load_session


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
