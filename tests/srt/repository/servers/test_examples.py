"""Runs every example as a script and checks its output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
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
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_helpers import SIZES, VLLM_PYTHON, needs_vllm

from verl_server.agent import Environment, Episode, RolloutRunner, RolloutStep, Sample, SingleTurnLoop, Task
from verl_server.tiny import make_model
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


def grpo_arguments(model: Path, folder: Path) -> list[str]:
    """Arguments of a task that a random model learns within some steps: it says one token that is no text."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"question": text, "answer": ""}) + "\n" for text in ("silence", "say nothing")))
    arguments = [str(model), "--data", str(data), "--test", str(data), "--run-dir", str(folder / "run")]
    return [*arguments, "--groups", "4", "--samples", "16", "--max-tokens", "1", "--dtype", "float32", "--lr", "1e-2"]


def read_run(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("killed_after", [1, 3])
def test_grpo_learns_and_continues_after_a_kill(killed_after: int, tmp_path: Path, tiny: Callable[..., Path]) -> None:
    """Killed before its first checkpoint, or after it: the same command continues, and no step is written twice."""
    arguments = [*grpo_arguments(tiny("qwen3"), tmp_path), "--every", "2", "--steps", "6"]
    command = [sys.executable, str(EXAMPLES / "grpo.py"), *arguments]
    with (tmp_path / "stderr").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {killed_after}:"):
            process.kill()
    assert process.wait() == -signal.SIGKILL, (tmp_path / "stderr").read_text()[-2000:]
    output = run_example("grpo.py", tmp_path, *arguments)
    steps = [int(step) for step in re.findall(r"^step (\d):", output, re.M)]
    assert steps == list(range(killed_after // 2 * 2 + 1, 7)), "it continues at its last checkpoint"
    lines = read_run(tmp_path)
    assert [line["step"] for line in lines] == list(range(7))
    assert all(line["train/logprob_gap"] < 1e-3 for line in lines[1:]), "the servers have the weights of the trainer"
    assert lines[1]["reward/mean"] < 0.6
    assert lines[6]["reward/mean"] > 0.9
    assert (lines[0]["test/correct"], lines[6]["test/correct"]) == (0.0, 1.0)
    (tmp_path / "run" / "curves.png").unlink()
    assert "step" not in run_example("grpo.py", tmp_path, *arguments).replace("steps", ""), "all steps are done"
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "silence"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    sampled = model(**prompt).logits[0, -1].argmax()
    assert tokenizer.decode([int(sampled)], skip_special_tokens=True).strip() == "", "it is the trained one"
    with pytest.raises(AssertionError, match=r"other settings: lr=1.0 instead of 0.01"):
        run_example("grpo.py", tmp_path, *arguments, "--lr", "1.0")


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(["--lora", "4"], id="lora"),
        pytest.param(["--replicas", "2"], id="replicas"),
        pytest.param(["--engine", "vllm", "--server-python", str(VLLM_PYTHON)], id="vllm", marks=needs_vllm),
    ],
)
def test_grpo_learns_in_all_its_variants(variant: list[str], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3", **SIZES)
    arguments = [*grpo_arguments(model, tmp_path), *variant, "--lr", "3e-2" if "--lora" in variant else "1e-2"]
    run_example("grpo.py", tmp_path, *arguments, "--steps", "12")
    lines = read_run(tmp_path)
    assert all(line["train/logprob_gap"] < 1e-3 for line in lines[1:])
    assert max(line["reward/mean"] for line in lines[6:]) > lines[1]["reward/mean"] + 0.3
    names = {path.name for path in (tmp_path / "run" / "model").iterdir()}
    assert ("adapter_model.safetensors" if "--lora" in variant else "model.safetensors") in names


def test_grpo_on_two_ranks(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    """15 answers in a step, which two ranks cannot share equally, in so many minibatches that some have no answer.

    A second command continues at the checkpoint of both ranks, and writes the model of both.
    """
    curves = []
    for ranks in ("1", "2"):
        folder = tmp_path / ranks
        folder.mkdir()
        arguments = [*grpo_arguments(tiny("qwen3"), folder), "--groups", "3", "--samples", "5", "--rows", "1"]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        for steps in ("2", "4"):
            done = subprocess.run(
                [*command, str(EXAMPLES / "grpo.py"), *arguments, "--minibatches", "20", "--steps", steps],
                capture_output=True, text=True, timeout=400, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-4000:]
        curves.append([(line.get("reward/mean"), line.get("train/logprob_gap")) for line in read_run(folder)])
    assert curves[0][1][0] == curves[1][1][0], "the first samples are the same; later ones differ by rounding"
    assert [len(curve) for curve in curves] == [5, 5]
    assert all(gap is not None and gap < 1e-3 for curve in curves for _, gap in curve[1:])
    before, *after = (
        AutoModelForCausalLM.from_pretrained(path).get_parameter("model.layers.0.self_attn.q_proj.weight")
        for path in (tiny("qwen3"), tmp_path / "1" / "run" / "model", tmp_path / "2" / "run" / "model")
    )
    assert all(weight.shape == before.shape and not torch.equal(weight, before) for weight in after)


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
