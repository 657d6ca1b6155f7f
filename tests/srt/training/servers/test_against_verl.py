"""Advantages and losses against those of verl, in the environment `.venv-trainers` (`make setup-trainers`)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from test_losses import make_numbers

from verl_server.training import group_advantages, policy_loss

VERL_PYTHON = Path(__file__).parents[4] / ".venv-trainers" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not VERL_PYTHON.exists(), reason="there is no environment with verl: run make setup-trainers"
)

VERL_PROGRAM = """
import json, sys
import numpy as np, torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, FSDPActorConfig

numbers = {name: torch.tensor(value) for name, value in json.load(open(sys.argv[1])).items()}
rewards = torch.zeros_like(numbers["mask"]); rewards[:, 0] = numbers["rewards"]
index = np.array(numbers["groups"].tolist())
found = {}
for scale in (True, False):
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        rewards, torch.ones_like(numbers["mask"]), index, norm_adv_by_std_in_grpo=scale)
    found[f"advantages {scale}"] = advantages[:, 0].tolist()
for low, high in ((0.2, 0.2), (0.2, 0.28)):
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio=low,
                             clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=1e9)
    loss, *_ = core_algos.compute_policy_loss_vanilla(
        numbers["old_logprobs"], numbers["logprobs"], numbers["advantages"][:, None].expand_as(numbers["mask"]),
        numbers["mask"], loss_agg_mode="token-mean", config=config)
    found[f"loss {high}"] = loss.item()
json.dump(found, open(sys.argv[2], "w"))
"""


def test_advantages_and_losses_equal_those_of_verl(tmp_path: Path) -> None:
    for seed in range(3):
        numbers = make_numbers(seed)
        given, found_at = tmp_path / "numbers.json", tmp_path / "found.json"
        given.write_text(json.dumps({name: value.tolist() for name, value in numbers.items()}))
        subprocess.run([str(VERL_PYTHON), "-c", VERL_PROGRAM, str(given), str(found_at)], check=True, timeout=300)
        found = json.loads(found_at.read_text())
        is_compared = numbers["groups"] != 2  # verl does not subtract a mean from the only sample of a group
        for scale in (True, False):
            ours = group_advantages(numbers["rewards"], numbers["groups"], scale=scale)
            theirs = torch.tensor(found[f"advantages {scale}"])
            torch.testing.assert_close(ours[is_compared], theirs[is_compared], atol=1e-5, rtol=1e-5)
        for high in (0.2, 0.28):
            names = ("logprobs", "old_logprobs", "advantages", "mask")
            loss = policy_loss(*(numbers[name] for name in names), clip=0.2, clip_high=high)
            assert loss.item() == pytest.approx(found[f"loss {high}"], abs=1e-6)
