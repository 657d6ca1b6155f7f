"""The gateway on a real server: sessions, exact tokens, repeated requests, and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from agent_helpers import TOOL_CALL_REGEX, RecordingGenerateFn
from helpers import adapter_of
from transformers import AutoTokenizer

from verl_server import VerlEngine
from verl_server.adapter.sglang.replies import count_requests
from verl_server.agent import RolloutLimits
from verl_server.gateway import Gateway
from verl_server.trajectory import ChatRenderer, TrajectoryGraph, load_session, to_batch

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
SHORT = {"max_new_tokens": 100, "temperature": 1.0}
FORCED_CALL = {**SHORT, "regex": TOOL_CALL_REGEX}


@pytest.fixture(scope="module")
def generate(shared_engine: VerlEngine) -> RecordingGenerateFn:
    return RecordingGenerateFn(shared_engine)


@pytest.fixture(scope="module")
def gateway(
    generate: RecordingGenerateFn, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    limits = RolloutLimits(max_context_tokens=2000, max_turns=1000)
    with Gateway(generate, tmp_path_factory.mktemp("run"), renderer=renderer, limits=limits) as gateway:
        yield gateway


def graph_of(gateway: Gateway, session_id: str) -> TrajectoryGraph:
    return load_session(gateway.config.run_dir / f"{session_id}.jsonl")


def openai_client(gateway: Gateway, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.openai_url, api_key=key, max_retries=0)


@pytest.mark.smoke
def test_a_conversation_with_tools_is_one_path(gateway: Gateway, generate: RecordingGenerateFn) -> None:
    info, key = gateway.create_session(sampling_params=FORCED_CALL)
    generate.prompts.clear()
    client = openai_client(gateway, key)
    messages: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2"}]
    for _ in range(3):
        reply = client.chat.completions.create(model="any-name", messages=messages, tools=[ADD])
        assert reply.model == "any-name"
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        messages.append(choice.message.model_dump(exclude_none=True))
        # The agent writes the arguments in its own way.
        arguments = json.dumps(json.loads(call.function.arguments), indent=2, sort_keys=True)  # type: ignore[union-attr]
        messages[-1]["tool_calls"][0]["function"]["arguments"] = arguments
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    graph = graph_of(gateway, info.id)
    assert len(graph.leaves) == 1
    sampled = [node for node in graph.nodes if node.sampled]
    assert [graph.token_ids(node.parent) for node in sampled if node.parent is not None] == generate.prompts
    assert len(sampled) == 3


def test_a_wrong_key_is_refused(gateway: Gateway) -> None:
    with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
        openai_client(gateway, "sk-wrong").chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}]
        )
    body = httpx.get(f"{gateway.url}/admin/sessions", headers={"Authorization": "Bearer sk-wrong"})
    assert body.status_code == 401


def ask(gateway: Gateway, key: str, content: Any, *, retry: int = 0, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    headers = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": str(retry)}
    return httpx.post(f"{gateway.openai_url}/chat/completions", json=body, headers=headers, timeout=60.0)


def num_turns(graph: TrajectoryGraph) -> int:
    return sum(node.sampled for node in graph.nodes)


def test_a_repeated_request_is_one_turn(gateway: Gateway) -> None:
    """A client that repeats a request because it lost the reply gets the same turn. Another request is another turn."""
    info, key = gateway.create_session(sampling_params=SHORT)
    first = ask(gateway, key, "a").json()
    assert ask(gateway, key, "a", retry=1).json()["choices"] == first["choices"]
    assert num_turns(graph_of(gateway, info.id)) == 1
    ask(gateway, key, "a")
    graph = graph_of(gateway, info.id)
    assert num_turns(graph) == 2
    assert len(graph.nodes) == 3, "both turns follow the same prompt"


@pytest.mark.smoke
def test_repeated_requests_share_a_running_turn(gateway: Gateway) -> None:
    info, key = gateway.create_session(sampling_params={"max_new_tokens": 200, "ignore_eos": True})
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda retry: ask(gateway, key, "a", retry=retry), (1, 2, 3, 4)))
    assert len({reply.json()["choices"][0]["message"]["content"] for reply in replies}) == 1
    assert num_turns(graph_of(gateway, info.id)) == 1


def test_a_client_that_leaves_and_comes_back_gets_its_turn(gateway: Gateway) -> None:
    info, key = gateway.create_session(sampling_params={"max_new_tokens": 300, "ignore_eos": True})
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{gateway.openai_url}/chat/completions"
    for _ in range(2):  # without the header of a repeated request
        with httpx.stream("POST", url, json=body, headers=headers, timeout=60.0) as reply:
            next(reply.iter_lines())
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60.0) as reply:
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert num_turns(graph_of(gateway, info.id)) == 1


def test_a_client_that_is_gone_for_good_ends_its_turn(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, shared_engine: VerlEngine
) -> None:
    monkeypatch.setattr("verl_server.gateway.sessions.turns.ABANDONED_S", 0.2)
    info, key = gateway.create_session(sampling_params={"max_new_tokens": 1900, "ignore_eos": True})
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{gateway.openai_url}/chat/completions",
            json={"model": "m", "messages": [{"role": "user", "content": "a"}]},
            headers={"Authorization": f"Bearer {key}"},
            timeout=0.3,
        )
    deadline = time.monotonic() + 20
    while count_requests(adapter_of(shared_engine).get_loads()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert time.monotonic() < deadline, "the server still generates"
    assert num_turns(graph_of(gateway, info.id)) == 0
    assert ask(gateway, key, "a", max_tokens=5).status_code == 200, "the session goes on"


def test_too_many_tokens_are_said_in_words_of_the_dialect(gateway: Gateway) -> None:
    info, key = gateway.create_session(sampling_params=SHORT)
    reply = ask(gateway, key, "word " * 3000)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is" in reply.json()["error"]["message"]
    assert ask(gateway, key, "a", max_tokens=1_000_000).status_code == 200, "max_tokens is cut to what is left"
    assert num_turns(graph_of(gateway, info.id)) == 1


def test_a_limit_of_a_session_ends_only_this_session(gateway: Gateway) -> None:
    _, key = gateway.create_session(sampling_params=SHORT, limits={"max_turns": 1})
    assert ask(gateway, key, "a").status_code == 200
    reply = ask(gateway, key, "b")
    assert reply.status_code == 429
    assert "max_turns" in reply.json()["error"]["message"]
    assert reply.headers["x-should-retry"] == "false"
    _, other = gateway.create_session(sampling_params=SHORT)
    assert ask(gateway, other, "a").status_code == 200


def test_an_ended_session_has_its_reward_and_accepts_no_request(gateway: Gateway) -> None:
    info, key = gateway.create_session(sampling_params=SHORT, metadata={"task": 7})
    ask(gateway, key, "a")
    ask(gateway, key, "b")
    ended = gateway.end_session(info.id, 0.5, metadata={"passed": 1})
    assert (ended.metadata, ended.stop_reason) == ({"task": 7, "passed": 1}, "done")
    graph = graph_of(gateway, info.id)
    termination = graph.last_termination
    assert termination is not None
    assert termination.reward == 0.5
    batch = to_batch([(graph, leaf) for leaf, _ in termination.segments or ()], 0)
    assert batch["input_ids"].shape[0] == 2
    reply = ask(gateway, key, "c")
    assert reply.status_code == 403
    assert "has ended" in reply.json()["error"]["message"]


def test_sessions_do_not_see_each_other(gateway: Gateway) -> None:
    first, first_key = gateway.create_session("trial-1", sampling_params=SHORT)
    _, second_key = gateway.create_session("trial-2", sampling_params=SHORT)
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    paths = {f"session/{first_key}": 200, f"session/{first.id}": 404, "session/..%2f..%2fetc": 401}
    for path, status in paths.items():
        url = f"{gateway.url}/{path}/v1/chat/completions"
        reply = httpx.post(url, json=body, headers={"x-api-key": second_key}, timeout=60.0)
        assert reply.status_code in (status, 404), (path, reply.text)
    assert num_turns(graph_of(gateway, "trial-1")) == 1


def test_the_admin_api(gateway: Gateway) -> None:
    headers = {"Authorization": f"Bearer {gateway.admin_key}"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=60.0) as admin:
        made = admin.post("/admin/sessions", json={"session_id": "by-http", "sampling_params": SHORT}).json()
        assert "key_digest" not in made
        ask(gateway, made["key"], "a")
        assert "by-http" in [info["id"] for info in admin.get("/admin/sessions").json()["sessions"]]
        ended = admin.post("/admin/sessions/by-http/end", json={"reward": 1.0}).json()
        assert ended["reward"] == 1.0
        record = admin.get("/admin/sessions/by-http/record").text
        assert made["key"] not in record
        assert len(record.splitlines()) == 6
        assert admin.get("/admin/sessions/unknown").status_code == 404
        assert admin.post("/admin/sessions", json={"session_id": "../x"}).status_code == 400
        assert admin.post("/admin/sessions", json={"limits": {"max_turn": 1}}).status_code == 400
    for path in gateway.config.run_dir.iterdir():
        assert made["key"].encode() not in path.read_bytes()


def test_a_gateway_that_starts_again_serves_its_sessions(
    generate: RecordingGenerateFn, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """A turn that was recorded and perhaps not delivered is returned once. Then the conversation goes on."""
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    options: Any = {"renderer": renderer, "limits": RolloutLimits(max_context_tokens=2000, max_turns=1000)}
    messages: list[Any] = [{"role": "user", "content": "1 + 2"}]
    replies = list[Any]()
    for number in range(3):
        with Gateway(generate, tmp_path, **options) as gateway:
            if number == 0:
                _, key = gateway.create_session("trial", sampling_params=FORCED_CALL)
            client = openai_client(gateway, key)
            for _ in range(2 if number == 0 else 1):
                reply = client.chat.completions.create(model="m", messages=messages, tools=[ADD])
                replies.append(reply.choices[0].message)
                if number == 0 and len(replies) == 1:
                    messages += [
                        replies[-1].model_dump(exclude_none=True),
                        {"role": "tool", "tool_call_id": replies[-1].tool_calls[0].id, "content": "3"},
                    ]
            if number == 1:
                assert replies[-1] == replies[-2], "the turn before the restart was perhaps not delivered"
                call_id = replies[-1].tool_calls[0].id
                messages += [
                    replies[-1].model_dump(exclude_none=True),
                    {"role": "tool", "tool_call_id": call_id, "content": "4"},
                ]
            graph = graph_of(gateway, "trial")
    assert len(graph.leaves) == 1
    assert num_turns(graph) == 3


@pytest.mark.parametrize("url", ["/etc/hostname", "http://127.0.0.1:1/a.png", "file:///etc/hostname", 5, None])
def test_images_outside_of_the_request_are_not_read(gateway: Gateway, url: Any) -> None:
    info, key = gateway.create_session(sampling_params=SHORT)
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    reply = ask(gateway, key, content)
    if not isinstance(url, str):
        assert (reply.status_code, "'image_url' must be a URL" in reply.text) == (400, True)
        return
    assert reply.status_code == 200
    (message,) = (graph_of(gateway, info.id).nodes[0].message or {})["messages"]
    assert message["content"] == "a[image omitted: the gateway downloads no files]"
