"""`ProgramAgentLoop` with small programs on a real server: limits, failures, resumption, sub-agents and the network."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from agent_helpers import RecordingGenerateFn
from program_helpers import LoggingGenerateFn, recorded_turns
from transformers import AutoTokenizer

from verl_server import ServerDiedError, UnsupportedError, VerlEngine
from verl_server.agent import Episode, LocalSandbox, RolloutLimits, RolloutRunner, Sample, Sandbox, Task, reward
from verl_server.gateway import ConversationKind, ProgramAgentLoop, label_conversations
from verl_server.gateway.programs import serve_episode
from verl_server.trajectory import ChatRenderer, TrajectoryGraph, load_session

PYTHON = os.path.realpath(sys.executable)
CLIENT = """
import json, os, sys, urllib.request
def ask(*messages, **fields):
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]
def user(text):
    return {"role": "user", "content": text}
"""
"""Functions of the programs: `ask` sends a conversation and returns the turn."""
PARAMS = {"temperature": 1.0, "max_new_tokens": 8}
LIMITS = RolloutLimits(max_context_tokens=1500, timeout_s=60.0)
TASK = Task("t", [{"role": "user", "content": "say 'hi' to $HOME"}], {"word": "hi"})


def program(text: str, **attributes: Any) -> type[ProgramAgentLoop]:
    """An agent whose program is Python code after `CLIENT`. Its reward is the content of `reward.txt`, or 0."""

    class Program(ProgramAgentLoop):
        command: ClassVar[list[str]] = [PYTHON, "-I", "-c", CLIENT + text]
        instances: ClassVar[list[Any]] = []

        async def prepare(self) -> None:
            self.instances.append(self)
            await self.write_file("input/word.txt", self.task.data["word"])

        @reward
        async def from_file(self, sample: Sample) -> float:
            return float(await self.read_file("reward.txt") or 0.0)

    for name, value in attributes.items():
        setattr(Program, name, value)
    return Program


@pytest.fixture(scope="module")
def engine(shared_engine: VerlEngine) -> LoggingGenerateFn:
    return LoggingGenerateFn(RecordingGenerateFn(shared_engine))


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


@pytest.fixture
def run(engine: LoggingGenerateFn, renderer: ChatRenderer) -> Callable[..., list[Sample]]:
    def run_samples(agent: type[ProgramAgentLoop], *, tasks: Sequence[Task] = (TASK,), **options: Any) -> list[Sample]:
        async def run() -> list[Sample]:
            settings = {"renderer": renderer, "limits": LIMITS, "sampling_params": PARAMS, **options}
            runner = RolloutRunner(agent, engine, **settings)
            return [sample async for group in runner.run(tasks) for sample in group.samples]

        engine.turns.clear()
        return asyncio.run(run())

    return run_samples


TWO_TURNS = """
first = ask(user("one"), temperature=0.0)
ask(user("one"), first, user(os.environ["PROMPT"]))
print(os.getcwd(), open("input/word.txt").read(), os.environ["HOME"], os.listdir(os.environ["HOME"]))
open("reward.txt", "w").write("0.5")
"""


IGNORES_ERRORS = """
import contextlib
first = ask(user("one"))
with contextlib.suppress(Exception):
    ask(user("one"), first, user("two"))
"""


@pytest.mark.parametrize("has_nan", [False, True])
def test_a_failure_of_the_engine_is_no_end_of_a_program(
    engine: LoggingGenerateFn, renderer: ChatRenderer, has_nan: bool
) -> None:
    """The program ignores the error and ends with exit code 0. The sample has failed, and has no reward.

    `has_nan`: the second reply has a log probability that is not finite. Otherwise, the server dies.
    """
    num_calls = 0

    async def generate(*, rid: str, session_id: str, **request: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 2 == 0 and not has_nan:
            raise ServerDiedError("the server has died", exit_code=-9)
        reply = await engine(rid=rid, session_id=session_id, **request)
        if num_calls % 2 == 0:
            reply["meta_info"]["output_token_logprobs"][0][0] = None  # SGLang writes NaN so
        return reply

    async def run() -> list[Sample]:
        runner = RolloutRunner(
            program(IGNORES_ERRORS), generate, renderer=renderer, limits=LIMITS, sampling_params=PARAMS, max_attempts=1
        )
        return [sample async for group in runner.run([TASK]) for sample in group.samples]

    (sample,) = asyncio.run(run())
    assert (sample.stop_reason, sample.reward) == ("error", None)
    assert sample.error is not None
    assert sample.error["type"] == "InfrastructureError"
    problem = "the reply of the engine cannot be recorded: log probabilities" if has_nan else "the server has died"
    assert f"a turn has failed while the program ran: {problem}" in sample.error["message"]


STREAMS = """
body = json.dumps({"model": "m", "stream": True, "messages": [user("one")]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
text = ""
for line in urllib.request.urlopen(request, timeout=60):
    if line.startswith(b"data: {"):
        delta = json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        if delta and not text:
            ask(user("two"))
        text += delta
print(text)
"""
"""A program that sends its second request when the first delta of its first turn arrives."""


def test_a_program_that_streams_gets_deltas_before_the_end_of_the_turn(renderer: ChatRenderer) -> None:
    """The first turn ends after the second request, which the program sends at its first delta."""
    second, agent = asyncio.Event(), program(STREAMS)

    async def generate(*, rid: str, session_id: str, on_tokens: Any = None, **request: Any) -> Any:
        if "two" in renderer.tokenizer.decode(request["input_ids"]):
            second.set()
        token_ids = renderer.encode("alpha beta gamma")
        if on_tokens is not None:
            on_tokens(0, token_ids, [-1.0] * len(token_ids))
        await asyncio.wait_for(second.wait(), 30)
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "1"}
        return {
            "output_ids": [*token_ids, *renderer.stop_token_ids],
            "meta_info": {**meta, "output_token_logprobs": [[-1.0, token, None] for token in [*token_ids, 0]]},
        }

    async def run() -> list[Sample]:
        runner = RolloutRunner(agent, generate, renderer=renderer, limits=LIMITS, max_attempts=1)
        return [sample async for group in runner.run([TASK]) for sample in group.samples]

    (sample,) = asyncio.run(run())
    assert (sample.stop_reason, sample.error) == ("done", None)
    assert len(recorded_turns(sample.graph)) == 2
    assert agent.instances[0].result.stdout.strip() == "alpha beta gamma"  # type: ignore[attr-defined]


def test_the_gateway_of_a_sample_ends_before_its_socket_is_closed(
    engine: LoggingGenerateFn, renderer: ChatRenderer
) -> None:
    """Also if the sample is cancelled twice: the event loop would keep the number of a socket that was closed."""

    async def run() -> None:
        episode = Episode(TASK, TrajectoryGraph("s"), engine, renderer, LIMITS, PARAMS)
        listener, is_served = socket.create_server(("127.0.0.1", 0)), asyncio.Event()

        async def serve() -> None:
            async with serve_episode(episode, listener):
                is_served.set()
                await asyncio.sleep(60)

        serving = asyncio.create_task(serve())
        await is_served.wait()
        await asyncio.sleep(0.3)
        serving.cancel()
        await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert listener.fileno() == -1
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
        assert not any("serve" in name for name in names), names

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_program_is_a_sample(run: Callable[..., list[Sample]], engine: LoggingGenerateFn, tmp_path: Path) -> None:
    """The record has what the engine has seen; the program finds its files, the task and an empty home folder."""
    agent: Any = program(TWO_TURNS)
    samples = run(agent, run_dir=tmp_path, n=2)
    assert [(sample.stop_reason, sample.error, sample.reward) for sample in samples] == [("done", None, 0.5)] * 2
    turns = [turn for sample in samples for turn in recorded_turns(sample.graph)]
    assert sorted(turns) == sorted(engine.turns)
    assert len(turns) == 4
    for sample in samples:
        assert [len(sample.paths), sample.num_turns] == [1, 2]
        assert load_session(tmp_path / f"t-{sample.index}.jsonl").nodes == sample.graph.nodes
        last = json.dumps([node.message for node in sample.graph.nodes])
        assert "say 'hi' to $HOME" in last
        assert sample.times["generate"] > 0.0
    printed = {instance.result.stdout for instance in agent.instances}
    assert len(printed) == 1, "all samples have the same folders"
    folder, word, home, files = printed.pop().strip().split(" ", 3)
    assert (word, files) == ("hi", "[]")
    assert folder != home


def test_a_finished_sample_is_loaded_and_an_unfinished_one_starts_again(
    run: Callable[..., list[Sample]], engine: LoggingGenerateFn, tmp_path: Path
) -> None:
    """The turns of the first attempt stay in the record and are not trained."""
    agent = program(TWO_TURNS)
    (first,) = run(agent, run_dir=tmp_path)
    file = tmp_path / "t-0.jsonl"
    (loaded,) = run(agent, run_dir=tmp_path)
    assert engine.turns == []
    assert loaded.reward == first.reward
    lines = file.read_bytes().splitlines(keepends=True)
    ends = [number for number, line in enumerate(lines) if b'"termination"' in line]
    file.write_bytes(b"".join(lines[: ends[0]]))  # as if the trainer had been killed before the end of the sample
    (again,) = run(agent, run_dir=tmp_path)
    assert len(engine.turns) == 2
    assert [len(again.paths), again.num_turns, again.reward] == [1, 2, 0.5]
    assert again.graph.nodes[: len(first.graph.nodes)] == first.graph.nodes
    assert again.leaf is not None
    assert again.leaf >= len(first.graph.nodes)
    samples = [node for node, kind in label_conversations(again.graph).items() if kind is ConversationKind.SAMPLE]
    assert samples == [next(node.id for node in first.graph.nodes if node.sampled)]


def test_conversations_of_sub_agents_are_paths_and_titles_are_not(run: Callable[..., list[Sample]]) -> None:
    text = """
tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
first = ask(user("the task"), tools=[tool])
ask({"role": "system", "content": "sub"}, user("a part"), tools=[tool])
ask(user("Write a title for: the task"))
ask(user("the task"), first, user("go on"), tools=[tool])
"""
    (sample,) = run(program(text))
    assert sample.error is None
    assert len(sample.paths) == 2
    assert len(recorded_turns(sample.graph)) == 4
    assert sample.num_turns == 2, "the sample's path is that of the main conversation"


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("timeout_s", "ask(user('a')); import time, subprocess; subprocess.Popen(['sleep', '987']); time.sleep(100)"),
        ("max_turns", "while True:\n  try: ask(user('a'))\n  except Exception: pass"),
        ("max_context_tokens", "ask(user('a')); ask(user('a' * 5000))"),
        ("max_response_tokens", "m = [user('a')]\nwhile True:\n  m += [ask(*m), user('b')]"),
    ],
)
def test_a_program_ends_at_a_limit_and_its_sample_counts(
    run: Callable[..., list[Sample]], limit: str, text: str
) -> None:
    values: dict[str, Any] = {"timeout_s": 3.0, "max_turns": 3, "max_response_tokens": 60, "max_context_tokens": 1500}
    limits = RolloutLimits(**{"max_context_tokens": 1500, "timeout_s": 60.0, limit: values[limit]})
    started = time.monotonic()
    (sample,) = run(program(f"open('reward.txt', 'w').write('0.25')\n{text}"), limits=limits)
    assert (sample.stop_reason, sample.error, sample.reward) == (limit, None, 0.25)
    assert sample.paths
    assert time.monotonic() - started < 40.0
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "987"]]


def test_a_program_that_fails_is_an_error_with_its_output(run: Callable[..., list[Sample]]) -> None:
    text = "ask(user('a')); sys.stderr.write('no key: ' + os.environ['OPENAI_API_KEY']); sys.exit(3)"
    (sample,) = run(program(text))
    assert sample.stop_reason == "error"
    assert sample.error is not None
    assert sample.error["type"] == "ProgramError"
    assert sample.error["details"] == {"exit_code": 3, "stderr": "no key: KEY", "stdout": ""}
    assert recorded_turns(sample.graph), "its turns are recorded"
    assert sample.reward is None
    (sample,) = run(program("print('nothing')"))
    assert "without a turn of the policy" in (sample.error or {})["message"]


def test_a_failure_after_an_overflow_that_the_program_has_survived_is_an_error(
    run: Callable[..., list[Sample]],
) -> None:
    """The program shortens its conversation, gets a turn, and fails later for another reason."""
    text = """
import contextlib
with contextlib.suppress(Exception):
    ask(user("a" * 5000))
ask(user("short"))
sys.exit(3)
"""
    (sample,) = run(program(text))
    assert sample.stop_reason == "error"
    assert (sample.error or {})["type"] == "ProgramError"


def test_an_error_of_the_infrastructure_is_tried_again(run: Callable[..., list[Sample]]) -> None:
    class Lost(LocalSandbox):
        num_lost = 0

        async def listen(self) -> socket.socket:
            if not Lost.num_lost:
                Lost.num_lost += 1
                await self.close()
            return await super().listen()

    (sample,) = run(program(TWO_TURNS, make_sandbox=lambda _: Lost()))
    assert Lost.num_lost == 1
    assert (sample.error, sample.reward, sample.num_turns) == (None, 0.5, 2)


def test_a_program_reaches_only_its_gateway(run: Callable[..., list[Sample]]) -> None:
    """A port of the machine is not reachable, and neither is the gateway of another sample."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = f"""
ask(user("a"))
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=2).close()
except OSError:
    open("reward.txt", "w").write("1.0")
"""
        agent: Any = program(text)
        (sample,) = run(agent)
    if "network" not in agent.instances[0].sandbox.confined:
        pytest.fail("this kernel refuses network namespaces, so programs reach the machine's ports")
    assert sample.reward == 1.0


@pytest.mark.parametrize(
    ("text", "named"),
    [("a\0b", "has a NUL character"), ("a" * 200_000, "has 200,000 bytes, the maximum is")],
)
def test_a_message_that_no_variable_can_have_is_named_with_its_task(
    run: Callable[..., list[Sample]], text: str, named: str
) -> None:
    (sample,) = run(program(TWO_TURNS), tasks=[Task("long-7", [{"role": "user", "content": text}], {"word": "hi"})])
    message = (sample.error or {})["message"]
    assert "the last message of task 'long-7'" in message
    assert named in message


def test_mistakes(run: Callable[..., list[Sample]]) -> None:
    class Empty(ProgramAgentLoop):
        pass

    (sample,) = run(Empty)
    assert "has no command" in (sample.error or {})["message"]

    async def listen_too_early() -> None:
        await LocalSandbox().listen()

    with pytest.raises(Exception, match="not started"):
        asyncio.run(listen_too_early())

    class Other(LocalSandbox):
        listen = Sandbox.listen

    async def listen_elsewhere() -> None:
        async with Other() as box:
            await box.listen()

    with pytest.raises(UnsupportedError, match="cannot listen"):
        asyncio.run(listen_elsewhere())
