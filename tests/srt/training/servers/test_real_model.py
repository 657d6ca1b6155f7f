"""A pretrained model (SmolLM2-135M-Instruct) on real servers: log probabilities, updates, LoRA, text, chat template."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm_helpers import VLLM_PYTHON, needs_vllm

from verl_server import VerlEngine, training
from verl_server.agent import AgentLoop, Episode, RolloutLimits, RolloutRunner, SingleTurnLoop, Task
from verl_server.errors import BadInputError
from verl_server.trajectory import get_renderer

QUESTIONS = ["What is the capital of France?", "Name three colours.", "Write a sentence about the sea."]
#: Largest allowed difference between the log probabilities of the server and those of Hugging Face in float32, and the
#: mean difference. The server computes with 11 bits (float16) or 8 bits (bfloat16) of precision.
GAPS = {"float32": (1e-4, 2e-5), "float16": (0.15, 0.02), "bfloat16": (1.0, 0.08)}


@pytest.fixture(scope="module", params=list(GAPS))
def engine(request: pytest.FixtureRequest, real_model: Path) -> Iterator[VerlEngine]:
    with VerlEngine(
        model_path=str(real_model), dtype=request.param, max_total_tokens=8192, random_seed=0, enable_lora=True,
        max_lora_rank=8, lora_target_modules=["q_proj", "v_proj"],
    ) as engine:  # fmt: skip
        yield engine


@pytest.fixture(scope="module")
def policy(real_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()


def prompts_of(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        for text in QUESTIONS
    ]


def gap_to(engine: VerlEngine, policy: Any, folder: Path, **request: Any) -> tuple[float, float]:
    """The largest and the mean difference between the log probabilities of sampled tokens in server and policy."""
    prompts = prompts_of(folder)
    sampling = {"temperature": 1.0, "max_new_tokens": 24, "sampling_seed": 1}
    replies = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True, **request)
    gaps = []
    for prompt, reply in zip(prompts, replies, strict=True):
        tokens = reply["output_ids"]
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([prompt + tokens])).logits[0]
        wanted = logits.log_softmax(-1)[range(len(prompt) - 1, len(prompt + tokens) - 1), tokens]
        found = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
        gaps.append((found - wanted).abs())
    joined = torch.cat(gaps)
    return float(joined.max()), float(joined.mean())


def changed(policy: Any) -> Any:
    """A copy of the policy after a step in a random direction that changes its answers."""
    other, generator = copy.deepcopy(policy), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.02 * torch.randn(parameter.shape, generator=generator))
    return other


def require_exact_updates(engine: VerlEngine, policy: Any, real_model: Path) -> None:
    """Of weights in float32 that are pushed: a server in bfloat16 rounds them as Hugging Face does."""
    largest, mean = GAPS[engine.adapter.server_args["dtype"]]  # type: ignore[union-attr]
    found = gap_to(engine, policy, real_model)
    assert found[0] < largest
    assert found[1] < mean
    other = changed(policy)
    try:
        result = engine.update_weights_from_tensor(other.named_parameters())
        assert result.num_missing == 0
        found = gap_to(engine, other, real_model)
        assert found[0] < largest
        assert found[1] < mean
        assert gap_to(engine, policy, real_model)[1] > 0.12, "the update changed what the model says"
    finally:
        engine.update_weights_from_tensor(policy.named_parameters())


def test_log_probabilities_before_and_after_an_update(engine: VerlEngine, policy: Any, real_model: Path) -> None:
    require_exact_updates(engine, policy, real_model)


@needs_vllm
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_of_vllm(policy: Any, real_model: Path, dtype: str) -> None:
    server: dict[str, Any] = {"model_path": str(real_model), "dtype": dtype, "context_length": 2048, "random_seed": 0}
    with VerlEngine(engine_kind="vllm", server_python=VLLM_PYTHON, **server) as engine:
        require_exact_updates(engine, policy, real_model)


def test_a_lora_adapter_equals_the_merged_model(engine: VerlEngine, policy: Any, real_model: Path) -> None:
    largest, mean = GAPS[engine.adapter.server_args["dtype"]]  # type: ignore[union-attr]
    generator, merged = torch.Generator().manual_seed(1), copy.deepcopy(policy)
    adapter: dict[str, torch.Tensor] = {}
    for name, parameter in merged.named_parameters():
        module = name.removesuffix(".weight")
        if module.endswith(("q_proj", "v_proj")):
            a = torch.randn(8, parameter.shape[1], generator=generator) * 0.02
            b = torch.randn(parameter.shape[0], 8, generator=generator) * 0.02
            adapter |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
            with torch.no_grad():
                parameter.add_(2.0 * b @ a)
    config = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA", "bias": "none"}
    engine.load_lora_adapter("a", adapter, config)
    try:
        found = gap_to(engine, merged, real_model, lora_path="a")
        assert found[0] < largest
        assert found[1] < mean
        assert gap_to(engine, policy, real_model, lora_path="a")[1] > 2 * found[1], "the adapter has an effect"
    finally:
        engine.unload_lora_adapter("a")


def test_a_batch_has_the_temperatures_of_its_log_probabilities(
    engine: VerlEngine, policy: Any, real_model: Path
) -> None:
    """Those of the runner and of single turns: the trainer computes the same values without being told."""

    class TwoTurns(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.generate()
            await episode.generate([{"role": "user", "content": "Again."}], temperature=1.5)

    largest, mean = GAPS[engine.adapter.server_args["dtype"]]  # type: ignore[union-attr]
    runner = RolloutRunner(
        TwoTurns(), engine, renderer=get_renderer(AutoTokenizer.from_pretrained(real_model)),
        limits=RolloutLimits(max_response_tokens=64), sampling_params={"temperature": 0.5, "max_new_tokens": 16},
    )  # fmt: skip

    async def run() -> Any:
        tasks = [Task(text, [{"role": "user", "content": text}]) for text in QUESTIONS]
        async with contextlib.aclosing(runner.steps(tasks, num_groups=len(tasks))) as steps:
            return (await anext(steps)).batch()

    batch = asyncio.run(run())
    used = batch["response_mask"].bool()
    assert set(batch["temperature"][used].tolist()) == {0.5, 1.5}
    with torch.no_grad():
        gaps = (training.response_logprobs(policy, batch) - batch["rollout_log_probs"])[used].abs()
        wrong = (training.response_logprobs(policy, batch, temperature=1.0) - batch["rollout_log_probs"])[used].abs()
    assert float(gaps.max()) < largest
    assert float(gaps.mean()) < mean
    assert float(wrong.mean()) > 2 * mean


def test_a_response_that_is_cut_in_the_middle_of_a_character_keeps_its_tokens(
    engine: VerlEngine, real_model: Path
) -> None:
    """The tokenizer is byte level: a character such as an emoji has several tokens. Text is decoded, never encoded."""
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    emoji = tokenizer.encode("🦩", add_special_tokens=False)
    assert len(emoji) > 1
    runner = RolloutRunner(
        SingleTurnLoop(), engine, renderer=get_renderer(tokenizer), limits=RolloutLimits(max_response_tokens=3),
        sampling_params={"temperature": 1.0, "logit_bias": {str(emoji[0]): 100.0}, "ignore_eos": True},
    )  # fmt: skip

    async def run() -> Any:
        task = Task("t", [{"role": "user", "content": "🦩 日本語"}])
        groups = [group async for group in runner.run([task])]
        return groups[0].samples[0]

    sample = asyncio.run(run())
    assert sample.error is None
    sampled = [token for node in sample.graph.nodes if node.sampled for token in node.token_ids]
    assert sampled == [emoji[0]] * 3
    assert "�" in sample.text
    prompt = [token for node in sample.graph.nodes if not node.sampled for token in node.token_ids]
    assert "🦩 日本語" in tokenizer.decode(prompt)


def test_a_chat_template_without_tools_is_named_before_the_first_sample(
    engine: VerlEngine, real_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No error: the messages may describe the tools, as those of a program often do."""

    def add(a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b

    renderer = get_renderer(AutoTokenizer.from_pretrained(real_model))
    RolloutRunner([add], engine, renderer=renderer, limits=RolloutLimits(max_response_tokens=8))
    assert "the chat template ignores the tools ['add']" in caplog.text


def test_two_tensor_parallel_ranks_cannot_share_nine_heads(real_model: Path) -> None:
    with pytest.raises(BadInputError, match="9"):
        VerlEngine(model_path=str(real_model), tp_size=2)
