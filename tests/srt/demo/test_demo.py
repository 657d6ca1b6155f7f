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

CLIP, ENTROPY = 0.2, 0.05

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


# -- advantages and loss --------------------------------------------------------------------------------


def test_advantages_are_normalised_within_each_group() -> None:
    got = trainer.group_advantages([0.0, 1.0, 0.5, 0.5, 0.2, 0.2, 0.2, 0.2], group=4)
    deviation = math.sqrt(2 * 0.25 / 3)
    assert got[:4] == pytest.approx([-0.5 / deviation, 0.5 / deviation, 0.0, 0.0], rel=1e-3)
    assert got[4:] == [0.0] * 4, "a group with equal rewards has no advantages"


def batch_of_three() -> trainer.Batch:
    """Responses of different lengths, ratios on both sides of the clip range, advantages of both signs."""
    samples = [
        trainer.GrpoSample((1, 2, 10), (4, 5, 11), (-1.0, -2.0, -0.5), 0.5, advantage=1.5),
        trainer.GrpoSample((3, 10), (6, 11), (-3.0, -2.5), 0.1, advantage=-0.7),
        trainer.GrpoSample((3, 9, 8, 10), (7,), (-2.4,), 0.0, advantage=-2.0),
    ]
    return trainer.make_batch(samples, pad=11)


def logits_for(batch: trainer.Batch, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch.tokens.shape, trainer.VOCAB_SIZE, generator=generator, dtype=torch.float64)


def loss_of(logits: torch.Tensor, batch: trainer.Batch, num_tokens: float) -> torch.Tensor:
    logprobs, entropy = trainer.token_logprobs(logits, batch.tokens)
    return trainer.policy_loss(logprobs, entropy, batch, clip=CLIP, entropy_weight=ENTROPY, num_tokens=num_tokens)


def part_of(batch: trainer.Batch, rows: slice) -> trainer.Batch:
    return trainer.Batch(batch.tokens[rows], batch.mask[rows], batch.rollout_logprobs[rows], batch.advantages[rows])


def test_the_positions_of_prompt_response_and_padding_in_a_batch() -> None:
    batch = batch_of_three()
    assert batch.tokens.tolist() == [[1, 2, 10, 4, 5, 11], [3, 10, 6, 11, 11, 11], [3, 9, 8, 10, 7, 11]]
    assert batch.mask.tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]]
    assert batch.rollout_logprobs[1].tolist() == [0, 0, -3.0, -2.5, 0, 0]


def test_the_loss_equals_the_formula_of_the_papers() -> None:
    """The expected loss is computed token by token with plain Python."""
    batch = batch_of_three()
    logits = logits_for(batch)
    total, count = 0.0, 0
    for row, sample_mask in enumerate(batch.mask.tolist()):
        for column, is_response in enumerate(sample_mask):
            if not is_response:
                continue
            scores = [math.exp(x) for x in logits[row, column - 1].tolist()]
            probabilities = [score / sum(scores) for score in scores]
            new = math.log(probabilities[batch.tokens[row, column]])
            ratio = math.exp(new - float(batch.rollout_logprobs[row, column]))
            advantage = float(batch.advantages[row])
            clipped = min(max(ratio, 1 - CLIP), 1 + CLIP)
            entropy = -sum(p * math.log(p) for p in probabilities)
            total -= min(ratio * advantage, clipped * advantage) + ENTROPY * entropy
            count += 1
    assert count == 6
    assert float(loss_of(logits, batch, num_tokens=count)) == pytest.approx(total / count, rel=1e-6)


def test_only_predictions_of_response_tokens_are_trained() -> None:
    """The gradient at a position is nonzero exactly where the policy generated the next token.

    A mask that is shifted by one position, or that includes the prompt or the padding, fails this test.
    """
    samples = [
        trainer.GrpoSample((1, 2, 10), (4, 5, 11), (-2.5, -2.5, -2.5), 0.5, advantage=1.0),
        trainer.GrpoSample((3, 10), (6, 11), (-2.5, -2.5), 0.1, advantage=-1.0),
    ]
    batch = trainer.make_batch(samples, pad=11)
    logits = logits_for(batch).requires_grad_()
    loss_of(logits, batch, num_tokens=5.0).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    trained = (logits.grad.abs().sum(dim=-1) > 0).int().tolist()
    assert trained == [[0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0]]


def test_at_ratio_one_the_gradient_is_the_policy_gradient() -> None:
    """d loss / d logprob = -advantage / token count inside the mask, and zero outside."""
    batch = batch_of_three()
    logprobs = batch.rollout_logprobs.clone().requires_grad_()
    flat = torch.zeros_like(logprobs)
    loss = trainer.policy_loss(logprobs, flat, batch, clip=CLIP, entropy_weight=0.0, num_tokens=6.0)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(logprobs.grad, -batch.advantages[:, None] * batch.mask / 6.0)


@pytest.mark.parametrize(("advantage", "shift", "trained"), [(1, 0.5, 0), (-1, -0.5, 0), (1, -0.5, 1), (-1, 0.5, 1)])
def test_clipping_stops_the_gradient_beyond_the_clip_range(advantage: float, shift: float, trained: int) -> None:
    batch = trainer.make_batch([trainer.GrpoSample((10,), (4,), (-2.0,), 0.0, advantage=advantage)], pad=11)
    logprobs = (batch.rollout_logprobs + shift).requires_grad_()
    loss = trainer.policy_loss(logprobs, logprobs * 0, batch, clip=CLIP, entropy_weight=0.0, num_tokens=1.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert bool(logprobs.grad.abs().sum() > 0) == bool(trained)


def test_averaged_gradients_of_ranks_equal_the_gradient_of_the_batch() -> None:
    """The parts of the ranks have different numbers of tokens."""
    batch = batch_of_three()
    tokens, ranks = float(batch.mask.sum()), 2
    whole = logits_for(batch).requires_grad_()
    loss_of(whole, batch, tokens).backward()  # type: ignore[no-untyped-call]
    shared = logits_for(batch).requires_grad_()
    for rows in (slice(0, 1), slice(1, 3)):
        loss_of(shared[rows], part_of(batch, rows), tokens / ranks).backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None
    assert shared.grad is not None
    torch.testing.assert_close(shared.grad / ranks, whole.grad)


def test_the_logprob_gap_covers_response_tokens_only() -> None:
    batch = batch_of_three()
    logprobs = batch.rollout_logprobs + torch.where(batch.mask.bool(), 0.0, 9.0)
    assert trainer.logprob_gap(logprobs, batch) == (0.0, 0.0)
    logprobs[1, 3] += 0.25
    assert trainer.logprob_gap(logprobs, batch) == (0.25, 0.25)


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
