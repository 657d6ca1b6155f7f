"""A gateway that starts again with the folder of an earlier gateway: the same turns, texts and limits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_helpers import RecordingGenerateFn
from transformers import AutoTokenizer

from verl_server import VerlEngine
from verl_server.agent import RolloutLimits
from verl_server.gateway import Gateway
from verl_server.trajectory import ChatRenderer, TrajectoryGraph, load_session

LIMITS = RolloutLimits(max_context_tokens=2000, max_turns=1000)
SHORT = {"max_new_tokens": 20, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def start(shared_engine: VerlEngine, tiny: Callable[..., Path]) -> Callable[..., Gateway]:
    """Starts a gateway with a folder."""
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))
    generate = RecordingGenerateFn(shared_engine)

    def start(run_dir: Path, **options: Any) -> Gateway:
        return Gateway(generate, run_dir, **{"renderer": renderer, "limits": LIMITS, **options})

    return start


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(gateway: Gateway, key: str, messages: Any, *, retry: int = 0, headers: Any = (), **fields: Any) -> Any:
    """The reply to a chat."""
    body = {"model": "m", "messages": [user(messages)] if isinstance(messages, str) else messages, **fields}
    known = {"Authorization": f"Bearer {key}", "x-stainless-retry-count": str(retry), **dict(headers)}
    reply = httpx.post(f"{gateway.openai_url}/chat/completions", json=body, headers=known, timeout=60.0)
    assert reply.status_code == 200, reply.text
    return reply.json()


def graph_of(gateway: Gateway, session_id: str = "a") -> TrajectoryGraph:
    return load_session(gateway.config.run_dir / f"{session_id}.jsonl")


def num_turns(gateway: Gateway) -> int:
    return sum(node.sampled for node in graph_of(gateway).nodes)


def test_only_the_same_request_gets_the_recorded_turn(start: Callable[..., Gateway], tmp_path: Path) -> None:
    with start(tmp_path) as gateway:
        _, key = gateway.create_session("a", sampling_params=SHORT)
        first = ask(gateway, key, "a")
    with start(tmp_path) as gateway:
        other = ask(gateway, key, "a", max_tokens=5)
        assert other["id"] != first["id"], "another body with the same prompt has a turn of its own"
        assert ask(gateway, key, "a")["id"] == first["id"], "the turn was perhaps not delivered"
        assert ask(gateway, key, "a", retry=1)["id"] == first["id"]
        assert ask(gateway, key, "a")["id"] not in (first["id"], other["id"]), "another sample of the prompt"
        assert num_turns(gateway) == 3


def test_a_repeated_request_gets_its_turn_although_other_turns_followed(
    start: Callable[..., Gateway], tmp_path: Path
) -> None:
    with start(tmp_path) as gateway:
        _, key = gateway.create_session("a", sampling_params=SHORT)
        first = ask(gateway, key, "a")
        messages = [user("a"), first["choices"][0]["message"], user("b")]
        second = ask(gateway, key, messages)
    with start(tmp_path) as gateway:
        for _ in range(2):
            assert ask(gateway, key, "a", retry=1)["choices"] == first["choices"]
        assert ask(gateway, key, messages, retry=2)["choices"] == second["choices"]
        assert num_turns(gateway) == 2
        ask(gateway, key, "a")
        assert num_turns(gateway) == 3, "the agent has continued the turn, so it wants another sample"


def test_a_turn_that_ended_at_a_stop_sequence_keeps_its_text(start: Callable[..., Gateway], tmp_path: Path) -> None:
    """The tokens of the turn contain the stop sequence, and the text that the agent repeats does not."""
    sampling = {**SHORT, "regex": "[a-z]{4}XY[a-z]{4}", "max_new_tokens": 100, "ignore_eos": False}
    with start(tmp_path) as gateway:
        _, key = gateway.create_session("a", sampling_params=sampling)
        first = ask(gateway, key, "a", stop=["XY"])["choices"][0]
        assert "XY" not in first["message"]["content"]
    with start(tmp_path) as gateway:
        assert ask(gateway, key, "a", stop=["XY"], retry=1)["choices"][0] == first
        ask(gateway, key, [user("a"), first["message"], user("b")], stop=["XY"])
        graph = graph_of(gateway)
    assert len(graph.leaves) == 1, "the conversation goes on after the recorded turn"
    (turn, _) = (node for node in graph.nodes if node.sampled)
    assert (turn.message or {})["stop_sequence"] == "XY"


def test_the_seconds_of_a_session_count_from_its_creation(start: Callable[..., Gateway], tmp_path: Path) -> None:
    with start(tmp_path) as gateway:
        info, key = gateway.create_session("a", sampling_params=SHORT, limits={"timeout_s": 4.0})
        first = ask(gateway, key, "a")
    time.sleep(max(info.created_at + 4.1 - time.time(), 0.0))
    with start(tmp_path) as gateway:
        body = {"model": "m", "messages": [user("b")]}
        url, headers = f"{gateway.openai_url}/chat/completions", {"Authorization": f"Bearer {key}"}
        reply = httpx.post(url, json=body, headers=headers, timeout=60.0)
        assert reply.status_code == 429
        assert "timeout_s" in reply.json()["error"]["message"]
        assert ask(gateway, key, "a")["id"] == first["id"], "a recorded turn needs no time"
