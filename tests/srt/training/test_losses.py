"""The functions of `verl_server.training.losses` against formulas that are written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from verl_server.errors import BadInputError
from verl_server.tiny import make_model
from verl_server.training import (
    entropy_of,
    group_advantages,
    importance_weights,
    logprobs_of,
    pad_rows,
    policy_loss,
    response_logits,
    response_logprobs,
)

ROWS, WIDTH = 8, 5


def make_numbers(seed: int) -> dict[str, torch.Tensor]:
    """Log probabilities, advantages and masks of 8 responses; the last tokens of some are padding."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(ROWS, WIDTH, generator=generator) * 3
    lengths = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)
    return {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.4 * torch.randn(ROWS, WIDTH, generator=generator),
        "advantages": torch.randn(ROWS, generator=generator),
        "mask": (torch.arange(WIDTH) < lengths).float(),
        "rewards": torch.rand(ROWS, generator=generator).round(decimals=1),
        "groups": torch.tensor([0, 0, 0, 1, 1, 1, 1, 2]),
    }


# -- advantages --------------------------------------------------------------------------------------


def test_an_advantage_compares_a_sample_with_its_group() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 3.0, 3.0]), torch.tensor([7, 7, 7, 2, 2])
    deviation = math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2)
    expected = torch.tensor([2 / 3, -1 / 3, -1 / 3, 0.0, 0.0])
    torch.testing.assert_close(group_advantages(rewards, groups, scale=False), expected)
    torch.testing.assert_close(group_advantages(rewards, groups), expected / deviation, atol=1e-5, rtol=1e-5)


def test_a_sample_with_many_rows_counts_once() -> None:
    alone = group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    rows = group_advantages(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(4), torch.tensor([0, 0, 0, 1]))
    torch.testing.assert_close(rows, alone[[0, 0, 0, 1]])


def test_order_of_rows_and_order_of_groups_do_not_matter() -> None:
    numbers, order = make_numbers(1), torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    advantages = group_advantages(numbers["rewards"], numbers["groups"])
    torch.testing.assert_close(group_advantages(numbers["rewards"][order], numbers["groups"][order]), advantages[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 6, 32])
def test_a_group_of_equal_rewards_has_no_advantage(
    size: int, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Also for rewards that are no sums of powers of two: a rounded mean would give all samples the same sign."""
    for reward in (2 / 3, 2.1111, 3.2222, 1 / 7):
        rewards = torch.full((size,), reward, dtype=dtype)
        assert group_advantages(rewards, torch.zeros(size, dtype=torch.long)).tolist() == [0.0] * size
        assert "nothing is learned" in caplog.text


# -- log probabilities -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(make_model(tmp_path_factory.mktemp("model")), dtype=torch.float32)


def make_padded_batch() -> tuple[TensorDict, list[tuple[list[int], list[int]]]]:
    """Prompts padded on the left, responses padded on the right, and both without padding."""
    samples = [([5, 6, 7, 8], [9, 10]), ([11], [12, 13, 14]), ([20, 21], [22])]
    prompts = torch.tensor([[0] * (4 - len(prompt)) + prompt for prompt, _ in samples])
    responses = torch.tensor([response + [0] * (3 - len(response)) for _, response in samples])
    attention = torch.tensor([
        [0] * (4 - len(prompt)) + [1] * (len(prompt) + len(response)) + [0] * (3 - len(response))
        for prompt, response in samples
    ])  # fmt: skip
    batch = {
        "prompts": prompts, "responses": responses, "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention, "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
    }  # fmt: skip
    return TensorDict(batch, batch_size=[3]), samples


def test_the_temperature_is_that_of_each_token_in_the_batch(model: Any) -> None:
    batch, _ = make_padded_batch()
    expected = response_logits(model, batch, temperature=0.5)
    batch["temperature"] = torch.full(batch["responses"].shape, 0.5)
    batch["temperature"][:, 1] = 2.0
    found = response_logits(model, batch)
    torch.testing.assert_close(found[:, 0], expected[:, 0])
    torch.testing.assert_close(found[:, 1], expected[:, 1] / 4)
    torch.testing.assert_close(response_logits(model, batch, temperature=0.5), expected)
    with pytest.raises(BadInputError, match=r"temperature must be above 0, got 0\.0; the log probabilities of greedy"):
        response_logprobs(model, batch, temperature=0.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_of_padded_responses_equal_those_without_padding(model: object, temperature: float) -> None:
    batch, samples = make_padded_batch()
    with torch.no_grad():
        found = response_logprobs(model, batch, temperature=temperature)
        for row, (prompt, response) in enumerate(samples):
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0] / temperature  # type: ignore[operator]
            wanted = logits.log_softmax(-1)[range(len(prompt) - 1, len(prompt + response) - 1), response]
            torch.testing.assert_close(found[row, : len(response)], wanted, atol=2e-6, rtol=1e-5)


def test_a_model_computes_no_logits_of_prompts(model: object) -> None:
    sizes: list[torch.Size] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.shape))  # type: ignore[attr-defined]
    response_logits(model, make_padded_batch()[0])
    hook.remove()
    assert sizes[0][:2] == (3, 4)  # the last token of the prompt, and the three of the longest response


def test_log_probabilities_and_entropy_are_those_of_torch() -> None:
    logits, tokens = torch.randn(2, 3, 7), torch.randint(0, 7, (2, 3))
    torch.testing.assert_close(
        logprobs_of(logits, tokens), logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    )
    probabilities = logits.softmax(-1)
    torch.testing.assert_close(entropy_of(logits), -(probabilities * probabilities.log()).sum(-1))


# -- losses ------------------------------------------------------------------------------------------


def test_a_loss_has_the_gradient_of_the_policy_gradient_where_nothing_is_clipped() -> None:
    numbers = make_numbers(2)
    logprobs = numbers["logprobs"].clone().requires_grad_()
    loss = policy_loss(logprobs, numbers["logprobs"], numbers["advantages"], numbers["mask"])
    loss.backward()  # type: ignore[no-untyped-call]
    wanted = -numbers["advantages"][:, None] * numbers["mask"] / numbers["mask"].sum()
    torch.testing.assert_close(logprobs.grad, wanted)


@pytest.mark.parametrize(
    ("ratio", "advantage", "has_gradient"),
    [(1.3, 1.0, False), (1.3, -1.0, True), (0.7, 1.0, True), (0.7, -1.0, False), (1.1, 1.0, True), (0.9, -1.0, True)],
)
def test_a_ratio_is_clipped_on_the_side_where_the_loss_would_go_on(
    ratio: float, advantage: float, has_gradient: bool
) -> None:
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1)).backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert bool(logprobs.grad.item()) is has_gradient


def test_what_is_masked_has_no_effect_even_if_it_is_not_finite() -> None:
    numbers = make_numbers(3)
    wanted = policy_loss(numbers["logprobs"], numbers["old_logprobs"], numbers["advantages"], numbers["mask"])
    logprobs = torch.where(numbers["mask"] == 0, torch.inf, numbers["logprobs"]).requires_grad_()
    loss = policy_loss(logprobs, numbers["old_logprobs"], numbers["advantages"], numbers["mask"])
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == wanted.item()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    weights = importance_weights(logprobs, numbers["old_logprobs"], numbers["mask"])
    assert weights.isfinite().all()


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    numbers = make_numbers(4)
    names = ("logprobs", "old_logprobs", "advantages", "mask")
    whole = policy_loss(*(numbers[name] for name in names))
    total = float(numbers["mask"].sum())
    parts = [
        policy_loss(*(numbers[name][rows] for name in names), num_tokens=total) for rows in ([0, 3], [1, 2, 4, 5, 6, 7])
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_importance_weights_are_truncated_and_have_no_gradient() -> None:
    logprobs = torch.tensor([[0.0, 0.0, 0.0]], requires_grad=True)
    weights = importance_weights(logprobs, torch.tensor([[-3.0, 1.0, 5.0]]), torch.tensor([[1, 1, 0]]), cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[2.0, math.exp(-1.0), 0.0]]))
    assert not weights.requires_grad
    with pytest.raises(BadInputError, match="cap must be above 0"):
        importance_weights(logprobs, logprobs, logprobs, cap=0.0)
    with pytest.raises(BadInputError, match="logprobs come first"):
        importance_weights(weights, logprobs, weights)
    with pytest.raises(BadInputError, match=r"mask must have the shape \[1, 3\], got \[3\]"):
        importance_weights(logprobs, weights, weights[0])


def test_rows_are_padded_without_weight() -> None:
    batch = TensorDict({"response_mask": torch.ones(3, 2), "reward": torch.arange(3.0)}, batch_size=[3])
    padded = pad_rows(batch, 8)
    assert padded["reward"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert padded["response_mask"].sum(dim=1).tolist() == [2, 2, 2, 0, 0, 0, 0, 0]
    assert batch["response_mask"].sum() == 6, "the batch itself is unchanged"
    assert pad_rows(batch, 3) is batch
    with pytest.raises(BadInputError, match="multiple must be at least 1"):
        pad_rows(batch, 0)


def test_arguments_of_wrong_shape_are_named() -> None:
    numbers = make_numbers(0)
    loss: dict[str, Any] = {name: numbers[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"mask": numbers["mask"][0]}, r"mask must have the shape \[8, 5\], got \[5\]"),
        ({"advantages": torch.zeros(1)}, r"advantages must have the shape \[8\] or \[8, 1\] or \[8, 5\], got \[1\]"),
        ({"old_logprobs": None}, "old_logprobs must be a tensor, got NoneType"),
        ({"num_tokens": 0}, "num_tokens must be above 0"),
        ({"advantages": torch.full((ROWS,), math.nan)}, "an advantage is not finite"),
        ({"clip": 1.2}, "clip is the distance of the ratio from 1"),
        ({"clip_high": -0.2}, "clip_high is the distance of the ratio from 1"),
        ({"logprobs": [0.0]}, "logprobs must be a tensor, got list"),
    ]
    for change, message in changes:
        with pytest.raises(BadInputError, match=message):
            policy_loss(**{**loss, **change})
    trained = numbers["logprobs"].clone().requires_grad_()
    with pytest.raises(BadInputError, match="logprobs come first"):  # the order of verl
        policy_loss(numbers["old_logprobs"], trained, numbers["advantages"], numbers["mask"])
    with pytest.raises(BadInputError, match=r"rewards must have the shape \[8\], got \[3\]"):
        group_advantages(numbers["rewards"][:3], numbers["groups"])
    with pytest.raises(BadInputError, match="rewards must be a tensor, got list"):
        group_advantages([1.0], numbers["groups"])  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="a reward is not finite"):
        group_advantages(torch.full((ROWS,), math.nan), numbers["groups"])


def test_the_loss_is_finite_for_tokens_that_one_side_excludes() -> None:
    numbers = make_numbers(0)
    old = numbers["old_logprobs"] - 200.0
    assert policy_loss(numbers["logprobs"], old, torch.zeros(ROWS), numbers["mask"]) == 0
    assert policy_loss(numbers["logprobs"], old, numbers["advantages"], numbers["mask"]).isfinite()


def test_results_are_float32_also_of_a_model_in_bfloat16() -> None:
    logits, tokens = torch.randn(2, 3, 7).bfloat16(), torch.zeros(2, 3, dtype=torch.long)
    logprobs = logprobs_of(logits, tokens)
    torch.testing.assert_close(logprobs, logits.float().log_softmax(-1)[..., 0])
    assert entropy_of(logits).dtype == torch.float32
    assert importance_weights(logprobs.bfloat16(), logprobs, torch.ones(2, 3)).dtype == torch.float32


def test_the_entropy_of_tokens_that_are_excluded() -> None:
    logits = torch.tensor([[[0.0, 0.0, -math.inf]]], requires_grad=True)
    entropy = entropy_of(logits)
    assert entropy.item() == pytest.approx(math.log(2))
    entropy.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad[..., :2].isfinite().all()
