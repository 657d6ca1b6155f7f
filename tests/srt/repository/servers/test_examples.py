"""Runs every example as a script and checks its output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calculator_task
import coding_task
import grpo_training
import pytest
import torch
import word_policy
from agent_helpers import ScriptedGenerateFn
from helpers import run_in_fork
from program_helpers import install_programs

from verl_server.agent import Environment, Episode, RolloutRunner, RolloutStep, Sample, SingleTurnLoop, Task
from verl_server.trajectory import ChatRenderer, ForkReason

EXAMPLES = Path(__file__).parents[4] / "examples"

pytestmark = pytest.mark.timeout(900)


def run_example(name: str, output_folder: Path, *arguments: str) -> str:
    """Run an example. Returns its standard output."""
    return run_in_fork(EXAMPLES / name, arguments, output_folder, timeout_s=850)


def test_hybrid(tmp_path: Path) -> None:
    output = run_example("hybrid.py", tmp_path)
    steps = re.findall(
        r"4 samples of weight versions \[(\d)\]; (\d+) MB while serving, (\d+) MB while released", output
    )
    assert [version for version, _, _ in steps] == ["1", "2", "3"]
    assert all(int(released) < 0.9 * int(serving) for _, serving, released in steps), output
    assert "weight version served now: 4" in output


def test_standalone(tmp_path: Path) -> None:
    output = run_example("standalone.py", tmp_path)
    assert re.findall(r"version (\d) by (\w+)", output) == [(str(number), "distributed") for number in range(1, 5)]
    assert max(int(count) for count in re.findall(r"generated with (\d) version", output)) > 1, output


def test_colocated(tmp_path: Path) -> None:
    output = run_example("colocated.py", tmp_path)
    steps = re.findall(r"(\d+) \+ (\d+) while it judges, (\d+) \+ (\d+) after", output)
    assert len(steps) == 3
    for policy_released, judge_serving, policy_serving, judge_released in steps:
        assert int(policy_released) < 0.9 * int(policy_serving), output
        assert int(judge_released) < 0.9 * int(judge_serving), output


def test_ray_cluster(tmp_path: Path) -> None:
    output = run_example("ray_cluster.py", tmp_path)
    assert "version 1 is on both nodes, by distributed" in output
    found = re.findall(r"(verl_server_\d): tokens (\[.*\]) of version 1", output)
    assert [name for name, _ in found] == ["verl_server_0", "verl_server_1"]
    assert found[0][1] == found[1][1], "greedy decoding gives the same tokens on both nodes"


def test_calculator(tmp_path: Path) -> None:
    """Three steps: the reward does not rise yet, but the logprobs of trainer and server agree."""
    output = run_example("calculator.py", tmp_path, "--steps", "3", "--png", str(tmp_path / "curves.png"))
    steps = re.findall(r"step (\d): reward (\d\.\d+), tool used (\d\.\d+), log prob gap (\S+),", output)
    assert [step for step, *_ in steps] == ["0", "1", "2"]
    assert all(0 < float(reward) < 1 for _, reward, _, _ in steps)
    assert all(float(gap) < 1e-3 for *_, gap in steps)
    assert "failed" not in output
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_grpo_continues_after_a_kill(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    """A file of questions; the second command continues where the first one ended, and no step is written twice."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"{a} + 1", "answer": str(a + 1)}) + "\n" for a in range(4)))
    arguments = [str(tiny("qwen3")), "--data", str(data), "--test", str(data), "--run-dir", str(tmp_path / "run")]
    arguments += ["--groups", "2", "--samples", "2", "--max-tokens", "4", "--dtype", "float32", "--every", "1"]
    run_example("grpo.py", tmp_path, *arguments, "--steps", "1")
    output = run_example("grpo.py", tmp_path, *arguments, "--steps", "3")
    assert re.findall(r"^step (\d):", output, re.M) == ["2", "3"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["test/correct"] == 0.0 for line in lines)
    assert all(line["train/logprob_gap"] < 1e-3 for line in lines[1:]), "the servers have the weights of the checkpoint"
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_async_training(tmp_path: Path) -> None:
    """Two steps of each setting. With staleness 1, the second step has samples that older weights have generated."""
    output = run_example("async_training.py", tmp_path, "--steps", "2", "--png", str(tmp_path / "curves.png"))
    steps = re.findall(r"step (\d): reward (\d\.\d+), .* staleness (\d\.\d+), log prob gap (\S+),", output)
    assert [step for step, *_ in steps] == ["0", "1", "0", "1"]
    assert all(0 < float(reward) < 1 for _, reward, _, _ in steps)
    assert [float(staleness) for _, _, staleness, _ in steps] == [0, 0, 0, 1]
    gaps = [float(gap) for *_, gap in steps]
    assert max(gaps[:3]) < 1e-3 < gaps[3], "rollout log probs are those of the weights that sampled"
    assert re.findall(r"^(\w+): \d+ s, .* mean staleness (\d\.\d+)", output, re.M) == [
        ("synchronous", "0.00"),
        ("asynchronous", "0.50"),
    ]
    assert "failed" not in output
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_failed_samples_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The advantages are those of the other samples of the group. A sample that is alone in its group has 0."""

    def reward(sample: Sample) -> float:
        if (sample.task.data["group"], sample.index) in {(0, 1), (1, 0), (1, 2)}:
            raise RuntimeError("no reward")
        return float(sample.index)

    batch = grpo_training.make_batch(first_step(tmp_path, SingleTurnLoop(), reward))
    advantages = {
        (group, sample): value
        for group, sample, value in zip(
            batch["group_index"].tolist(), batch["sample_index"].tolist(), batch["advantage"].tolist(), strict=True
        )
    }
    assert advantages == pytest.approx({(0, 0): -0.707, (0, 2): 0.707, (1, 1): 0.0}, abs=1e-3)
    assert "3 samples failed" in capsys.readouterr().out


def test_the_weight_of_a_segment_is_a_factor_of_its_tokens(tmp_path: Path) -> None:
    """The loss counts the tokens of the policy, and those of the second segment a quarter."""
    batch = grpo_training.make_batch(first_step(tmp_path, TwoSegments, lambda sample: float(sample.index)))
    assert torch.equal(batch["token_weight"] > 0, batch["response_mask"] > 0)
    weights = [row[row > 0].unique().tolist() for row in batch["token_weight"]]
    assert weights == [[1.0], [0.25]] * 6
    assert torch.equal(batch["advantage"][0::2], batch["advantage"][1::2]), "both segments have that of the sample"


class TwoSegments(Environment):
    """A sample with two segments, of which the second has the weight 0.25."""

    async def run(self, episode: Episode) -> None:
        await episode.generate()
        second = episode.new_root(self.task.messages, reason=ForkReason.COMPACTED)
        second.loss_weight = 0.25
        episode.adopt(second)
        await episode.generate()


def first_step(folder: Path, agent: Any, reward: Callable[[Sample], float]) -> RolloutStep:
    """Two groups of three samples, whose policy always answers the same."""
    tokenizer = word_policy.make_tokenizer(folder, calculator_task.VOCABULARY)
    question = next(calculator_task.endless_tasks(seed=0))
    tasks = [Task(str(number), question.messages, {"group": number}) for number in range(2)]
    runner = RolloutRunner(
        agent,
        ScriptedGenerateFn(tokenizer, lambda prompt: "8 5 <end>"),
        renderer=ChatRenderer(tokenizer),
        limits=calculator_task.LIMITS,
        sampling_params=calculator_task.SAMPLING_PARAMS,
        n=3,
        reward=reward,
    )

    async def run() -> RolloutStep:
        async with contextlib.aclosing(runner.steps(tasks, num_groups=2)) as steps:
            return await anext(steps)

    return asyncio.run(run())


def test_the_hidden_tests_run_the_last_program(tmp_path: Path) -> None:
    """A policy that always writes `+ 3` gets the full reward for the addition. Its product is too low."""
    tokenizer = word_policy.make_tokenizer(tmp_path, coding_task.VOCABULARY)
    runner = RolloutRunner(
        coding_task.CodingEnvironment,
        ScriptedGenerateFn(tokenizer, lambda prompt: "+ 3 <end>"),
        renderer=ChatRenderer(tokenizer),
        limits=coding_task.LIMITS,
        sampling_params=coding_task.SAMPLING_PARAMS,
    )

    async def run() -> list[Sample]:
        tasks = itertools.islice(coding_task.endless_tasks(), 2)
        return [sample async for group in runner.run(tasks) for sample in group.samples]

    plus, times = sorted(asyncio.run(run()), key=lambda sample: sample.task.id)
    assert coding_task.transcript(plus) == (
        "<user> write f : x plus 3 <end> <assistant> + 3 <end> <tool> pass <end> <user> summary <end> <assistant> "
        "+ 3 <end> | <user> + 3 <end> <assistant> + 3 <end>"
    )
    assert "<user> write f : x times 3 <end> <assistant> + 3 <end> <tool> low <end>" in coding_task.transcript(times)
    names = ("tests_pass", "visible_test_passes", "summary_is_right", "similarity")
    assert [plus.rewards[name] for name in names] == [1, 1, 1, 1]
    assert [times.rewards[name] for name in names] == pytest.approx([0, 0, 0, 2 / 3])
    assert (plus.reward, times.reward) == pytest.approx((4, 4 / 3))


def test_coding(tmp_path: Path) -> None:
    """Three steps: the reward does not rise yet, but both segments are trained, and their logprobs agree."""
    output = run_example("coding.py", tmp_path, "--steps", "3", "--png", str(tmp_path / "curves.png"))
    steps = re.findall(
        r"step (\d): tests passed (\S+), visible tests \S+, summaries \S+, similarity (\S+), log prob gap (\S+),",
        output,
    )
    assert [step for step, *_ in steps] == ["0", "1", "2"], output
    assert all(0 <= float(tests) < 1 and 0 < float(words) < 1 for _, tests, words, _ in steps)
    assert all(0 < float(gap) < 1e-3 for *_, gap in steps), "the trainer has the inputs and weights of the rollout"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_train_claude_code(tmp_path: Path) -> None:
    """Two steps: the policy has learned to call the tool, and the log probabilities of trainer and server agree."""
    command = [sys.executable, str(EXAMPLES / "train_claude_code.py"), "--steps", "2", "--png", "curve.png"]
    env = {**os.environ, "PATH": f"{install_programs()}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    output = done.stdout
    assert "warm-up: 30 demonstrations" in output
    steps = re.findall(r"step (\d): reward (\d\.\d+), log prob gap (\S+),", output)
    assert [step for step, *_ in steps] == ["0", "1"]
    assert all(0.1 < float(reward) < 0.9 for _, reward, _ in steps), output
    assert all(float(gap) < 1e-3 for *_, gap in steps)
    assert "failed" not in output
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
