"""Which recorded path a request of the gateway continues, and what is trained at the end. No test needs a server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_helpers import ScriptedGenerateFn
from helpers import chat_tokenizer

from verl_server.agent import RolloutLimits
from verl_server.errors import BadInputError, NotReadyError
from verl_server.gateway import Gateway
from verl_server.trajectory import ChatRenderer, TrajectoryGraph, load_session, to_batch

LIMITS = RolloutLimits(max_context_tokens=4000, max_turns=1000)
MakeGateway = Callable[..., Gateway]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def make(tokenizer: Any, tmp_path: Path) -> Iterator[MakeGateway]:
    """Makes gateways with the same folder, whose policy says what a function writes."""
    made = list[Gateway]()

    def make(reply: Callable[[str], str]) -> Gateway:
        for gateway in made:
            gateway.shutdown()
        policy = ScriptedGenerateFn(tokenizer, reply)
        made.append(Gateway(policy, tmp_path, renderer=ChatRenderer(tokenizer), limits=LIMITS))
        return made[-1]

    yield make
    for gateway in made:
        gateway.shutdown()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(gateway: Gateway, key: str, messages: list[Any], **fields: Any) -> httpx.Response:
    url, body = f"{gateway.openai_url}/chat/completions", {"model": "m", "messages": messages, **fields}
    return httpx.post(url, json=body, headers={"x-api-key": key}, timeout=20.0)


def message_of(reply: httpx.Response) -> Any:
    message = reply.json()["choices"][0]["message"]
    return {name: message[name] for name in ("role", "content")}


def graph_of(gateway: Gateway, session_id: str) -> TrajectoryGraph:
    return load_session(gateway.config.run_dir / f"{session_id}.jsonl")


def test_a_prompt_without_a_turn_is_not_trained(make: MakeGateway) -> None:
    def reply(prompt: str) -> str:
        if "fail" in prompt:
            raise NotReadyError("no replica serves")
        return "hello"

    gateway = make(reply)
    session, key = gateway.create_session()
    assert ask(gateway, key, [user("fail")]).status_code == 503
    first = message_of(ask(gateway, key, [user("a")]))
    assert ask(gateway, key, [user("a"), first, user("fail")]).status_code == 503
    gateway.end_session(session.id, 0.5)
    graph = graph_of(gateway, session.id)
    segments = graph.trained_segments
    assert segments is not None
    assert [graph.node(leaf).sampled for leaf, _ in segments] == [True]
    assert to_batch([(graph, leaf) for leaf, _ in segments], 0)["rm_scores"].sum() == 0.5


def test_a_message_after_an_unused_turn_continues_the_path(make: MakeGateway) -> None:
    """The conversation of the failed request is a recorded prompt, after which no message can be appended."""
    replies: Iterator[Any] = iter(["<think>long</think>one", NotReadyError("busy"), "two"])

    def reply(prompt: str) -> str:
        found = next(replies)
        if isinstance(found, Exception):
            raise found
        return str(found)

    gateway = make(reply)
    session, key = gateway.create_session()
    first = message_of(ask(gateway, key, [user("a")]))
    assert ask(gateway, key, [user("a"), first, user("b")]).status_code == 503
    assert ask(gateway, key, [user("a"), first, user("b"), user("c")]).status_code == 200
    graph = graph_of(gateway, session.id)
    last = [node for node in graph.nodes if node.sampled][-1]
    assert [node.sampled for node in graph.path(last.id)] == [False, True, False, True]


def test_turns_that_say_the_same_are_continued_in_turn(make: MakeGateway) -> None:
    thoughts = iter(["one", "two"])
    gateway = make(lambda prompt: "end" if "more" in prompt else f"<think>{next(thoughts)}</think>Done")
    session, key = gateway.create_session()
    turns = [message_of(ask(gateway, key, [user("a")])) for _ in range(2)]
    for number, turn in enumerate(turns):
        ask(gateway, key, [user("a"), turn, user(f"more {number}")])
    graph = graph_of(gateway, session.id)
    assert len(graph.leaves) == 2
    assert sorted(graph.num_turns(leaf) for leaf in graph.leaves) == [2, 2]


def repeat_chat(reply: Any) -> list[Any]:
    return [reply["choices"][0]["message"]]


def repeat_message(reply: Any) -> list[Any]:
    return [{"role": "assistant", "content": reply["content"]}]


def repeat_items(reply: Any) -> list[Any]:
    return list(reply["output"])


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "repeat"),
    [
        ("/v1/chat/completions", "messages", repeat_chat),
        ("/v1/messages", "messages", repeat_message),
        ("/v1/responses", "input", repeat_items),
    ],
)
def test_a_thought_tells_turns_apart_that_say_the_same(
    make: MakeGateway, path: str, field: str, repeat: Callable[[Any], list[Any]], is_restarted: bool
) -> None:
    """Also a thought that is a part of another thought, and if the next message is the same, too. The recorded text of
    the third turn lacks the special token in its thought.
    """
    thoughts = ["first, and no second", "second", "third<|im_start|>"]
    replies = iter([*(f"<think>\n{thought}\n</think>\n\nDone" for thought in thoughts), *["end"] * 4])
    gateway = make(lambda prompt: next(replies))
    session, key = gateway.create_session()

    def post(messages: list[Any]) -> Any:
        body = {"model": "m", field: messages} | ({"max_tokens": 100} if field == "messages" else {})
        return httpx.post(f"{gateway.url}{path}", json=body, headers={"x-api-key": key}, timeout=20.0).json()

    turns = [repeat(post([user("a")])) for _ in thoughts]
    if is_restarted:
        gateway = make(lambda prompt: next(replies))
    continued = [1, 2, 0, 1]
    for number in continued:
        post([user("a"), *turns[number], user("more")])
    graph = graph_of(gateway, session.id)
    ends = [node for node in graph.nodes if node.sampled][len(thoughts) :]
    found = [(graph.path(end.id)[1].message or {})["content"] for end in ends]
    said = ["first, and no second", "second", "third"]
    assert [said.index(str(text).split("\n")[1]) for text in found] == continued


def test_conversations_with_equal_tokens_are_told_apart_after_a_restart(make: MakeGateway) -> None:
    """The chat template does not write the ids of results. Turns that say the same belong to their conversations."""
    thoughts = iter(["one", "two"])

    def prompt(call_id: str) -> list[Any]:
        result = {"role": "tool", "tool_call_id": call_id, "content": "3"}  # of a call that the history lacks
        return [user("a"), {"role": "assistant", "content": "I add."}, result]

    gateway = make(lambda prompt: f"<think>{next(thoughts)}</think>Done")
    session, key = gateway.create_session()
    turns = [message_of(ask(gateway, key, prompt(call_id))) for call_id in ("x", "y")]
    graph = graph_of(gateway, session.id)
    first, second = (node for node in graph.nodes if node.sampled)
    assert graph.token_ids(first.parent or 0) == graph.token_ids(second.parent or 0)
    gateway = make(lambda prompt: "end")
    for call_id, turn, node in (("y", turns[1], second), ("x", turns[0], first)):
        assert ask(gateway, key, [*prompt(call_id), turn, user("more")]).status_code == 200
        graph = graph_of(gateway, session.id)
        assert graph.path(graph.nodes[-1].id)[1] == node


def test_the_branch_of_each_request_has_a_name_of_its_own(make: MakeGateway) -> None:
    """Also after a restart, and if tokens were counted, which records nothing."""
    _, key = make(lambda prompt: "hello").create_session("s")
    for start in range(3):
        gateway = make(lambda prompt: "hello")
        messages = [user(f"{start}")]
        for _ in range(2):
            url, body = f"{gateway.url}/v1/messages/count_tokens", {"model": "m", "messages": messages}
            assert httpx.post(url, json=body, headers={"x-api-key": key}, timeout=20.0).status_code == 200
            assert ask(gateway, key, messages).status_code == 200
    names = [node.branch for node in graph_of(gateway, "s").nodes if node.sampled]
    assert names == [str(number) for number in range(6)]


DEEP = "[" * 300 + "]" * 300


@pytest.mark.parametrize(
    "text",
    ['<tool_call>{"name": "add", "arg', f'<tool_call>{{"name": "add", "arguments": {{"a": {DEEP}}}}}</tool_call>'],
)
def test_a_call_that_cannot_be_repeated_stays_in_the_text(make: MakeGateway, text: str) -> None:
    gateway = make(lambda prompt: text)
    session, key = gateway.create_session()
    reply = ask(gateway, key, [user("a")])
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    assert message_of(reply)["content"] == text
    ask(gateway, key, [user("a"), message_of(reply), user("b")])
    assert len(graph_of(gateway, session.id).leaves) == 1


def test_text_after_a_call_is_in_the_reply(make: MakeGateway) -> None:
    gateway = make(lambda prompt: 'Before<tool_call>{"name": "add", "arguments": {}}</tool_call>after')
    _, key = gateway.create_session()
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    reply = ask(gateway, key, [user("a")], tools=[add])
    assert message_of(reply)["content"] == "Before\nafter"
    assert len(reply.json()["choices"][0]["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_have_the_bytes_of_tokens_that_end_within_a_character(make: MakeGateway, stream: bool) -> None:
    gateway = make(lambda prompt: "é 日本 🙂")
    _, key = gateway.create_session()
    reply = ask(gateway, key, [user("a")], logprobs=True, stream=stream).text
    bodies = [line.removeprefix("data: ") for line in reply.split("\n\n")[:-2]] if stream else [reply]
    found = [choice["logprobs"] for body in bodies for choice in json.loads(body)["choices"]]
    entries = [entry for logprobs in found if logprobs for entry in logprobs["content"]]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == "é 日本 🙂".encode()
    assert len(entries) == 14
    assert [entry["token"] for entry in entries[:3]] == ["\ufffd", "\ufffd", " "]


def test_limits_of_a_session_hold_over_a_restart(make: MakeGateway) -> None:
    _, key = make(lambda prompt: "hello").create_session(limits={"max_turns": 1})
    gateway = make(lambda prompt: "hello")
    assert ask(gateway, key, [user("a")]).status_code == 200
    gateway = make(lambda prompt: "hello")
    assert ask(gateway, key, [user("b")]).status_code == 429


def test_a_record_without_its_settings_is_not_taken_over(make: MakeGateway) -> None:
    gateway = make(lambda prompt: "hello")
    _, key = gateway.create_session("old")
    ask(gateway, key, [user("a")])
    (gateway.config.run_dir / "old.session.json").unlink()
    with pytest.raises(BadInputError, match="choose another id"):
        make(lambda prompt: "hello").create_session("old")


def test_a_session_that_cannot_be_ended_does_not_end_the_gateway(
    make: MakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_server.gateway.gateway.EXPIRY_INTERVAL_S", 0.05)
    gateway = make(lambda prompt: "hello")
    session, key = gateway.create_session(expires_in_s=0.2)
    ask(gateway, key, [user("a")])
    gateway.config.run_dir.joinpath(f"{session.id}.jsonl").write_text("damaged\n")
    time.sleep(0.5)
    _, other = gateway.create_session()
    assert ask(gateway, other, [user("a")]).status_code == 200
