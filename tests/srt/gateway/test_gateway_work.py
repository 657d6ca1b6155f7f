"""The work of the gateway for each request: what is compared in place of hashed, and what runs in the event loop."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from agent_helpers import ScriptedGenerateFn, renderer_with_template
from helpers import wait_until
from hypothesis import given
from hypothesis import strategies as st

from verl_server.agent import Episode, RolloutLimits, Task
from verl_server.gateway import ConversationKind, Gateway, label_conversations, programs
from verl_server.gateway.conversation import TurnRequest
from verl_server.gateway.dialects.anthropic import AnthropicDialect
from verl_server.gateway.dialects.base import encode_schema
from verl_server.gateway.dialects.chat import ChatDialect
from verl_server.gateway.errors import GatewayError
from verl_server.gateway.sessions import session
from verl_server.gateway.sessions.history import conversation_keys, tools_digest
from verl_server.gateway.sessions.session import MAX_CONVERSATIONS, KeyMemo
from verl_server.gateway.threads import MAX_RENDERED_CHARS, is_short_prompt, run_aside
from verl_server.tiny import CHAT_TEMPLATE, make_tokenizer
from verl_server.trajectory import ChatRenderer, TrajectoryGraph, load_session
from verl_server.trajectory.graph import recorded_kinds

LIMITS = RolloutLimits(max_turns=1000, max_context_tokens=1000)


def nested_arrays(levels: int) -> dict[str, Any]:
    return {"type": "array", "items": nested_arrays(levels - 1)} if levels > 1 else {"type": "string"}


def string_properties(count: int, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}, **fields}


def pattern_properties(count: int, pattern: str) -> dict[str, Any]:
    properties = {f"p{number}": {"type": "string", "pattern": f"^{pattern}$"} for number in range(count)}
    return {"type": "object", "properties": properties}


def format_properties(count: int, name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"p{number}": {"type": "string", "format": name} for number in range(count)},
    }


EDGES = (
    nested_arrays(32),
    string_properties(600),
    string_properties(40, minProperties=20, maxProperties=30),
    {"anyOf": [{"type": "string", "maxLength": 10**9}] * 20},
    pattern_properties(1, "((a{1,100}b?){1,100}c?){1,100}"),
    pattern_properties(3, "[a-z0-9_-]{1,64}"),
    pattern_properties(1, ".?" * 12),
    pattern_properties(200, ".*x"),
    pattern_properties(2, r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?(Z|[+-]\d{2}:\d{2})?"),
    format_properties(50, "uri-template"),
    {"type": "object", "properties": {"format": {"type": "string"}}},
    pattern_properties(
        10,  # a date of zod
        r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|\d{4}-(?:(?:0[13578]|1"
        r"[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|(?:02)-(?:0[1-9]|1\d|2[0-8])))T(?:(?:[01]\d|"
        r"2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z|([+-](?:[01]\d|2[0-3]):[0-5]\d)))$",
    ),
    pattern_properties(50, r"^https?://[?*+\]]\?\*\+\{1,2}$"),
)
"""Schemas at the limits."""


@pytest.mark.parametrize(
    "schema",
    [
        nested_arrays(33),
        {"type": "object", "properties": {f"p{number}": {} for number in range(3000)}},
        {"enum": ["x" * (64 << 10)]},
        string_properties(600, minProperties=300, maxProperties=600),
        {"anyOf": [string_properties(20, maxProperties=10)] * 6},
        {"type": "string", "pattern": "(" * 4001},
        pattern_properties(300, ".{0,900}a{3,999}"),
        pattern_properties(1, ".?" * 13),
        pattern_properties(1, ".{0,99}x" * 12),
        pattern_properties(1, "(a?b?c?){5000}"),
        {"type": "string", "pattern": "[" * 60_000},
        pattern_properties(12, ".{0,900}x"),
        {"type": "string", "pattern": "a{0," + "9" * 5000 + "}"},
        pattern_properties(201, ".*x"),
        {"type": "object", "patternProperties": {".?" * 13: {}}},
        pattern_properties(120, "^$" * 220),
        format_properties(51, "date-time"),
        {"anyOf": [format_properties(50, "uri"), pattern_properties(1, "a*")]},
    ],
)
def test_a_schema_that_is_too_large_is_refused(schema: Any) -> None:
    with pytest.raises(GatewayError, match="too large"):
        encode_schema("response_format", schema)


@pytest.mark.parametrize("schema", [None, "a", {}, {"name": "a"}, {"name": "a", "schema": "b"}, {"type": "object"}])
def test_a_missing_schema_is_named(schema: Any) -> None:
    wanted = {"type": "json_schema"} if schema is None else {"type": "json_schema", "json_schema": schema}
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "response_format": wanted}
    with pytest.raises(GatewayError, match=r"'response_format\.json_schema\.schema' must be a JSON schema"):
        ChatDialect().parse(body)


def test_fields_of_the_future_are_ignored_and_a_missing_field_is_named() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "stream_options": {"include_usage": True, "new": "a"}}
    assert ChatDialect().parse(body).include_usage
    with pytest.raises(GatewayError, match="'model' is missing"):
        AnthropicDialect().parse(body)


def test_an_ordinary_schema_is_sent_as_it_is() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"pattern": "[a-z]+", "maxLength": 9}}}}
    for allowed in (schema, *EDGES):
        assert orjson.loads(encode_schema("response_format", allowed)) == allowed


COMPILE = """
import itertools, sys, xgrammar
words = [bytes([byte]) for byte in range(256)]
words += ["".join(word).encode() for word in itertools.islice(itertools.product(" aeinorst,1", repeat=5), 100_000)]
tokens = xgrammar.TokenizerInfo(words, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[0])
xgrammar.GrammarCompiler(tokens, max_threads=2).compile_json_schema(sys.stdin.read())
"""


@pytest.mark.slow
@pytest.mark.parametrize("schema", EDGES)
def test_the_largest_schemas_that_are_accepted_can_be_compiled(schema: Any) -> None:
    """In a process of its own: xgrammar cannot be interrupted."""
    encoded = encode_schema("response_format", schema).encode()
    subprocess.run([sys.executable, "-c", COMPILE], input=encoded, check=True, timeout=100)


CALLS = [
    {"id": "1", "type": "function", "function": {"name": "a", "arguments": {"x": value}}} for value in (1, True, 1.0)
]
TEXTS = st.sampled_from(("", "a", "b"))
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": TEXTS, "tool_call_id": TEXTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXTS, "tool_calls": st.lists(st.sampled_from(CALLS), max_size=2)}
    ),
)
TOOLS: list[Any] = [[], [{"name": "a"}], [{"name": "b"}]]
CONVERSATIONS = st.tuples(st.sampled_from(TOOLS), st.lists(MESSAGES, min_size=1, max_size=4))


@given(st.lists(CONVERSATIONS, max_size=8))
def test_remembered_keys_are_the_keys(conversations: list[tuple[list[Any], list[Any]]]) -> None:
    memo = KeyMemo()
    for tools, messages in conversations:
        expected = conversation_keys(tools_digest(tools), messages)
        assert memo.keys_of(copy.deepcopy(tools), copy.deepcopy(messages)) == expected


def test_each_message_of_a_growing_conversation_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents of a session take turns."""
    hashed = list[int]()

    def count(digest: str, messages: Any, *others: Any) -> Any:
        hashed.append(len(messages))
        return conversation_keys(digest, messages, *others)

    monkeypatch.setattr(session, "conversation_keys", count)
    memo = KeyMemo()
    for turn in range(1, 20):
        for agent in range(MAX_CONVERSATIONS):
            memo.keys_of([], [{"role": "user", "content": f"{agent} {number}"} for number in range(turn)])
    assert set(hashed) == {1}


def test_long_work_runs_in_a_worker_thread() -> None:
    async def run() -> None:
        loop_thread = threading.get_ident()
        assert await run_aside(True, threading.get_ident) == loop_thread
        assert await run_aside(False, threading.get_ident) != loop_thread

    asyncio.run(run())
    long, image = (
        "a" * (MAX_RENDERED_CHARS + 1),
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
    )
    assert is_short_prompt([{"role": "user", "content": long[1:]}])
    assert not is_short_prompt([{"role": "user", "content": long}])
    assert not is_short_prompt([{"role": "user", "content": image}]), "images are decoded"
    assert not is_short_prompt([{"role": "user", "content": "a"}], MAX_RENDERED_CHARS + 1), "its tools are long"


def test_the_conversations_of_a_program_are_labelled_in_a_worker_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other samples of the runner go on meanwhile."""
    threads = list[int]()

    def label(graph: TrajectoryGraph) -> dict[int, ConversationKind]:
        threads.append(threading.get_ident())
        return label_conversations(graph)

    monkeypatch.setattr(programs, "label_conversations", label)
    tokenizer, graph = make_tokenizer(tmp_path), TrajectoryGraph("s")

    async def run() -> int:
        generate = ScriptedGenerateFn(tokenizer, lambda _: "yes")
        task = Task("t", [{"role": "user", "content": "a"}])
        episode = Episode(task, graph, generate, ChatRenderer(tokenizer), LIMITS, {})
        async with programs.serve_episode(episode, socket.create_server(("127.0.0.1", 0))) as served:
            body = {"model": "m", "messages": task.messages, "max_tokens": 5}
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {served.key}"}) as client:
                reply = await client.post(f"{served.url}/v1/chat/completions", json=body)
                assert reply.status_code == 200, reply.text
            return await served.finish()

    assert asyncio.run(run()) == 1
    assert recorded_kinds(graph) == {0: "main"}
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_the_number_of_worker_threads_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """More work waits."""
    monkeypatch.setattr("verl_server.gateway.threads.MAX_WORKERS", 2)
    lock, enough, running = threading.Lock(), threading.Event(), [0, 0]

    def work() -> None:
        with lock:
            running[0] += 1
            running[1] = max(running)
            if running[0] == 2:
                enough.set()
        assert enough.wait(60)
        with lock:
            running[0] -= 1

    async def run() -> None:
        await asyncio.gather(*[run_aside(False, work) for _ in range(20)])

    asyncio.run(run())
    assert running == [0, 2]


MANY = """
import os
os.cpu_count = lambda: 64
import asyncio, threading
from verl_server.gateway.threads import run_aside
begun, go = threading.Semaphore(0), threading.Event()
def work():
    begun.release()
    go.wait()
async def main():
    works = [asyncio.create_task(run_aside(False, work)) for _ in range(30)]
    count = 0
    while await asyncio.to_thread(begun.acquire, timeout=1.0):
        count += 1
    go.set()
    await asyncio.gather(*works)
    print(count)
asyncio.run(main())
"""


def test_more_cores_give_no_more_worker_threads() -> None:
    """The threads share the interpreter lock with the event loop."""
    done = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr


HANG = """
import asyncio, contextlib, threading
from verl_server.gateway import threads
threads.END_TIMEOUT_S = 0.1
with contextlib.suppress(TimeoutError):
    asyncio.run(asyncio.wait_for(threads.run_aside(False, threading.Event().wait), 0.05))
print("the event loop has ended")
"""


def test_work_that_hangs_holds_up_neither_its_event_loop_nor_its_process() -> None:
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "the event loop has ended\n")


DECODE = """
import asyncio, contextlib, sys, threading
from transformers import AutoTokenizer
from verl_server.gateway.threads import run_aside
tokenizer, runs = AutoTokenizer.from_pretrained(sys.argv[1]), threading.Event()
def decode():
    for _ in range(50_000):
        tokenizer.decode([1])
        runs.set()
    print("decoded")
async def main():
    asyncio.create_task(run_aside(False, decode))
    while not runs.is_set():
        await asyncio.sleep(0.001)
asyncio.run(main())
"""


def test_a_process_whose_work_ends_soon_is_not_aborted(tmp_path: Path) -> None:
    """Its event loop has ended before the work."""
    make_tokenizer(tmp_path)
    done = subprocess.run([sys.executable, "-c", DECODE, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "decoded\n")


def test_finished_turns_do_not_keep_their_requests(tmp_path: Path) -> None:
    """A request has the whole conversation, and a session remembers hundreds of turns. A restart replays the turns."""
    renderer = renderer_with_template(make_tokenizer(tmp_path / "tokenizer"), CHAT_TEMPLATE)
    generate, limits = (
        ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes"),
        RolloutLimits(max_turns=1000, max_context_tokens=1000),
    )
    name, key = "the-model-of-this-test", "the-key-of-this-test"
    for start in range(2):
        with Gateway(generate, tmp_path / "run", renderer=renderer, limits=limits) as gateway:
            if start == 0:
                gateway.create_session("a", key=key)
            for number in range(10):
                body = {
                    "model": name,
                    "stream": number % 2 == 0,
                    "messages": [{"role": "user", "content": f"{number}"}],
                }
                url, headers = f"{gateway.openai_url}/chat/completions", {"authorization": f"Bearer {key}"}
                assert httpx.post(url, json=body, headers=headers, timeout=60.0).status_code == 200
            assert len(generate.prompts) == 10, "the second gateway replays the turns"
            wait_until(lambda: not requests_of(name), 30, "finished turns keep their requests")


@pytest.mark.parametrize("is_open", [True, False])
def test_the_end_of_a_session_is_one_write_to_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    """A record with a part of the end would train other paths. Each write to the disk takes milliseconds."""
    renderer = renderer_with_template(make_tokenizer(tmp_path / "tokenizer"), CHAT_TEMPLATE)
    generate, limits = ScriptedGenerateFn(renderer.tokenizer, lambda prompt: "yes"), LIMITS
    gateway = Gateway(generate, tmp_path / "run", renderer=renderer, limits=limits)
    _, key = gateway.create_session("a")
    for number in range(3):
        body = {"model": "m", "messages": [{"role": "user", "content": f"{number}"}]}
        headers = {"authorization": f"Bearer {key}"}
        reply = httpx.post(f"{gateway.openai_url}/chat/completions", json=body, headers=headers, timeout=60.0)
        assert reply.status_code == 200
    if not is_open:
        gateway.shutdown()
        gateway = Gateway(generate, tmp_path / "run", renderer=renderer, limits=limits)
    sizes, sync, path = list[int](), os.fdatasync, tmp_path / "run" / "a.jsonl"

    def note_size(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), path.stat()):  # otherwise, it is the file with the settings of the session
            sizes.append(os.fstat(fd).st_size)
        sync(fd)

    with gateway, monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", note_size)
        gateway.end_session("a", reward=1.0)
    graph = load_session(path)
    assert sizes == [path.stat().st_size]
    assert len(recorded_kinds(graph)) == 3
    assert graph.last_termination is not None
    assert graph.last_termination.reward == 1.0


def requests_of(model: str) -> list[TurnRequest]:
    """The requests with this name of a model that are in memory."""
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, TurnRequest) and found.model == model]
