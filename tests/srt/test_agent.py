"""Agents on a real server: every token that is trained on is one that was sampled, whatever tools do."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LLAMA, QWEN, chat_tokenizer, reference_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from verl_server.agent.episode import Budget, Rollout, Task, Turn, generate_of, images_of
from verl_server.agent.loops import AgentLoop, InterleavedLoop, SingleTurnLoop, ToolAgentLoop, loop_named, register
from verl_server.agent.runner import RolloutRunner, Sample
from verl_server.agent.tools import FunctionTool, Toolbox, ToolCall, ToolResult, hermes_calls
from verl_server.errors import BadInputError, ServerBusyError
from verl_server.trajectory.batches import to_batch
from verl_server.trajectory.divergence import drifts
from verl_server.trajectory.graph import ForkReason, Session
from verl_server.trajectory.recorder import Recorder, file_of, read, recorded
from verl_server.trajectory.rendering import Renderer

CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": [0-9], "b": [0-9]\}\}</tool_call>'


def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


class Asked:
    """Passes requests on, and remembers the prompts."""

    def __init__(self, engine: Any) -> None:
        self._generate = generate_of(engine.adapter.asynchronous)
        self.prompts: list[list[int]] = []

    async def __call__(self, **request: Any) -> Any:
        self.prompts.append(list(request["input_ids"]))
        return await self._generate(**request)


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> Renderer:
    return Renderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


def rollout_of(engine: Any, renderer: Renderer, record: Any, **changed: Any) -> tuple[Rollout, Asked]:
    asked = Asked(engine)
    given: dict[str, Any] = {
        "task": Task("t", [{"role": "user", "content": "add"}]),
        "budget": Budget(response_tokens=600, turns=3),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 100},
        **changed,
    }
    return Rollout(record=record, generate=asked, renderer=renderer, **given), asked


def assert_prompts(session: Session, asked: Asked) -> None:
    """Each prompt was the path so far."""
    sampled = [node for node in session.nodes if node.sampled]
    assert sorted(asked.prompts) == sorted(session.ids(node.parent) for node in sampled if node.parent is not None)


def assert_exact(session: Session, asked: Asked, model: Any) -> None:
    """And Hugging Face gives each sampled token its recorded log prob (which a grammar would have changed)."""
    assert_prompts(session, asked)
    for leaf in session.leaves:
        whole = session.trajectory(leaf)
        with torch.no_grad():
            logprobs = model(torch.tensor([whole.ids])).logits[0].log_softmax(-1)
        for at, bit in enumerate(whole.mask):
            if bit:
                assert abs(float(logprobs[at - 1, whole.ids[at]]) - whole.logprobs[at]) < 1e-4


class CallsWhateverIsSaid(ToolAgentLoop):
    """A random policy calls no tool by itself: here all that it says is two calls, also when it is cut off."""

    async def run(self, rollout: Rollout) -> None:
        turn = await rollout.turn(rollout.task.messages)
        while True:
            results = await self.tools.call_all(self.calls(turn))
            turn = await rollout.turn([result.message for result in results])

    def calls(self, turn: Turn) -> list[ToolCall | ToolResult]:
        return [ToolCall("add", {"a": len(turn.text), "b": more}) for more in (1, 2)]


def test_tools_over_many_turns(
    shared_engine: Any, renderer: Renderer, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Many at a time, two calls in each turn; what is on disk is what was sampled."""
    loop, model = CallsWhateverIsSaid([add]), reference_model(tiny("qwen3"))

    async def run() -> list[tuple[str, Rollout, Asked]]:
        async def one(number: int) -> tuple[str, Rollout, Asked]:
            params = {"temperature": 1.0, "max_new_tokens": 20 + number, "ignore_eos": number % 2 == 0}
            recorder = Recorder(tmp_path, f"s{number}", sync=False)
            rollout, asked = rollout_of(shared_engine, renderer, recorder, sampling_params=params)
            with recorder:
                return await loop.act(rollout), rollout, asked

        return list(await asyncio.gather(*(one(number) for number in range(24))))

    for number, (reason, rollout, asked) in enumerate(asyncio.run(run())):
        session = rollout.session
        assert reason == "turns", rollout.error
        assert rollout.leaf is not None
        assert session.turns(rollout.leaf) == 3
        assert read(file_of(tmp_path, f"s{number}")) == session
        for node in session.nodes:
            if node.message and "messages" in node.message and node.parent is not None:
                said = len((session.node(node.parent).message or {})["content"])
                assert [message["content"] for message in node.message["messages"]] == [str(said + 1), str(said + 2)]
        assert_exact(session, asked, model)
        batch = to_batch([(session, rollout.leaf)], pad_token_id=0)
        assert int(batch["response_mask"].sum()) == session.sampled_tokens(rollout.leaf)


class ThinksAndForks(CallsWhateverIsSaid):
    """Every fourth goes back to its prompt once and takes another way."""

    async def run(self, rollout: Rollout) -> None:
        turn = await rollout.turn(rollout.task.messages)
        for again in range(2):
            results = await self.tools.call_all(self.calls(turn))
            turn = await rollout.turn([result.message for result in results])
            if again == 0 and int(rollout.task.id) % 4 == 0:
                rollout.fork(0, ForkReason.SAMPLE)
                turn = await rollout.speak()


def test_two_hundred_sessions(shared_engine: Any, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Qwen's and Llama's way of rendering, at the same time: exact in every turn, no drift but the forks asked for."""
    model = reference_model(tiny("qwen3"))

    async def run() -> list[tuple[str, Rollout, Asked]]:
        async def one(number: int) -> tuple[str, Rollout, Asked]:
            task = Task(str(number), [{"role": "system", "content": "s"}, {"role": "user", "content": f"add {number}"}])
            rollout, asked = rollout_of(
                shared_engine,
                renderers[number % 2],
                Session(str(number)),
                task=task,
                sampling_params={"temperature": 1.0, "max_new_tokens": 8 + number % 9},
                budget=Budget(response_tokens=600, turns=3),
            )
            return await loop.act(rollout), rollout, asked

        return list(await asyncio.gather(*(one(number) for number in range(200))))

    renderers = []
    for template in (QWEN, LLAMA):
        tokenizer = chat_tokenizer(tmp_path)
        tokenizer.chat_template = template
        renderers.append(Renderer(tokenizer))
    loop = ThinksAndForks([add])
    for number, (reason, rollout, asked) in enumerate(asyncio.run(run())):
        assert reason == "done", rollout.error
        assert_exact(rollout.session, asked, model)
        forks = [(drift.reason, drift.turn) for drift in drifts(rollout.session)]
        assert forks == ([(ForkReason.SAMPLE, 0)] if number % 4 == 0 else [])


def test_a_policy_calls_tools(shared_engine: Any, renderer: Renderer) -> None:
    """Two calls in each turn, in the words of the template (which a grammar makes a random policy say)."""
    session = Session("s")
    params = {"temperature": 1.0, "max_new_tokens": 200, "regex": f"{CALL}{CALL}"}
    rollout, _ = rollout_of(
        shared_engine, renderer, session, sampling_params=params, budget=Budget(response_tokens=1500, turns=3)
    )
    assert asyncio.run(ToolAgentLoop([add]).act(rollout)) == "turns"
    answers = 0
    for node in session.nodes:
        if node.message and "messages" in node.message and node.parent is not None:
            calls = hermes_calls((session.node(node.parent).message or {})["content"])
            sums = [call.arguments["a"] + call.arguments["b"] for call in calls if isinstance(call, ToolCall)]
            assert [int(message["content"]) for message in node.message["messages"]] == sums
            answers += len(sums)
    assert answers == 6


def test_forks_and_insertions_stay_exact(shared_engine: Any, renderer: Renderer, tiny: Callable[..., Path]) -> None:
    session, model = Session("s"), reference_model(tiny("qwen3"))
    rollout, asked = rollout_of(shared_engine, renderer, session, sampling_params={"max_new_tokens": 12})

    async def run() -> None:
        first = await rollout.turn(rollout.task.messages)
        rollout.insert("<result>5</result>")
        await rollout.speak()
        rollout.fork(0, ForkReason.SAMPLE)
        await rollout.speak()
        rollout.fork(first.node, ForkReason.EDITED)
        await rollout.turn([{"role": "user", "content": "again"}])

    asyncio.run(run())
    assert [node.fork for node in session.nodes if node.fork] == [ForkReason.SAMPLE, ForkReason.EDITED]
    assert len(session.leaves) == 3
    assert_exact(session, asked, model)


def test_a_turn_that_an_update_cuts_off_is_taken_up(
    shared_engine: Any, renderer: Renderer, tiny: Callable[..., Path]
) -> None:
    """Paused with `abort` in the middle: the turn has all of its tokens, each with its own log prob."""
    session = Session("s")
    params = {"temperature": 1.0, "max_new_tokens": 300, "ignore_eos": True}
    rollout, _ = rollout_of(shared_engine, renderer, session, sampling_params=params)
    adapter = shared_engine.adapter.asynchronous

    async def run() -> Any:
        speaking = asyncio.ensure_future(rollout.turn(rollout.task.messages))
        await asyncio.sleep(0.4)
        assert not speaking.done()
        await adapter.pause_generation("abort")
        await adapter.continue_generation()
        return await speaking

    turn = asyncio.run(run())
    assert (len(turn.ids), turn.finish) == (300, "length")
    whole, model = session.trajectory(turn.node), reference_model(tiny("qwen3"))
    with torch.no_grad():
        logprobs = model(torch.tensor([whole.ids])).logits[0].log_softmax(-1)
    for at in range(whole.prompt_length, len(whole.ids)):
        assert abs(float(logprobs[at - 1, whole.ids[at]]) - whole.logprobs[at]) < 1e-4


def test_interleaved_calls(shared_engine: Any, renderer: Renderer) -> None:
    session = Session("s")
    params = {"max_new_tokens": 100, "regex": r'<call>\{"name": "add", "arguments": \{"a": [0-9]\}\}</call>'}
    rollout, asked = rollout_of(
        shared_engine, renderer, session, sampling_params=params, budget=Budget(response_tokens=900, turns=2)
    )
    assert asyncio.run(InterleavedLoop([add]).act(rollout)) == "turns"
    inserted = [node for node in session.nodes if node.message and "inserted" in node.message]
    assert len(inserted) == 2
    assert_prompts(session, asked)


def test_budgets(shared_engine: Any, renderer: Renderer) -> None:
    params = {"temperature": 1.0, "ignore_eos": True}
    session = Session("s")
    rollout, _ = rollout_of(shared_engine, renderer, session, sampling_params=params, budget=Budget(response_tokens=40))

    class Talks(AgentLoop):
        async def run(self, rollout: Rollout) -> None:
            await rollout.turn(rollout.task.messages, max_new_tokens=15)
            await rollout.turn([{"role": "user", "content": "x"}], max_new_tokens=1000)
            await rollout.turn([{"role": "user", "content": "y"}])

    assert asyncio.run(Talks().act(rollout)) == "response_tokens"
    assert rollout.used == 40, "the last turn was cut to what was left"
    assert session.node(rollout.leaf or 0).finish == "length"

    late, _ = rollout_of(shared_engine, renderer, Session("s"), budget=Budget(response_tokens=40, wall_s=0.001))
    time.sleep(0.01)
    assert asyncio.run(SingleTurnLoop().act(late)) == "wall_s"
    slow, asked = rollout_of(
        shared_engine,
        renderer,
        Session("s"),
        sampling_params={"max_new_tokens": 1500, "ignore_eos": True},
        budget=Budget(response_tokens=1500, wall_s=0.5),
    )
    assert asyncio.run(SingleTurnLoop().act(slow)) == "wall_s", "also in the middle of a turn"
    assert len(asked.prompts) == 1
    assert [node.sampled for node in slow.session.nodes] == [False]
    for bad in ({"response_tokens": 0}, {"response_tokens": 5, "turns": 0}, {"response_tokens": 5, "wall_s": -1.0}):
        with pytest.raises(BadInputError, match="budget"):
            Budget(**bad)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        ([{"role": "pope", "content": "x"}], "role 'pope'"),
        ([{"role": "user", "content": "x" * 5000}], "the server takes prompts of up to"),
    ],
)
def test_a_failed_sample_carries_its_error(shared_engine: Any, renderer: Renderer, messages: Any, words: str) -> None:
    session = Session("s")
    rollout, _ = rollout_of(shared_engine, renderer, session, task=Task("t", messages))
    loop = SingleTurnLoop()
    assert asyncio.run(loop.act(rollout)) == "error"
    assert rollout.error is not None
    assert words in rollout.error["message"]


async def hangs() -> None:
    await asyncio.sleep(60)


def sleeps() -> None:
    """For ever: neither the call nor the end of the process may wait for it."""
    threading.Event().wait()


def raises() -> None:
    raise RuntimeError("no")


def leaves() -> None:
    sys.exit(3)


def finds_nothing() -> Any:
    return next(iter(()))


def prints() -> str:
    return "x" * 10_000_000


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            ToolCall("nobody", {}),
            "unknown_tool",
            "there are: add, finds_nothing, hangs",
        ),
        (ToolCall("add", {"a": "x"}), "bad_arguments", "wrong arguments: a:"),
        (ToolCall("add", {"a": 1, "c": 2}), "bad_arguments", "c:"),
        (ToolCall("add", {}), "bad_arguments", "a: Field required"),
        (ToolCall("hangs", {}), "timeout", "no answer within 0.2 s"),
        (ToolCall("sleeps", {}), "timeout", "no answer within 0.2 s"),
        (ToolCall("raises", {}), "raised", "RuntimeError: no"),
        (ToolCall("leaves", {}), "raised", "SystemExit: 3"),
        (ToolCall("finds_nothing", {}), "raised", "StopIteration"),
    ],
)
def test_tools_that_fail_are_answers(call: ToolCall, kind: str, words: str) -> None:
    slow = (FunctionTool(one, timeout_s=0.2) for one in (hangs, sleeps))
    box = Toolbox([add, *slow, raises, leaves, finds_nothing, prints])
    result = asyncio.run(box.call(call))
    assert result.error == kind
    assert words in result.content


def test_tools_that_work(renderer: Renderer) -> None:
    box = Toolbox([add, prints])
    assert asyncio.run(box.call(ToolCall("add", {"a": 2}))) == ToolResult("add", "3")
    schema = box.schemas[0]["function"]
    assert (schema["name"], schema["description"]) == ("add", "The sum of two numbers.")
    assert schema["parameters"]["required"] == ["a"]
    long = asyncio.run(box.call(ToolCall("prints", {}))).content
    cut = renderer.cut(long, 50)
    assert cut == "x" * 50 + " [cut]"
    with pytest.raises(BadInputError, match="two tools"):
        Toolbox([add, add])


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text().map(lambda text: f"<tool_call>{text}</tool_call>") | st.just("<tool_call>{}</tool_call>"))
def test_whatever_a_policy_says_is_read(text: str) -> None:
    for call in hermes_calls(text):
        result = asyncio.run(Toolbox([add]).call(call)) if isinstance(call, ToolCall) else call
        assert isinstance(result.content, str)


JUNK = st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3))
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "pope", ""]) | JUNK,
        "content": st.text(max_size=20) | st.text(min_size=1, max_size=3).map(lambda text: text * 1000) | JUNK,
    }
)
CALLED = st.builds(
    lambda name, arguments: f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>',
    st.sampled_from(["add", "raises", "prints", "hangs", "sleeps", "nobody"]),
    st.sampled_from(["{}", '{"a": 1}', '{"a": "x"}', "[]", '{"a": 1', "null"]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(MESSAGE, max_size=3), said=st.lists(CALLED | st.text(max_size=30), max_size=3).map("".join))
def test_nothing_bad_is_unhandled(shared_engine: Any, renderer: Renderer, messages: Any, said: str) -> None:
    """Whatever the task is and whatever the policy says: an end with a reason, and a record of what was sampled."""

    class Says(ToolAgentLoop):
        def calls(self, turn: Turn) -> list[ToolCall | ToolResult]:
            return hermes_calls(said)

    loop = Says([add, *(FunctionTool(one, timeout_s=0.02) for one in (hangs, sleeps, raises)), prints])
    session = Session("s")
    budget = Budget(response_tokens=200, turns=2, tool_tokens=20)
    params = {"max_new_tokens": 4, "ignore_eos": True}
    rollout, _ = rollout_of(
        shared_engine, renderer, session, task=Task("t", messages), budget=budget, sampling_params=params
    )
    reason = asyncio.run(loop.act(rollout))
    assert reason in ("done", "turns", "response_tokens", "error")
    assert (reason == "error") == (rollout.error is not None)
    if reason == "error":
        assert rollout.error is not None
        assert rollout.error["type"] == "BadInputError", rollout.error
        assert not any(node.sampled for node in session.nodes)
    else:
        assert session.turns(rollout.leaf or 0) in (1, 2)
        for node in session.nodes:
            assert len(node.tokens) <= 3 * 60 or node.parent is None, "a tool's answer was not cut"


def test_loops_are_known_by_name() -> None:
    assert loop_named("tool_agent") is ToolAgentLoop
    with pytest.raises(BadInputError, match="there is no agent loop 'x'"):
        loop_named("x")
    with pytest.raises(BadInputError, match="registered already"):
        register("single_turn")(ToolAgentLoop)


def runner_of(engine: Any, renderer: Renderer, **changed: Any) -> RolloutRunner:
    given: dict[str, Any] = {
        "loop": ToolAgentLoop([add]),
        "generate": generate_of(engine.adapter.asynchronous),
        "renderer": renderer,
        "budget": Budget(response_tokens=1000, turns=2),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 100, "regex": CALL},
        **changed,
    }
    return RolloutRunner(**given)


def tasks(count: int) -> list[Task]:
    return [Task(f"t{number}", [{"role": "user", "content": f"add {number}"}]) for number in range(count)]


def test_groups_come_as_they_finish(shared_engine: Any, renderer: Renderer) -> None:
    """With rewards; more tasks than wanted, some groups are not kept, and the rest is given up."""

    async def reward(sample: Sample) -> float:
        if sample.task.id == "t1":
            raise RuntimeError("no judge")
        return float(sample.number)

    async def run() -> list[Any]:
        runner = runner_of(shared_engine, renderer, reward=reward)
        keep = runner.run(tasks(6), samples=2, groups=3, keep=lambda group: group.task.id != "t0")
        return [group async for group in keep]

    groups = asyncio.run(run())
    assert len(groups) == 3
    for group in groups:
        assert group.task.id != "t0"
        for number, sample in enumerate(group.samples):
            if group.task.id == "t1":
                assert sample.reason == "error"
                assert "no judge" in sample.error["message"]
            else:
                assert (sample.reason, sample.reward, sample.number) == ("turns", float(number), number)
    scores = to_batch([one.path for group in groups for one in group.samples], 0)["rm_scores"].sum(-1)
    assert set(scores.tolist()) == {0.0, 1.0}

    async def twice() -> Any:
        return await anext(runner_of(shared_engine, renderer).run([*tasks(1), *tasks(1)]))

    with pytest.raises(BadInputError, match="two tasks have the id 't0'"):
        asyncio.run(twice())


def test_a_run_with_forks_is_played_again(shared_engine: Any, renderer: Renderer, tmp_path: Path) -> None:
    """Both ways of the fork are found, each where it was, and nothing is sampled."""

    async def run(recorder: Recorder) -> tuple[str, Asked]:
        rollout, asked = rollout_of(
            shared_engine,
            renderer,
            recorder,
            task=Task("0", [{"role": "user", "content": "add"}]),
            sampling_params={"temperature": 1.0, "max_new_tokens": 6, "ignore_eos": True},
        )
        return await ThinksAndForks([add]).act(rollout), asked

    with Recorder(tmp_path, "s", sync=False) as recorder:
        assert asyncio.run(run(recorder))[0] == "done"
    before = read(file_of(tmp_path, "s"))
    with Recorder(tmp_path, "s", sync=False) as recorder:
        reason, asked = asyncio.run(run(recorder))
    assert (reason, asked.prompts) == ("done", [])
    assert read(file_of(tmp_path, "s")) == before
    assert len(before.leaves) == 2


def test_a_reward_that_is_no_number(shared_engine: Any, renderer: Renderer, tmp_path: Path) -> None:
    """It fails its sample; what is on disk can be read, and is not made again."""

    async def run(reward: Callable[[Sample], float]) -> Sample:
        runner = runner_of(shared_engine, renderer, loop=SingleTurnLoop(), reward=reward, folder=tmp_path)
        (group,) = [group async for group in runner.run(tasks(1))]
        return group.samples[0]

    sample = asyncio.run(run(lambda _: float("nan")))
    assert sample.error is not None
    assert "finite" in sample.error["message"]
    again = asyncio.run(run(lambda _: 1.0))
    assert again == dataclasses.replace(sample, task=again.task, session=again.session)
    assert again.session == sample.session


def test_one_sample_that_cannot_be_recorded_ends_its_group(
    shared_engine: Any, renderer: Renderer, tmp_path: Path
) -> None:
    """And its siblings: their files are free when the error is raised."""

    async def run() -> list[Any]:
        runner = runner_of(shared_engine, renderer, folder=tmp_path)
        return [group async for group in runner.run(tasks(1), samples=3)]

    with Recorder(tmp_path, "t0-1"), pytest.raises(ServerBusyError, match="another process records"):
        asyncio.run(run())
    assert len(asyncio.run(run())[0].samples) == 3


def test_images_of_a_message() -> None:
    parts: list[Any] = [
        {"type": "text", "text": "see"},
        {"type": "image", "image": "a.png"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
        {"type": "image", "url": "http://x/b.png"},
    ]
    message = {"role": "user", "content": parts}
    assert images_of(message) == ["a.png", "data:image/png;base64,AA", "http://x/b.png"]
    for bad in ({"type": "image"}, {"type": "image", "image": 3}):
        with pytest.raises(BadInputError, match="an image is given by one of"):
            images_of({"role": "user", "content": [bad]})


KILLED = """
import asyncio, sys
from transformers import AutoTokenizer
from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.agent.loops import ToolAgentLoop
from verl_server.agent.episode import Budget, Task, generate_of
from verl_server.agent.runner import RolloutRunner
from verl_server.trajectory.rendering import Renderer

def add(a: int, b: int = 1) -> int:
    return a + b

async def main(url, key, model, folder, regex):
    adapter = AsyncHttpServerEngineAdapter.attach(url, api_key=key)
    runner = RolloutRunner(
        ToolAgentLoop([add]), generate_of(adapter), Renderer(AutoTokenizer.from_pretrained(model)),
        Budget(response_tokens=1500, turns=6), {"temperature": 1.0, "max_new_tokens": 100, "regex": regex},
        folder=folder, at_once=3,
    )
    tasks = [Task(f"t{n}", [{"role": "user", "content": f"add {n}"}]) for n in range(4)]
    async for group in runner.run(tasks, samples=2):
        print("group", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_killed_run_is_taken_up(
    shared_engine: Any, renderer: Renderer, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """What was on disk stays as it is, finished samples are not made again, and the others go on where they were."""
    adapter = shared_engine.adapter
    command = [sys.executable, "-c", KILLED, adapter.base_url, adapter.asynchronous.api_key]
    process = subprocess.Popen([*command, str(tiny("qwen3")), str(tmp_path), CALL], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()  # a group has finished, others are under way
    process.kill()
    process.wait()
    before = {path.name: read(path) for path in recorded(tmp_path)}
    ended = [name for name, session in before.items() if session.endings]
    assert ended
    assert len(ended) < 8

    asked = Asked(shared_engine)
    runner = runner_of(
        shared_engine, renderer, generate=asked, folder=tmp_path, budget=Budget(response_tokens=1500, turns=6)
    )

    async def run() -> list[Any]:
        return [group async for group in runner.run(tasks(4), samples=2)]

    groups = asyncio.run(run())
    assert sorted(group.task.id for group in groups) == ["t0", "t1", "t2", "t3"]
    after = {path.name: read(path) for path in recorded(tmp_path)}
    assert len(after) == 8
    for name, session in after.items():
        assert len(session.endings) == 1
        assert session.turns(session.leaves[0]) == 6
        assert len(session.leaves) == 1, "nothing was sampled twice"
        if name in before:
            assert session.nodes[: len(before[name].nodes)] == before[name].nodes
    turns_before = sum(node.sampled for session in before.values() for node in session.nodes)
    assert len(asked.prompts) == 8 * 6 - turns_before
