"""Samples of a group do not affect each other, and code of users affects its own sample only.

No test of this file needs a server.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_helpers import ScriptedGenerateFn, call_text

from verl_server.agent import (
    AgentLoop,
    Episode,
    FunctionTool,
    InterleavedLoop,
    RolloutLimits,
    RolloutRunner,
    Sample,
    SingleTurnLoop,
    Task,
    ToolAgentLoop,
)
from verl_server.tiny import make_tokenizer
from verl_server.trajectory import ChatRenderer, to_batch


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


RunSamples = Callable[..., list[Sample]]


@pytest.fixture
def run_samples(tokenizer: Any) -> RunSamples:
    """Run samples of one task with a scripted policy. Returns the samples in the order of their indices."""

    def run(
        loop: AgentLoop,
        reply: Callable[[str], str] = lambda prompt: "done",
        n: int = 1,
        task: Task | None = None,
        limits: RolloutLimits | None = None,
        **options: Any,
    ) -> list[Sample]:
        async def collect() -> list[Sample]:
            limits_or_default = limits or RolloutLimits(5000, max_turns=4)
            generate = ScriptedGenerateFn(tokenizer, reply)
            runner = RolloutRunner(
                loop, generate, renderer=ChatRenderer(tokenizer), limits=limits_or_default, n=n, **options
            )
            tasks = [task or Task("t", [{"role": "user", "content": "q"}])]
            return [sample async for group in runner.run(tasks) for sample in group.samples]

        return asyncio.run(collect())

    return run


def contexts(sample: Sample) -> str:
    """The recorded messages of a sample's path that the policy did not write."""
    assert sample.leaf is not None
    return json.dumps([node.message for node in sample.graph.path(sample.leaf) if not node.sampled])


async def exit_later() -> str:
    """Must end only the call."""
    sys.exit(0)


class ExitingLoop(AgentLoop):
    async def run(self, episode: Episode) -> None:
        sys.exit(0)


async def exit_in_reward(sample: Sample) -> float:
    sys.exit(0)


def test_exit_in_code_of_a_user_ends_neither_the_run_nor_the_process(run_samples: RunSamples) -> None:
    """asyncio would end the event loop, and the process would end with exit status 0."""
    (sample,) = run_samples(
        ToolAgentLoop([exit_later]), lambda prompt: "done" if "Error" in prompt else call_text("exit_later")
    )
    assert sample.stop_reason == "done"
    assert "Error: RuntimeError: SystemExit: 0" in contexts(sample)
    samples = [*run_samples(ExitingLoop()), *run_samples(SingleTurnLoop(), reward=exit_in_reward)]
    assert [(sample.error or {})["message"] for sample in samples] == ["SystemExit: 0"] * 2


class ChangingLoop(AgentLoop):
    """Adds to the messages and the data of its task."""

    async def run(self, episode: Episode) -> None:
        messages: Any = episode.task.messages
        messages[0]["content"][0]["text"] += "!"
        messages += [{"role": "user", "content": "Think."}]
        turn = await episode.generate(messages)
        data: Any = episode.task.data
        data["text"] = turn.text


async def read_data(sample: Sample) -> float:
    await asyncio.sleep(0.01)  # the other samples finish
    return float(sample.task.data["text"])


def test_each_sample_has_its_own_messages_and_data(run_samples: RunSamples, tmp_path: Path) -> None:
    task = Task("t", [{"role": "user", "content": [{"type": "text", "text": "q"}]}], {"answer": 1})
    numbers = iter(range(4))
    samples = run_samples(
        ChangingLoop(), lambda prompt: str(next(numbers)), n=4, task=task, reward=read_data, run_dir=tmp_path
    )
    assert [contexts(sample).count("Think.") for sample in samples] == [1] * 4
    assert [contexts(sample).count("q!") for sample in samples] == [1] * 4
    assert [sample.reward for sample in samples] == [float(sample.text) for sample in samples]
    assert task == Task("t", [{"role": "user", "content": [{"type": "text", "text": "q"}]}], {"answer": 1})
    assert [sample.task.digests == task.digests for sample in samples] == [True] * 4


user = contextvars.ContextVar("user", default="nobody")


def read_user() -> str:
    """Name of the user."""
    return user.get()


class UserLoop(ToolAgentLoop):
    async def run(self, episode: Episode) -> None:
        user.set("alice")
        await super().run(episode)


def test_functions_in_threads_have_the_context_of_their_caller(run_samples: RunSamples) -> None:
    (sample,) = run_samples(
        UserLoop([read_user]), lambda prompt: "done" if "alice" in prompt else call_text("read_user")
    )
    assert sample.num_turns == 2


async def return_in_steps() -> str:
    """Returns after several steps of the event loop."""
    await asyncio.sleep(0.02)
    for _ in range(5):
        await asyncio.sleep(0)
    return "fine"


def return_in_thread() -> str:
    """Returns from a thread."""
    time.sleep(0.02)
    return "fine"


@pytest.mark.parametrize("function", [return_in_steps, return_in_thread])
def test_result_that_arrived_while_the_event_loop_was_blocked_is_kept(function: Any) -> None:
    """A consumer that trains within `async for` blocks the event loop past the timeout of the tool."""

    async def run() -> str:
        calling = asyncio.create_task(FunctionTool(function, timeout_s=0.1).call({}))
        await asyncio.sleep(0.005)
        time.sleep(0.3)
        return (await calling).content

    assert asyncio.run(run()) == "fine"


def reward_turns(sample: Sample) -> float:
    """A reward of each turn, and one of the whole sample."""
    assert sample.leaf is not None
    for node in sample.graph.path(sample.leaf)[:-1]:
        if node.sampled:
            sample.graph.set_rewards(node.id, [0.5])
    return 1.0


def test_rewards_of_turns_are_recorded(run_samples: RunSamples, tmp_path: Path) -> None:
    """A resumed run has the same scores."""
    scores = []
    for _ in range(2):
        (sample,) = run_samples(
            ToolAgentLoop([read_user]),
            lambda prompt: "done" if "nobody" in prompt else call_text("read_user"),
            reward=reward_turns,
            run_dir=tmp_path,
        )
        scores.append(to_batch([sample.path], 0)["rm_scores"].sum().item())
    assert scores == [1.5, 1.5]


class LastTurnRewardLoop(ToolAgentLoop):
    """Rewards the last turn itself."""

    async def run(self, episode: Episode) -> None:
        await super().run(episode)
        assert episode.leaf is not None
        episode.graph.set_rewards(episode.leaf, [0.5])


def test_a_reward_of_the_last_turn_is_no_reward_of_the_sample(run_samples: RunSamples, tmp_path: Path) -> None:
    """A reward function that a resumed run has in addition is called, and replaces it."""
    rewards: list[tuple[float | None, float]] = []
    for reward in (None, None, lambda _: 0.25, None):
        (sample,) = run_samples(LastTurnRewardLoop([read_user]), lambda _: "done", reward=reward, run_dir=tmp_path)
        rewards.append((sample.reward, to_batch([sample.path], 0)["rm_scores"].sum().item()))
    assert rewards == [(None, 0.5), (None, 0.5), (0.25, 0.25), (0.25, 0.25)]


def return_long_text() -> str:
    """Returns a long text."""
    return "z" * 300


def test_long_result_within_a_turn_keeps_its_tags(run_samples: RunSamples) -> None:
    """The record has the text that the policy read."""
    call = '<call>{"name": "return_long_text", "arguments": {}}</call>'
    limits = RolloutLimits(2000, max_tool_tokens=40)
    (sample,) = run_samples(
        InterleavedLoop([return_long_text]), lambda prompt: "done" if "<result>" in prompt else call, limits=limits
    )
    expected = f"<result>{'z' * 40} [cut]</result>"
    (node,) = [node for node in sample.graph.nodes if "appended_text" in (node.message or {})]
    assert node.message == {"appended_text": expected}
    assert len(node.token_ids) == len(expected), "each character is a token of this tokenizer"


NO_THREADS = """
import asyncio, os, resource, time
from verl_server.agent import FunctionTool
from verl_server.errors import InfrastructureError

def wait(x: int) -> int:
    "Waits."
    time.sleep(1.0)
    return x

async def main() -> None:
    tool = FunctionTool(wait, timeout_s=30)
    await tool.call({"x": 1})
    os.setuid(65534)  # root has no such limit
    resource.setrlimit(resource.RLIMIT_NPROC, (40, 40))
    results = await asyncio.gather(*(tool.call({"x": 1}) for _ in range(200)), return_exceptions=True)
    answers = {result.content for result in results if not isinstance(result, BaseException)}
    errors = {type(result).__name__ for result in results if isinstance(result, BaseException)}
    print(answers, errors)

asyncio.run(main())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without other processes")
def test_a_thread_that_cannot_start_is_no_answer_of_a_tool() -> None:
    """At the limit of processes the policy would read, and be trained on, an error of this machine."""
    done = subprocess.run([sys.executable, "-c", NO_THREADS], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "{'1'} {'InfrastructureError'}\n", done.stderr


@pytest.mark.parametrize("method", ["run", "steps"])
def test_the_event_loop_never_waits_for_the_disk(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Samples with tools and rewards, also of a run that is continued, are flushed in other threads."""
    threads: list[int] = []
    sync_file = os.fdatasync

    def record_thread(fd: int) -> None:
        threads.append(threading.get_ident())
        sync_file(fd)

    monkeypatch.setattr(os, "fdatasync", record_thread)
    generate = ScriptedGenerateFn(tokenizer, lambda prompt: "42" if "\n42" in prompt else call_text("answer"))

    async def run(rewards: Callable[[Sample], float]) -> None:
        runner = RolloutRunner(
            [answer], generate, renderer=ChatRenderer(tokenizer), limits=RolloutLimits(5000), n=2, run_dir=tmp_path,
            reward=rewards,
        )  # fmt: skip
        tasks = [Task(f"t{index}", [{"role": "user", "content": "x"}]) for index in range(3)]
        results: Any = runner.run(tasks) if method == "run" else runner.steps(tasks, num_groups=2)
        num_samples = 0
        async for result in results:
            assert all(sample.error is None for sample in result.samples)
            num_samples += len(result.samples)
        assert num_samples == 6

    asyncio.run(run(lambda sample: 1.0))
    assert len(threads) >= 6
    asyncio.run(run(lambda sample: 2.0))
    assert threading.get_ident() not in threads


def answer() -> str:
    """The answer."""
    return "42"
