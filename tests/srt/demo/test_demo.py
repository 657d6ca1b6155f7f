"""Tests of the demo: its pure functions against computations by hand, and four training steps with a real server."""

from __future__ import annotations

import io
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from verl_server.demo import Ranks, run, trainer
from verl_server.demo.display import Display
from verl_server.demo.settings import Exam, Outcome, Ready, Settings, StepMetrics
from verl_server.errors import BadInputError, PeerError

# -- the task -------------------------------------------------------------------------------------------

PROMPT = (5, 0, 9, 0, 3, trainer.SORT)
RIGHT = (0, 0, 3, 5, 9, trainer.END)


def test_only_the_correct_answer_gets_the_full_reward() -> None:
    assert trainer.answer(PROMPT) == RIGHT
    assert trainer.reward(PROMPT, RIGHT) == 1.0
    assert trainer.reward(PROMPT, (0, 0, 3, 5, 9, 9)) == pytest.approx(5 / 6)
    assert trainer.reward(PROMPT, ()) == 0.0


@pytest.mark.parametrize("response", [RIGHT[:-1], RIGHT[:2], (*RIGHT, 0), (trainer.END, *RIGHT)])
def test_stopping_early_or_late_costs_reward(response: tuple[int, ...]) -> None:
    assert trainer.reward(PROMPT, response) < 1.0


def test_a_policy_that_ignores_the_prompt_cannot_pass() -> None:
    """Random tokens and the best constant answer stay clearly below the target of 0.8."""
    rng = random.Random(0)
    prompts = trainer.draw_prompts(rng, 4000)
    rewards = [
        trainer.reward(p, [rng.randrange(trainer.VOCAB_SIZE) for _ in range(trainer.MAX_RESPONSE)]) for p in prompts
    ]
    assert sum(rewards) / len(rewards) < 0.1
    columns = zip(*(trainer.answer(prompt) for prompt in prompts), strict=True)
    constant = [max(set(column), key=column.count) for column in columns]
    assert sum(trainer.reward(prompt, constant) for prompt in prompts) / len(prompts) < 0.5


def test_prompts_depend_on_the_seed_and_exclude_the_exam_prompts() -> None:
    first = trainer.draw_prompts(random.Random(1), 300)
    assert first == trainer.draw_prompts(random.Random(1), 300)
    assert first != trainer.draw_prompts(random.Random(2), 300)
    assert len(set(first)) > 290
    assert not set(first) & set(trainer.draw_prompts(random.Random(1), 300, never=set(first)))
    assert all(len(prompt) == trainer.PROMPT_LENGTH and prompt[-1] == trainer.SORT for prompt in first)


# -- samples ---------------------------------------------------------------------------------------------

PROMPTS = [(1, 2, 3, 4, 5, trainer.SORT), (9, 8, 7, 6, 5, trainer.SORT)]
SAMPLES = [
    trainer.DemoSample(PROMPTS[0], (4, 5, 11), (-1.0, -2.0, -0.5), 0.5, advantage=1.5),
    trainer.DemoSample(PROMPTS[1], (6,), (-3.0,), 0.1, advantage=-0.7),
]


def test_the_positions_of_prompt_response_and_padding_in_a_batch() -> None:
    batch = trainer.make_batch(SAMPLES)
    assert batch["input_ids"].tolist() == [[*PROMPTS[0], 4, 5, 11], [*PROMPTS[1], 6, trainer.END, trainer.END]]
    assert batch["response_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 9, [1] * 7 + [0] * 2]
    assert batch["rollout_log_probs"].tolist() == [[-1.0, -2.0, -0.5], [-3.0, 0, 0]]


def test_the_logprob_gap_covers_response_tokens_only() -> None:
    batch = trainer.make_batch(SAMPLES)
    logprobs = batch["rollout_log_probs"] + torch.where(batch["response_mask"].bool(), 0.0, 9.0)
    assert trainer.gap_of(logprobs, batch) == (0.0, 0.0)
    logprobs[0, 1] += 0.25
    assert trainer.gap_of(logprobs, batch) == (0.25, 0.25)


# -- the outcome of a run --------------------------------------------------------------------------------

STEP = StepMetrics(0, 0.9, 0.5, 6.0, 1e-6, 1e-7, 0.5, 0.3, 0.1, 0, "1 → 1 ■")


def outcome(*steps: StepMetrics) -> Outcome:
    exam = Exam(0.9, 0.8, 10, 1, ())
    return Outcome(Settings(steps=len(steps)), Ready(1.0, 100), steps, exam, total_s=9.0)


def test_a_run_passes_only_with_target_reward_and_small_logprob_gap(tmp_path: Path) -> None:
    assert outcome(STEP).passed
    assert not outcome(replace(STEP, reward=0.79)).passed
    assert not outcome(replace(STEP, reward=math.nan)).passed
    assert not outcome(replace(STEP, gap_max=0.1), STEP).passed
    assert not outcome(STEP, replace(STEP, gap_max=math.nan)).passed
    assert "NOT PASSED" in outcome(replace(STEP, reward=0.1)).summary(tmp_path)
    assert "NOT PASSED" not in outcome(STEP).summary(tmp_path)


def test_the_progress_in_a_file_is_a_line_every_ten_steps() -> None:
    output = io.StringIO()
    with Display(Settings(steps=12), Console(file=output)) as display:
        display.ready(Ready(2.0, 1234))
        for number in range(12):
            display.step(replace(STEP, step=number))
    first, ready, *lines = output.getvalue().splitlines()
    assert first == "Starting two trainer ranks and one SGLang server."
    assert ready == "Ready after 2 s. The server has 1,234 random weights."
    assert [line.split()[1] for line in lines] == ["1/12", "11/12", "12/12"]
    assert all("reward 0.900" in line for line in lines)


def test_a_dead_rank_ends_the_run_with_an_error_that_names_it(tmp_path: Path) -> None:
    missing = tmp_path / "missing"  # the rank cannot open its log file and ends without a report
    with Ranks(Settings(), tmp_path, missing) as ranks, pytest.raises(PeerError, match=r"rank [01].*exit code 1"):
        for _ in ranks.reports():
            pass
    assert not any(process.is_alive() for process in ranks.processes)


def test_zero_steps_are_refused() -> None:
    with pytest.raises(BadInputError, match="steps"):
        run(steps=0)


def test_importing_the_demo_imports_no_torch() -> None:
    code = "import verl_server.demo, sys; sys.exit(bool({'torch', 'sglang', 'ray', 'matplotlib'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# -- a real run ------------------------------------------------------------------------------------------
