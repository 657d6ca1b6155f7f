"""`RolloutRunner` on a real server: groups, rewards, failures, and resuming after a crash."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import (
    TOOL_CALL_REGEX,
    ForkingLoop,
    RecordingGenerateFn,
    add,
    make_changed_task,
    make_episode,
    make_runner,
    make_tasks,
)
from helpers import adapter_of
from transformers import AutoTokenizer

from verl_server import RouterClient, VerlEngine
from verl_server.agent import (
    FunctionTool,
    RolloutLimits,
    RolloutRunner,
    Sample,
    SampleGroup,
    SingleTurnLoop,
    Task,
    as_generate_fn,
)
from verl_server.agent.engines import with_stop_tokens
from verl_server.errors import BadInputError
from verl_server.trajectory import (
    ChatRenderer,
    ForkReason,
    Recorder,
    TrajectoryGraph,
    list_sessions,
    load_session,
    session_file,
    to_batch,
)


@pytest.fixture(scope="module")
def renderer(tiny: Callable[..., Path]) -> ChatRenderer:
    return ChatRenderer(AutoTokenizer.from_pretrained(tiny("qwen3")))


def test_runner_yields_filtered_groups_with_rewards(shared_engine: VerlEngine, renderer: ChatRenderer) -> None:
    """The filter rejects one group. The failed samples of a group do not fail the others."""

    async def reward(sample: Sample) -> float:
        if sample.task.id == "t1":
            raise RuntimeError("no judge")
        return float(sample.index)

    async def run() -> list[SampleGroup]:
        runner = make_runner(shared_engine, renderer, reward=reward, n=2, group_filter=lambda g: g.task.id != "t0")
        return [group async for group in runner.run(make_tasks(4))]

    groups = asyncio.run(run())
    assert len(groups) == 3
    for group in groups:
        assert group.task.id != "t0"
        for index, sample in enumerate(group.samples):
            if group.task.id == "t1":
                assert sample.stop_reason == "error"
                assert sample.error is not None
                assert sample.error["type"] == "RuntimeError"
                assert "no judge" in sample.error["message"]
            else:
                assert (sample.stop_reason, sample.reward, sample.index) == ("max_turns", float(index), index)
    samples = [sample for group in groups for sample in group.samples]
    scores = to_batch([sample.path for sample in samples if sample.error is None], 0)["rm_scores"].sum(-1)
    assert set(scores.tolist()) == {0.0, 1.0}

    async def run_duplicate_tasks() -> Any:
        return await anext(make_runner(shared_engine, renderer).run([*make_tasks(1), *make_tasks(1)]))

    with pytest.raises(BadInputError, match="tasks 0 and 1 have the id 't0'"):
        asyncio.run(run_duplicate_tasks())


def test_runner_accepts_a_registered_name_and_samples_have_text(
    shared_engine: VerlEngine, renderer: ChatRenderer
) -> None:
    """Public fields of a sample describe its last turn, also for a sample that failed before its first prompt."""

    async def run(tasks: list[Task]) -> list[Sample]:
        params = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
        runner = make_runner(shared_engine, renderer, agent="single_turn", sampling_params=params)
        return [group.samples[0] async for group in runner.run(tasks)]

    failed, sample = asyncio.run(run([make_changed_task("empty", []), *make_tasks(1)]))
    assert (sample.stop_reason, sample.num_turns) == ("done", 1)
    assert sample.leaf is not None
    last_node = sample.graph.node(sample.leaf)
    assert sample.text == renderer.decode(last_node.token_ids)
    assert {span.version for span in last_node.spans} == {last_node.spans[0].version}
    assert isinstance(last_node.spans[0].version, int)

    assert (failed.stop_reason, failed.text, failed.num_turns) == ("error", "", 0)
    with pytest.raises(BadInputError, match="has no tokens"):
        _ = failed.path
    with pytest.raises(BadInputError, match="there is no agent loop 'unknown'"):
        make_runner(shared_engine, renderer, agent="unknown")


def test_recorded_forks_are_replayed(shared_engine: VerlEngine, renderer: ChatRenderer, tmp_path: Path) -> None:
    """Both branches of a fork are found in the record, and nothing is sampled again."""

    async def run(recorder: Recorder) -> tuple[str, RecordingGenerateFn]:
        episode, generate = make_episode(
            shared_engine,
            renderer,
            recorder,
            task=Task("0", [{"role": "user", "content": "add"}]),
            sampling_params={"temperature": 1.0, "max_new_tokens": 6, "ignore_eos": True},
            limits=RolloutLimits(max_response_tokens=600),
        )
        return await ForkingLoop([add]).run_episode(episode), generate

    with Recorder(tmp_path, "s", sync=False) as recorder:
        assert asyncio.run(run(recorder))[0] == "done"
    before = load_session(session_file(tmp_path, "s"))
    with Recorder(tmp_path, "s", sync=False) as recorder:
        stop_reason, generate = asyncio.run(run(recorder))
    assert (stop_reason, generate.prompts) == ("done", [])
    assert load_session(session_file(tmp_path, "s")) == before
    assert len(before.leaves) == 2


def test_a_different_tool_result_begins_a_branch(
    shared_engine: VerlEngine, renderer: ChatRenderer, tmp_path: Path
) -> None:
    """A resumed episode replays the first turn. The turn after the other tool result is generated."""

    async def run(recorder: Recorder, tool_result: str) -> tuple[list[str], RecordingGenerateFn]:
        params = {"temperature": 1.0, "max_new_tokens": 6, "ignore_eos": True}
        episode, generate = make_episode(shared_engine, renderer, recorder, sampling_params=params)
        first = await episode.generate(episode.task.messages)
        second = await episode.generate([{"role": "tool", "name": "add", "content": tool_result}])
        return [first.text, second.text], generate

    with Recorder(tmp_path, "s", sync=False) as recorder:
        before, _ = asyncio.run(run(recorder, "1"))
    with Recorder(tmp_path, "s", sync=False) as recorder:
        after, generate = asyncio.run(run(recorder, "2"))
    graph = load_session(session_file(tmp_path, "s"))
    assert after[0] == before[0]
    assert len(generate.prompts) == 1, "only the turn after the other tool result was generated"
    (prompt, first, result, second, other_result, other_second) = graph.nodes
    assert [node.parent for node in graph.nodes] == [None, prompt.id, first.id, result.id, first.id, other_result.id]
    assert other_result.fork_reason is ForkReason.RETRY
    assert not other_result.sampled
    assert generate.prompts == [graph.token_ids(other_result.id)]
    assert len(graph.leaves) == 2
    assert (second.sampled, other_second.sampled) == (True, True)


def test_reward_that_is_not_finite_fails_its_sample(
    shared_engine: VerlEngine, renderer: ChatRenderer, tmp_path: Path
) -> None:
    """A failed sample is run again with a corrected reward: its turns come from the record. Then it is loaded."""

    async def run(reward: Callable[[Sample], float]) -> tuple[Sample, int]:
        runner = make_runner(shared_engine, renderer, agent=SingleTurnLoop(), reward=reward, run_dir=tmp_path)
        samples = {group.task.id: group.samples[0] async for group in runner.run(make_tasks(2))}
        return samples["t0"], runner.counters.num_turns

    sample, num_turns = asyncio.run(run(lambda sample: float("nan" if sample.task.id == "t0" else "1")))
    assert sample.error is not None
    assert "finite" in sample.error["message"]
    assert (sample.stop_reason, sample.reward, num_turns) == ("error", None, 2)
    corrected, num_turns = asyncio.run(run(lambda _: 0.5))
    assert (corrected.stop_reason, corrected.error, corrected.reward, num_turns) == ("done", None, 0.5, 0)
    assert corrected.graph.nodes == sample.graph.nodes
    loaded, num_turns = asyncio.run(run(lambda _: 1.0))
    assert loaded == dataclasses.replace(corrected, task=loaded.task, graph=loaded.graph)
    assert (loaded.graph, num_turns) == (corrected.graph, 0)


class PromptedLoop(SingleTurnLoop):
    """An agent loop with a system prompt of its own."""

    def __init__(self, system_prompt: str) -> None:
        super().__init__([add])
        self.system_prompt = system_prompt


def test_an_engine_tells_the_runner_what_it_needs(shared_engine: VerlEngine, renderer: ChatRenderer) -> None:
    """Tokenizer, context length and the end of a turn."""

    async def run(engine: Any) -> Sample:
        runner = RolloutRunner([add], engine, sampling_params={"temperature": 1.0}, n=2, reward=lambda sample: 1.0)
        (step,) = [step async for step in runner.steps(make_tasks(1), num_groups=1)]
        assert step.batch()["rm_scores"].sum(-1).tolist() == [1.0, 1.0]
        return step.samples[0]

    server = adapter_of(shared_engine)
    for engine in (shared_engine, server):
        sample = asyncio.run(run(engine))
        (prompt, turn) = sample.graph.nodes
        assert list(prompt.token_ids) == renderer.render_prompt(sample.task.messages, [FunctionTool(add).schema])
        assert turn.token_ids[-1] == renderer.stop_token_ids[0] or sample.stop_reason == "max_context_tokens"
        assert len(prompt.token_ids) + len(turn.token_ids) <= 2048 - 6, "the context length of the tiny model"
    for params, expected in (
        ({"ignore_eos": False}, [renderer.stop_token_ids]),
        ({"stop_token_ids": []}, [[]]),
        ({"stop": ["x"]}, [None]),
    ):
        assert [with_stop_tokens(params, renderer).get("stop_token_ids")] == expected
    for partial in (server.asynchronous, RouterClient("http://127.0.0.1:1", None), as_generate_fn(server.asynchronous)):
        with pytest.raises(BadInputError, match="does not tell its tokenizer; pass renderer=get_renderer"):
            RolloutRunner([add], partial)
        with pytest.raises(BadInputError, match="the number of tokens of an episode must be limited"):
            RolloutRunner([add], partial, renderer=renderer)
        RolloutRunner([add], partial, renderer=renderer, limits=RolloutLimits(max_context_tokens=100))
    with pytest.raises(BadInputError, match=r"engine must be a VerlEngine, a RolloutManager, .* got str"):
        RolloutRunner([add], "http://127.0.0.1:1")  # type: ignore[arg-type]


def test_samples_of_other_inputs_are_refused(
    shared_engine: VerlEngine, renderer: ChatRenderer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run with other inputs changes nothing. The same run loads the samples and computes the rewards they lack."""

    def make_task(question: str, answer: Any) -> Task:
        return Task("0", [{"role": "user", "content": question}], {"answer": answer, "tags": {"a", "b", "c"}})

    async def collect(groups: AsyncIterator[SampleGroup]) -> list[Sample]:
        return [sample async for group in groups for sample in group.samples]

    same: dict[str, Any] = {"agent": PromptedLoop("be brief"), "run_dir": tmp_path}
    task = make_task("What is 1+1?", 2)
    (recorded,) = asyncio.run(collect(make_runner(shared_engine, renderer, **same).run([task])))
    assert recorded.reward is None
    content = session_file(tmp_path, "0-0").read_bytes()
    other_renderer = ChatRenderer(AutoTokenizer.from_pretrained(str(renderer._tokenizer.name_or_path)))
    other_renderer._tokenizer.chat_template += "\n"
    others: list[tuple[str, dict[str, Any], Task]] = [
        ("task.messages", {}, make_task("What is 5+5?", 2)),
        ("task.data", {}, make_task("What is 1+1?", 10)),
        ("agent loop PromptedLoop: attribute 'system_prompt'", {"agent": PromptedLoop("take your time")}, task),
        ("agent loop, tool 'add', tools", {"agent": SingleTurnLoop()}, task),
        ("renderer", {"renderer": other_renderer}, task),
        ("limits.max_response_tokens", {"limits": RolloutLimits(max_response_tokens=999, max_turns=2)}, task),
        (
            "sampling_params['max_new_tokens'], sampling_params['regex'], sampling_params['temperature']",
            {"sampling_params": {"temperature": 0.5}},
            task,
        ),
    ]
    for changed, overrides, other_task in others:
        expected = rf"session '0-0' in the folder {tmp_path} .* a different {re.escape(changed)}\. "
        with pytest.raises(BadInputError, match=expected):
            make_runner(shared_engine, overrides.pop("renderer", renderer), **same | overrides).run([other_task])
    assert session_file(tmp_path, "0-0").read_bytes() == content

    def messages() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        return [message for message in found if "contain the effect of regex" not in message]

    assert messages() == []

    same["agent"] = PromptedLoop("be brief")
    runner = make_runner(shared_engine, renderer, **same, reward=lambda sample: 0.5)
    (loaded,) = asyncio.run(collect(runner.run([make_task("What is 1+1?", 2)])))
    assert (loaded.graph.nodes, loaded.reward, runner.counters.num_turns) == (recorded.graph.nodes, 0.5, 0)
    assert load_session(session_file(tmp_path, "0-0")).rewards == {loaded.leaf: [0.5]}
    (warning,) = messages()
    assert "samples of this run are recorded in run_dir" in warning


def test_sample_that_cannot_be_recorded_ends_its_group(
    shared_engine: VerlEngine, renderer: ChatRenderer, tmp_path: Path
) -> None:
    """The other samples of the group are cancelled, and their files are unlocked when the error is raised."""

    async def run() -> list[SampleGroup]:
        runner = make_runner(shared_engine, renderer, run_dir=tmp_path, n=3)
        return [group async for group in runner.run(make_tasks(1))]

    (tmp_path / "t0-1.jsonl").symlink_to(tmp_path / "missing" / "file")
    with pytest.raises(OSError, match="symbolic links"):
        asyncio.run(run())
    (tmp_path / "t0-1.jsonl").unlink()
    assert len(asyncio.run(run())[0].samples) == 3


KILLED_RUN = """
import asyncio, sys
from transformers import AutoTokenizer
from verl_server import AsyncHttpServerEngineAdapter
from verl_server.agent import RolloutLimits, RolloutRunner, Task, ToolAgentLoop, as_generate_fn
from verl_server.trajectory import ChatRenderer

def add(a: int, b: int = 1) -> int:
    "The sum of two numbers."
    return a + b

async def main(url, key, model, run_dir, regex):
    adapter = AsyncHttpServerEngineAdapter.attach(url, api_key=key)
    runner = RolloutRunner(
        ToolAgentLoop([add]), as_generate_fn(adapter), renderer=ChatRenderer(AutoTokenizer.from_pretrained(model)),
        limits=RolloutLimits(max_response_tokens=1500, max_turns=6),
        sampling_params={"temperature": 1.0, "max_new_tokens": 100, "regex": regex},
        run_dir=run_dir, max_concurrency=3, n=2,
    )
    tasks = [Task(f"t{n}", [{"role": "user", "content": f"add {n}"}]) for n in range(4)]
    async for group in runner.run(tasks):
        print("group", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def test_killed_run_is_resumed(
    shared_engine: VerlEngine, renderer: ChatRenderer, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """Recorded nodes stay unchanged, finished samples are not generated again, and the other samples continue."""
    adapter = adapter_of(shared_engine)
    command = [sys.executable, "-c", KILLED_RUN, adapter.base_url, str(adapter.api_key)]
    command += [str(tiny("qwen3")), str(tmp_path), TOOL_CALL_REGEX]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()  # one group has finished; other samples are running
    process.kill()
    process.wait()
    before = {path.name: load_session(path) for path in list_sessions(tmp_path)}
    finished = [name for name, graph in before.items() if graph.terminations]
    assert finished
    assert len(finished) < 8

    generate = RecordingGenerateFn(shared_engine)
    limits = RolloutLimits(max_response_tokens=1500, max_turns=6)
    runner = make_runner(shared_engine, renderer, engine=generate, run_dir=tmp_path, limits=limits, n=2)

    async def run() -> list[SampleGroup]:
        return [group async for group in runner.run(make_tasks(4))]

    groups = asyncio.run(run())
    assert sorted(group.task.id for group in groups) == ["t0", "t1", "t2", "t3"]
    after: dict[str, TrajectoryGraph] = {path.name: load_session(path) for path in list_sessions(tmp_path)}
    assert len(after) == 8
    for name, graph in after.items():
        assert len(graph.terminations) == 1
        assert graph.num_turns(graph.leaves[0]) == 6
        assert len(graph.leaves) == 1, "a turn was sampled twice"
        if name in before:
            assert graph.nodes[: len(before[name].nodes)] == before[name].nodes
    num_turns_before = sum(node.sampled for graph in before.values() for node in graph.nodes)
    assert len(generate.prompts) == 8 * 6 - num_turns_before
