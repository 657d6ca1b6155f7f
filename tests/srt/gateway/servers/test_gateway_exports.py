"""Exports of the gateway's sessions, through the admin API and on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_gateway_paths import MakeGateway, ask, make, message_of, tokenizer, user

from verl_server import VerlEngine
from verl_server.agent import RolloutLimits
from verl_server.errors import BadInputError
from verl_server.gateway import ConversationKind, Gateway
from verl_server.trajectory import (
    TrajectoryGraph,
    from_atif,
    from_verifiers,
    load_session,
    to_atif,
    to_litellm,
    to_verifiers,
)
from verl_server.trajectory.exports import ExportFormat, export_sessions
from verl_server.trajectory.graph import MAIN_KINDS, SUMMARY_KIND, recorded_kinds
from verl_server.trajectory.recorder import parse_session

__all__ = ["make", "tokenizer"]

SECRET = "sk-secret-of-the-session-0001"
LITELLM_FIELDS = {
    "id", "trace_id", "session_id", "litellm_call_id", "call_type", "stream", "response_cost", "cost_breakdown",
    "response_cost_failure_debug_info", "status", "status_fields", "custom_llm_provider", "total_tokens",
    "prompt_tokens", "completion_tokens", "startTime", "endTime", "completionStartTime", "response_time",
    "model_map_information", "model", "model_id", "model_group", "api_base", "metadata", "cache_hit", "cache_key",
    "saved_cache_cost", "request_tags", "end_user", "requester_ip_address", "user_agent", "messages", "response",
    "error_str", "error_information", "model_parameters", "hidden_params", "guardrail_information",
    "standard_built_in_tools_params",
}  # fmt: skip
"""Fields of `StandardLoggingPayload` in `litellm/types/utils.py` that every line of LiteLLM has."""
OWN_FIELDS = {"prompt_token_ids", "completion_token_ids", "completion_logprobs"}


@pytest.fixture(scope="module")
def gateway(shared_engine: VerlEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    limits = RolloutLimits(max_context_tokens=2000, max_turns=1000)
    with Gateway(shared_engine, tmp_path_factory.mktemp("run"), limits=limits) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def session(gateway: Gateway) -> TrajectoryGraph:
    """A session with a conversation of two turns, and a second sample of the first turn."""
    gateway.create_session("trial", key=SECRET, sampling_params={"max_new_tokens": 8, "temperature": 1.0})
    messages: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    for number in range(3):
        asked = messages[:2] if number == 2 else messages
        reply = httpx.post(
            f"{gateway.openai_url}/chat/completions",
            json={"model": "m", "messages": asked},
            headers={"authorization": f"Bearer {SECRET}"},
            timeout=60.0,
        ).json()
        messages += [reply["choices"][0]["message"], {"role": "user", "content": f"And {number}?"}]
    gateway.end_session("trial", reward=0.5)
    return load_session(gateway.config.run_dir / "trial.jsonl")


def read(gateway: Gateway, query: str = "", session_id: str = "trial") -> httpx.Response:
    headers = {"authorization": f"Bearer {gateway.admin_key}"}
    return httpx.get(f"{gateway.url}/admin/sessions/{session_id}/record{query}", headers=headers, timeout=60.0)


def lines_of(reply: httpx.Response) -> list[Any]:
    assert reply.status_code == 200
    return [json.loads(line) for line in reply.text.splitlines()]


def test_the_admin_api_exports_each_format(gateway: Gateway, session: TrajectoryGraph) -> None:
    turns = [node for node in session.nodes if node.sampled]
    assert len(turns) == 3
    record = read(gateway)
    assert record.content == read(gateway, "?format=jsonl").content
    assert record.content == (gateway.config.run_dir / "trial.jsonl").read_bytes()
    (episode,) = lines_of(read(gateway, "?format=verifiers&model=qwen"))
    (restored,) = from_verifiers(episode)
    assert [node.token_ids for node in restored.nodes if node.sampled] == [node.token_ids for node in turns]
    documents = lines_of(read(gateway, "?format=atif"))
    assert len(documents) == 2, "two conversations"
    assert len([node for node in from_atif(documents).nodes if node.sampled]) == 3
    for name in ("jsonl", "verifiers", "atif", "litellm"):
        assert SECRET not in read(gateway, f"?format={name}").text


def test_a_line_of_litellm_has_the_tokens_of_the_engine(gateway: Gateway, session: TrajectoryGraph) -> None:
    lines = lines_of(read(gateway, "?format=litellm&model=qwen"))
    turns = [node for node in session.nodes if node.sampled]
    assert len(lines) == len(turns)
    for line, node in zip(lines, turns, strict=True):
        assert set(line) == LITELLM_FIELDS | OWN_FIELDS
        assert (line["call_type"], line["model"], line["trace_id"]) == ("acompletion", "qwen", "trial")
        assert line["prompt_token_ids"] == session.token_ids(node.parent or 0)
        assert line["completion_token_ids"] == list(node.token_ids)
        assert line["completion_logprobs"] == list(node.logprobs)
        assert line["prompt_tokens"] == len(line["prompt_token_ids"])
        assert line["total_tokens"] == line["prompt_tokens"] + line["completion_tokens"]
        assert line["metadata"]["requester_metadata"]["reward"] == 0.5
        choice = line["response"]["choices"][0]
        assert choice["message"]["role"] == "assistant"
    assert [message["role"] for message in lines[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert lines[1]["messages"][2] == lines[0]["response"]["choices"][0]["message"]


def test_exports_have_the_kinds_of_conversations_and_the_refused_prompts(gateway: Gateway) -> None:
    """Also those of a session that runs: a file gets the kinds at the end of the session."""
    _, key = gateway.create_session("kinds", sampling_params={"max_new_tokens": 8})
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    user = {"role": "user", "content": "What is 1 + 2?"}
    title = [{"role": "system", "content": "Write a title."}, user]
    bodies: list[Any] = [{"messages": [user], "tools": [tool]}, {"messages": title}]
    long = [{"role": "user", "content": "long " * 3000}]
    for body, status in [*((body, 200) for body in bodies), ({"messages": long}, 400)]:
        headers = {"authorization": f"Bearer {key}"}
        url = f"{gateway.openai_url}/chat/completions"
        assert httpx.post(url, json={"model": "m", **body}, headers=headers, timeout=60.0).status_code == status
    known = list[TrajectoryGraph]()
    for is_ended in (False, True):
        if is_ended:
            gateway.end_session("kinds", train=["main", "title"])
        documents = lines_of(read(gateway, "?format=atif", "kinds"))
        assert [document["extra"]["conversation_kind"] for document in documents] == ["main", "title"]
        (episode,) = lines_of(read(gateway, "?format=verifiers", "kinds"))
        lines = lines_of(read(gateway, "?format=litellm", "kinds"))
        assert [line["metadata"]["requester_metadata"]["conversation_kind"] for line in lines] == ["main", "title"]
        known += [from_atif(documents), *from_verifiers(episode)]
    for graph in known:
        assert recorded_kinds(graph) == {0: "main", 2: "title"}
        (refused,) = (note for note in graph.notes if note.name == "refused")
        assert (refused.node, refused.value["limit"]) == (None, "max_context_tokens")


SUMMARIES = ["The bug is in line 42 of a.py, which was read.", "Line 42 of a.py is repaired, and the tests run now."]


@pytest.mark.parametrize("is_summary_trained", [True, False])
def test_exports_link_compacted_conversations_and_sub_agents(make: MakeGateway, is_summary_trained: bool) -> None:
    """A compacted conversation continues its summary, and a sub-agent the last turn of the main agent."""
    turns = iter(["A title", "one", SUMMARIES[0], "two", "found", "three", SUMMARIES[1], "four"])
    make(lambda prompt: next(turns)).create_session("s", key=SECRET)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

    def chat(system: str, *texts: str, tools: Any = tools) -> None:
        """A request for the next turn of a conversation, for each of its texts."""
        messages: list[Any] = [{"role": "system", "content": system}]
        gateway = make(lambda prompt: next(turns))
        for text in texts:
            messages.append(user(text))
            messages.append(message_of(ask(gateway, SECRET, messages, tools=tools)))

    chat("Write a title.", "Fix the bug.", tools=[])
    chat("You are an agent.", "Fix the bug.", "Summarise.")
    chat("You are an agent.", f"Go on: {SUMMARIES[0]}")
    chat("You search.", "Find the bug.")
    chat("You are an agent.", "Another task.", "Summarise.")
    chat("You are an agent.", f"Go on: {SUMMARIES[1]}")
    gateway = make(lambda prompt: next(turns))
    left_out = {"title"} if is_summary_trained else {"title", "summary"}
    gateway.end_session("s", train=[kind for kind in ConversationKind if kind not in left_out])
    graph = load_session(gateway.config.run_dir / "s.jsonl")
    texts = {node.id: str((node.message or {}).get("content")) for node in graph.nodes if node.sampled}
    (trace,) = to_verifiers(graph)["traces"]
    recorded = [node for node in trace["nodes"] if node["sampled"]]
    said = [node["message"]["content"] for node in recorded]
    sources = {
        said[number]: (trace["nodes"][link["node"]]["message"]["content"], link["type"])
        for number, node in enumerate(recorded)
        for link in node["semantic_parents"]
    }
    first, second = SUMMARIES if is_summary_trained else ("one", "three")
    assert sources == {
        "two": (first, "compaction"),
        "found": ("two", "subagent_call"),
        "four": (second, "compaction"),
    }
    documents = to_atif(graph)
    ends = {
        document["trajectory_id"]: texts[int(document["trajectory_id"].rpartition("-")[2])] for document in documents
    }
    followers = {
        ends[document["trajectory_id"]]: ends[document["continued_trajectory_ref"].removesuffix(".json")]
        for document in documents
        if "continued_trajectory_ref" in document
    }
    assert followers == {first: "two", second: "four"}
    (reference,) = (
        (step["message"], ends[reference["trajectory_id"]])
        for document in documents
        for step in document["steps"]
        for result in (step.get("observation") or {}).get("results", [])
        for reference in result.get("subagent_trajectory_ref") or []
    )
    assert reference == ("two", "found")
    assert {*MAIN_KINDS, SUMMARY_KIND} <= set(ConversationKind)


def test_a_line_of_litellm_has_the_times_of_the_turn(gateway: Gateway) -> None:
    before = time.time()
    _, key = gateway.create_session("timed", sampling_params={"max_new_tokens": 8})
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    headers = {"authorization": f"Bearer {key}"}
    assert httpx.post(f"{gateway.openai_url}/chat/completions", json=body, headers=headers, timeout=60.0).is_success
    after = time.time()
    (line,) = lines_of(read(gateway, "?format=litellm", "timed"))
    assert before - 0.001 <= line["startTime"] < line["endTime"] <= after + 0.001
    assert line["completionStartTime"] == line["endTime"], "as LiteLLM writes it for a call without a stream"
    assert line["response_time"] == pytest.approx(line["endTime"] - line["startTime"], abs=1e-5)
    assert line["response"]["created"] == int(line["startTime"])
    assert line["response"]["choices"][0]["message"].keys() == {"role", "content"}

    file = gateway.config.run_dir / "timed.jsonl"
    old = re.sub(rb',"started_at":[^,}]*,"duration_s":[^,}]*', b"", file.read_bytes())
    assert old != file.read_bytes()
    (line,) = to_litellm(parse_session("timed", old)[0])
    assert (line["startTime"], line["endTime"], line["response_time"], line["response"]["created"]) == (0, 0, 0, 0)


def test_a_raw_prompt_is_a_text_completion(gateway: Gateway) -> None:
    _, key = gateway.create_session("raw", sampling_params={"max_new_tokens": 4})
    body = {"model": "m", "prompt": "Once"}
    reply = httpx.post(
        f"{gateway.openai_url}/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=60.0
    )
    assert reply.status_code == 200
    (line,) = lines_of(read(gateway, "?format=litellm", "raw"))
    assert line["call_type"] == "atext_completion"
    assert line["completion_token_ids"] == reply.json()["choices"][0]["token_ids"]


def test_wrong_exports_are_refused(gateway: Gateway, session: TrajectoryGraph) -> None:
    reply = read(gateway, "?format=csv")
    assert (reply.status_code, "jsonl, verifiers, atif, litellm" in reply.text) == (400, True)
    assert read(gateway, "?format=atif", "unknown").status_code == 404
    for path in ("../trial", "..%2ftrial", "%2e%2e%2ftrial", "trial.jsonl", "trial%00"):
        assert read(gateway, "", path).status_code == 404
    wrong = httpx.get(f"{gateway.url}/admin/sessions/trial/record", headers={"authorization": f"Bearer {SECRET}"})
    assert wrong.status_code == 401
    with pytest.raises(BadInputError):
        to_litellm({})  # type: ignore[arg-type]


def test_a_session_without_a_turn_says_so_everywhere(gateway: Gateway, tmp_path: Path) -> None:
    gateway.create_session("empty")
    file, found = gateway.config.run_dir / "empty.jsonl", "a session gets its file with its first request"
    with pytest.raises(FileNotFoundError, match=f"{found}.*{file}"):
        load_session(file)
    with pytest.raises(BadInputError, match=f"{file}.*{found}"):
        export_sessions(file, tmp_path / "out", ExportFormat.LITELLM)
    for query in ("", "?format=litellm"):
        reply = read(gateway, query, "empty")
        assert (reply.status_code, "no turn yet" in reply.text) == (404, True)
    headers = {"authorization": f"Bearer {gateway.admin_key}"}
    page = httpx.get(f"{gateway.url}/ui/sessions/empty", headers=headers, timeout=60.0)
    assert (page.status_code, "no turn yet" in page.text) == (404, True)


def test_the_command_exports_for_litellm(gateway: Gateway, session: TrajectoryGraph, tmp_path: Path) -> None:
    output = tmp_path / "litellm-trajectory.jsonl"
    command = [
        sys.executable,
        "-m",
        "verl_server.cli",
        "trajectory",
        "export",
        str(gateway.config.run_dir / "trial.jsonl"),
    ]
    command += ["--format", "litellm", "--output", str(output), "--model", "qwen"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "sessions: 1, lines: 3" in done.stdout
    assert [json.loads(line) for line in output.read_text().splitlines()] == to_litellm(session, model="qwen")
