"""LoRA adapters and updates of the base model on one vLLM server: both are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from both_engines import RunningStream
from helpers import PROMPTS, adapter_of, reference_model
from test_lora import CONFIG, RANK, TARGETS, adapter_for, merged
from torch.distributed.device_mesh import DeviceMesh
from vllm_helpers import SIZES, TINY_SERVER, Checkpoints, Expected, expected_of, needs_vllm, start_config

from verl_server import VerlEngine
from verl_server.adapter.vllm.server_arguments import launch_vllm_server
from verl_server.errors import BadInputError, ServerError

pytestmark = needs_vllm

TOLERANCE = 1e-5
#: Sizes that two workers can divide, with weights that keep rounding errors of float32 below `TOLERANCE`.
DIVISIBLE = {"hidden_size": 128, "heads": 4, "kv_heads": 2, "vocab_size": 330, "weight_std": 0.1}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Qwen2 models: tied embeddings and biases."""
    return Checkpoints(tmp_path_factory.mktemp("lora"), "qwen2", tie_word_embeddings=True, **DIVISIBLE)


@pytest.fixture(scope="module", params=[1, 2])
def engine(request: pytest.FixtureRequest, one_rank: DeviceMesh, checkpoints: Checkpoints) -> Iterator[VerlEngine]:
    config = start_config()
    arguments: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": TARGETS, **TINY_SERVER}
    with VerlEngine(
        one_rank,
        engine_kind="vllm",
        server_python=config.server_python,
        timeouts=config.timeouts,
        model_path=str(checkpoints.folders[0]),
        tp_size=request.param,
        **arguments,
    ) as engine:
        yield engine


def require(engine: VerlEngine, expected: list[Expected], lora: str | None = None) -> None:
    for prompt, (tokens, logprobs) in zip(PROMPTS, expected, strict=True):
        sampling = {"temperature": 0.0, "max_new_tokens": len(tokens), "ignore_eos": True}
        reply = engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True, lora_path=lora)
        assert reply["output_ids"] == tokens
        found = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
        assert found == pytest.approx(logprobs, abs=TOLERANCE)


def test_adapters_and_updates_of_the_base_model_are_exact(engine: VerlEngine, checkpoints: Checkpoints) -> None:
    bases = [reference_model(folder) for folder in checkpoints.folders]
    for seed in (1, 2):  # the second one replaces the first one
        adapter = adapter_for(bases[0], seed)
        engine.load_lora_adapter("policy", adapter, CONFIG)
        require(engine, expected_of(merged(bases[0], adapter)), "policy")
        require(engine, checkpoints.expected[0])
    engine.update_weights_from_tensor(checkpoints.weights[1])
    require(engine, checkpoints.expected[1])
    require(engine, expected_of(merged(bases[1], adapter)), "policy")
    part = {
        name: tensor for name, tensor in checkpoints.weights[0].items() if name.endswith("1.self_attn.q_proj.weight")
    }
    engine.update_weights_from_tensor(part)
    mixed = reference_model(checkpoints.folders[1])
    mixed.load_state_dict(part, strict=False)
    require(engine, expected_of(mixed))
    engine.unload_lora_adapter("policy")
    with pytest.raises(BadInputError, match="no LoRA adapter 'policy'"):
        engine.generate(input_ids=PROMPTS[0], lora_path="policy")


def test_a_request_without_an_adapter_runs_beside_one_with_it(engine: VerlEngine, checkpoints: Checkpoints) -> None:
    """vLLM computes both in one batch."""
    model = reference_model(checkpoints.folders[0])
    tensors = adapter_for(model, 3)
    expected = expected_of(merged(model, tensors))
    engine.update_weights_from_tensor(checkpoints.weights[0])
    engine.load_lora_adapter("beside", tensors.items(), CONFIG)
    running = RunningStream(adapter_of(engine), input_ids=PROMPTS[0], lora_path="beside")
    try:
        running.until_tokens(5)
        require(engine, checkpoints.expected[0])
        require(engine, expected, "beside")
        assert running.is_running
    finally:
        adapter_of(engine).abort_request(abort_all=True)
        running.result()
        engine.unload_lora_adapter("beside")


def test_a_refused_adapter_and_an_open_update_leave_the_workers_in_step(
    engine: VerlEngine, checkpoints: Checkpoints
) -> None:
    """vLLM raises in its workers then, which would mix up the later replies of two workers."""
    adapter, base = adapter_of(engine), reference_model(checkpoints.folders[0])
    too_large = {
        name: tensor.repeat(*(64 // RANK if size == RANK else 1 for size in tensor.shape))
        for name, tensor in adapter_for(base, 1).items()
    }
    for _ in range(2):
        with pytest.raises(ServerError, match="rank 64 is greater than max_lora_rank"):
            adapter.load_lora_adapter("large", too_large, {**CONFIG, "r": 64})
    too_wide = {name: torch.cat([tensor] * 2, int("lora_A" in name)) for name, tensor in adapter_for(base, 1).items()}
    with pytest.raises(ServerError, match="RuntimeError"):  # found when vLLM copies the tensors
        adapter.load_lora_adapter("wide", too_wide, CONFIG)
    assert adapter.health()
    engine.update_weights_from_tensor(checkpoints.weights[0])
    require(engine, checkpoints.expected[0])
    adapter.pause_generation("retract")
    try:
        with requests.Session() as session:
            session.trust_env = False
            headers = {"Authorization": f"Bearer {adapter.admin_api_key}"}
            url = adapter.base_url + "/start_weight_update"
            assert session.post(url, headers=headers, timeout=30).status_code == 200
    finally:
        adapter.continue_generation()
    for version in (1, 0):
        engine.update_weights_from_tensor(checkpoints.weights[version])
        require(engine, checkpoints.expected[version])
    engine.load_lora_adapter("small", adapter_for(base, 2), CONFIG)
    require(engine, expected_of(merged(base, adapter_for(base, 2))), "small")


def test_an_adapter_is_replaced_during_a_pause(engine: VerlEngine, checkpoints: Checkpoints) -> None:
    """Its running requests are held by the pause, so the unload of the old one does not wait for their end."""
    adapter, base = adapter_of(engine), reference_model(checkpoints.folders[0])
    engine.update_weights_from_tensor(checkpoints.weights[0])
    engine.load_lora_adapter("replaced", adapter_for(base, 1), CONFIG)
    stream = RunningStream(adapter, input_ids=PROMPTS[0], lora_path="replaced", rid="held")
    stream.until_tokens(3)
    adapter.pause_generation("retract")
    try:
        engine.load_lora_adapter("replaced", adapter_for(base, 2), CONFIG)
    finally:
        adapter.continue_generation()
        adapter.abort_request("held")
    require(engine, expected_of(merged(base, adapter_for(base, 2))), "replaced")


def test_experts_with_lora_are_refused_on_a_cpu(tiny: Callable[..., Path]) -> None:
    arguments = {"model_path": tiny("qwen3_moe", **SIZES), "enable_lora": True, **TINY_SERVER}
    with pytest.raises(BadInputError, match="mixture of experts with enable_lora"):
        launch_vllm_server(arguments, start_config(), {})
