"""TRL's trainers on real servers. They run in an environment with TRL and without SGLang, see `make setup-trainers`."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_server import UnsupportedError, VerlServerError
from verl_server.cpu.trl_attention import torch_tree_attention
from verl_server.integrations.trl.async_grpo import RewardFunctions, score_group
from verl_server.integrations.trl.servers import TRL_VERSION, require_trl
from verl_server.integrations.trl.weights import require_mergeable, require_pushable

ROOT = Path(__file__).parents[4]
TRL_VENV = ROOT / ".venv-trl"
TRAINER = Path(__file__).parents[2] / "trl_trainer.py"
#: Largest difference between log probs of trainer and server, both float32.
MAX_GAP = 1e-4
TIMEOUT_S = 280.0
TRAINER_ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


needs_trl = pytest.mark.skipif(
    not (TRL_VENV / ".ready").exists(), reason="the environment of TRL is not there: run make setup-trainers"
)


def train(folder: Path, *scenarios: str, ranks: int = 1) -> list[dict[str, Any]]:
    """Run scenarios of `trl_trainer.py` with servers of this environment. Returns the result of each rank."""
    command = [str(TRL_VENV / "bin" / "python")]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(TRAINER), str(folder), sys.executable, *scenarios]
    done = subprocess.run(command, env=TRAINER_ENV, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(ranks)]


def has_jmespath() -> bool:
    """Whether TRL can parse tool calls. An environment of an earlier `make setup-trainers` lacks the package."""
    command = [str(TRL_VENV / "bin" / "python"), "-c", "import jmespath"]
    return subprocess.run(command, env=TRAINER_ENV, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happened in a process that trained with both trainers on the same two servers."""
    scenarios = ["grpo", "lora", "adapters", "long_prompts", "asynchronous", "refusals"]
    if has_jmespath():
        scenarios.append("tools")
    return train(tmp_path_factory.mktemp("trl"), *scenarios)[0]


@needs_trl
def test_grpo_gets_completions_of_the_present_weights_although_a_server_is_killed(result: dict[str, Any]) -> None:
    grpo = result["grpo"]
    assert [step["versions"] for step in grpo["steps"]] == [[1], [2], [3], [4]], "each step pushes its weights"
    assert max(step["gap"] for step in grpo["steps"]) < MAX_GAP
    assert len(grpo["killed"]) == 1, "killed while it ran requests"
    assert sorted(grpo["restarts"]) == [0, 1]
    assert grpo["versions"] == [5, 5]
    assert max(grpo["replica_gaps"]) < MAX_GAP, "the restarted server has the weights, too"
    assert result["modules"] == [], "the trainer's environment has no engine"


@needs_trl
def test_grpo_logs_the_gap_between_trainer_and_servers(result: dict[str, Any]) -> None:
    """TRL's own metric, which its correction by importance weights uses."""
    gaps = result["grpo"]["trl_gaps"]
    assert len(gaps) == 4
    assert 0 < max(gaps) < MAX_GAP


@needs_trl
def test_an_adapter_of_peft_is_merged_into_the_pushed_weights(result: dict[str, Any]) -> None:
    steps = result["lora"]["steps"]
    assert [step["versions"] for step in steps] == [[6], [7]]
    assert max(step["gap"] for step in steps) < MAX_GAP


@needs_trl
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_is_merged_without_a_change_of_the_model(result: dict[str, Any], kind: str) -> None:
    """Only the active adapter counts. PEFT's own merge in place rounds the base model in bfloat16."""
    nothing: dict[str, list[str]] = {"names": [], "twice": [], "wrong": [], "drifted": [], "still_merged": []}
    assert result["adapters"][kind] == nothing


@needs_trl
def test_an_adapter_on_a_tied_weight_is_refused(result: dict[str, Any]) -> None:
    tied = "model.embed_tokens.weight and lm_head.weight"
    assert result["adapters"]["tied"].startswith(f"UnsupportedError: an adapter changes a weight that is tied: {tied}")
    for error in result["adapters"]["saved"].values():  # PEFT trains a copy of one of the two
        assert error.startswith(f"UnsupportedError: modules_to_save of an adapter copies a weight that is tied: {tied}")
    assert result["adapters"]["saved_together"] == "no error"


@needs_trl
def test_a_second_training_pushes_the_weights_and_long_prompts_get_short_completions(result: dict[str, Any]) -> None:
    steps = result["long_prompts"]["steps"]
    assert [step["versions"] for step in steps] == [[8], [9]]
    assert max(step["gap"] for step in steps) < MAX_GAP
    assert max(step["longest"] for step in steps) <= 2042 - 2032
    assert result["long_prompts"]["no_room"].startswith("BadInputError: a prompt has 2042 tokens")


@needs_trl
def test_turns_after_tool_calls_come_from_the_servers(result: dict[str, Any]) -> None:
    if "tools" not in result:
        pytest.skip("the environment of TRL has no jmespath: remove .venv-trl and run make setup-trainers")
    assert result["tools"]["calls"] == [[1, 2]] * 4
    assert result["tools"]["roles"] == [["assistant", "tool", "assistant"]] * 4
    assert result["tools"]["call_frequency"] == 1.0


@needs_trl
def test_async_grpo_trains_on_samples_with_their_versions_although_a_server_is_killed(result: dict[str, Any]) -> None:
    found = result["asynchronous"]
    assert found["kl"][0] < 1e-8, "the first samples are of the trainer's own weights"
    assert found["oldest"][0] == 1
    assert found["oldest"] == sorted(found["oldest"])
    assert found["oldest"][-1] > 1, "later samples are of later weights"
    assert max(found["staleness"]) <= 4
    assert found["model_version"] == 5
    assert len(found["killed"]) == 1
    assert max(found["replica_gaps"]) < MAX_GAP
    assert found["threads"] == [], "the thread of the worker has ended"


@needs_trl
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("generation_kwargs", "BadInputError: generation_kwargs={'top_k': 5}"),
        ("reuse", "BadInputError: this FleetRolloutFunc belongs to another trainer"),
        ("broken_reward", "VerlServerError: reward function broken_reward failed: RuntimeError: no judge"),
    ],
)
def test_what_cannot_work_is_refused(result: dict[str, Any], case: str, expected: str) -> None:
    assert result["refusals"][case].startswith(expected), result["refusals"][case]


@needs_trl
def test_two_trainer_ranks(tmp_path: Path) -> None:
    """The fleet is standalone: its weights are broadcast."""
    ranks = [each["two_ranks"] for each in train(tmp_path, "two_ranks", ranks=2)]
    assert [rank["mode"] for rank in ranks] == ["standalone", None]
    for rank in ranks:
        assert [step["versions"] for step in rank["steps"]] == [[1], [2]]
        assert max(step["gap"] for step in rank["steps"]) < MAX_GAP, "each rank got the completions of its prompts"
        assert rank["error"].startswith("UnsupportedError: AsyncGRPOTrainer sends the weights from rank 0 alone")


@needs_trl
@pytest.mark.parametrize("trainer", ["grpo", "async"])
def test_the_example_runs(trainer: str) -> None:
    """A few steps: the reward does not rise yet."""
    command = [str(TRL_VENV / "bin" / "python"), str(ROOT / "examples" / "trl_grpo.py"), "--steps", "10"]
    command += ["--trainer", trainer, "--server-python", sys.executable]
    done = subprocess.run(command, env=TRAINER_ENV, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-6000:]
    first, last = re.findall(r"^reward: (\S+) -> (\S+)$", done.stdout, re.MULTILINE)[0]
    assert 0 < float(first) < float(last) + 0.1 < 1
    pushes = int(re.findall(r"weight version of the servers: (\d+)", done.stdout)[0])
    if trainer == "grpo":
        assert pushes == 3, "one push for each generation, which serves four steps"
        assert float(re.findall(r"trainer and server log probs: (\S+)", done.stdout)[0]) < MAX_GAP
    else:
        assert pushes == 11
        assert "pushes old" in done.stdout


# -- without TRL -------------------------------------------------------------------------------------


def test_without_trl_the_error_names_the_version_to_install() -> None:
    with pytest.raises(UnsupportedError, match=rf"trl is not installed: pip install trl=={TRL_VERSION}$"):
        require_trl()


def test_another_version_of_trl_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trl-1.15.0.dist-info").mkdir()
    (tmp_path / "trl-1.15.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 1.15.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedError, match=rf"trl 1\.15\.0 is installed: pip install trl=={TRL_VERSION}$"):
        require_trl()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"peft_config": {"a": SimpleNamespace(is_prompt_learning=True, peft_type="P_TUNING")}}, "prompt learning"),
        (
            {"peft_config": {"a": SimpleNamespace(is_prompt_learning=False, trainable_token_indices=[1])}},
            "trainable_token_indices of the adapter 'a'",
        ),
    ],
)
def test_models_whose_weights_cannot_be_merged(model: dict[str, Any], message: str) -> None:
    require_mergeable(SimpleNamespace())
    with pytest.raises(UnsupportedError, match=message):
        require_mergeable(SimpleNamespace(**model))


@pytest.mark.parametrize(
    ("state", "model", "message"),
    [
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, {}, "ZeRO-3 and FSDP1 keep .* in parts"),
        ({"fsdp_plugin": SimpleNamespace(fsdp_version=1)}, {}, "ZeRO-3 and FSDP1 keep .* in parts"),
        ({}, {"is_loaded_in_4bit": True}, "quantized"),
        ({}, {"is_loaded_in_8bit": True}, "quantized"),
    ],
)
def test_models_whose_weights_cannot_be_pushed(state: dict[str, Any], model: dict[str, Any], message: str) -> None:
    allowed = {"deepspeed_plugin": SimpleNamespace(zero_stage=2), "fsdp_plugin": SimpleNamespace(fsdp_version=2)}
    require_pushable(SimpleNamespace(state=SimpleNamespace(**allowed)), SimpleNamespace())
    with pytest.raises(UnsupportedError, match=message):
        require_pushable(SimpleNamespace(state=SimpleNamespace(**state)), SimpleNamespace(**model))


def test_rewards_of_a_group() -> None:
    scores = score_group(["a", "b"], [[1.0, 0.0, None, 2.0], [1.0, None, None, 0.0]])
    assert scores.rewards[:2] == [2.0, 0.0]
    assert scores.rewards[2] != scores.rewards[2], "NaN: no function had a reward"
    assert scores.advantages[2] == 0.0
    assert sum(scores.advantages) == pytest.approx(0.0)
    assert scores.advantages[0] == pytest.approx((2 - 4 / 3) / scores.std)
    equal = score_group(["a"], [[2 / 3] * 3])
    assert equal.advantages == pytest.approx([0.0] * 3, abs=1e-6)
    nothing = score_group(["a"], [[None, None]])
    assert nothing.advantages == [0.0, 0.0]


def test_reward_functions_may_be_coroutines_and_must_return_a_reward_for_each_completion() -> None:
    async def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    def constant(completions: list[str], **_: Any) -> list[float]:
        return [1.0]

    rewards = RewardFunctions([length, constant])
    assert asyncio.run(rewards.compute({"completions": ["abc"], "function": ["f"]})) == [[3.0], [1.0]]
    assert rewards.longest_call() is None
    with pytest.raises(VerlServerError, match="constant returned 1 rewards for 2 completions"):
        asyncio.run(RewardFunctions([constant]).compute({"completions": ["a", "b"]}))


def test_reward_functions_of_the_same_name_both_count() -> None:
    def score(completions: list[str], value: float, **_: Any) -> list[float]:
        return [value] * len(completions)

    rewards = RewardFunctions([functools.partial(score, value=value) for value in (1.0, 2.0, 4.0)])
    values = asyncio.run(rewards.compute({"completions": ["abc"], "function": ["f"]}))
    scores = score_group(rewards.names, values)
    assert scores.rewards == [7.0]
    assert scores.by_function == {"score": [1.0], "score_2": [2.0], "score_3": [4.0]}


@pytest.mark.parametrize("window", [None, 2])
def test_tree_attention_equals_the_attention_of_each_sample(window: int | None) -> None:
    """Two samples with a common beginning of three tokens; after it, one has two tokens and the other has one."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 6, 8) for heads in (4, 2, 2))
    samples = [[0, 1, 2, 3, 4], [0, 1, 2, 5]]
    output, _ = torch_tree_attention(
        None, query, key, value, None,
        tree_kv_index=torch.tensor([0, 1, 2, *samples[0], *samples[1]]),
        tree_cu_seqlens_q=torch.tensor([0, 3, 5, 6]),
        tree_cu_seqlens_k=torch.tensor([0, 3, 8, 12]),
        sliding_window=window,
    )  # fmt: skip
    for sample in samples:
        places = torch.arange(len(sample))
        mask = places[None, :] <= places[:, None]
        if window is not None:
            mask &= places[None, :] > places[:, None] - window
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, sample], key[:, :, sample], value[:, :, sample], attn_mask=mask, enable_gqa=True
        )
        assert torch.allclose(output[0, sample], expected[0].transpose(0, 1), atol=1e-6)
