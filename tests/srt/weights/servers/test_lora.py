"""LoRA adapters on a real server: equal to the merged model, replaced, removed, and refused if they do not fit."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    GREEDY,
    PROMPTS,
    adapter_of,
    assert_equals_reference,
    change_weights,
    greedy_with_logprobs,
    reference_model,
    wait_until,
)
from torch.distributed.device_mesh import DeviceMesh

from verl_server import HttpServerEngineAdapter, RolloutManager, VerlEngine
from verl_server.errors import BadInputError, PeerError, VerlServerError, WeightManifestError
from verl_server.rollout.fleet import ReplicaState

RANK = 4
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
CONFIG = {"r": RANK, "lora_alpha": 8, "target_modules": TARGETS, "peft_type": "LORA", "bias": "none"}


@pytest.fixture(scope="module", params=[1, 2])
def engine(request: pytest.FixtureRequest, one_rank: DeviceMesh, tiny: Callable[..., Path]) -> Iterator[VerlEngine]:
    with VerlEngine(
        one_rank,
        model_path=str(tiny("qwen3")),
        dtype="float32",
        max_total_tokens=8192,
        tp_size=request.param,
        enable_lora=True,
        max_lora_rank=8,
        lora_target_modules=TARGETS,
    ) as engine:
        yield engine


def adapter_for(model: Any, seed: int, pattern: str = "|".join(TARGETS)) -> dict[str, torch.Tensor]:
    """A LoRA adapter with random values for the modules whose names end with a match of the regular expression."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if re.fullmatch(rf".*\.({pattern})", module):
            outputs, inputs = tensor.shape
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) * 0.1
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator) * 0.1
    return tensors


SCALE = 8 / RANK
"""`lora_alpha / r` of `CONFIG`."""


def merged(model: Any, adapter: dict[str, torch.Tensor], scale: float = SCALE) -> Any:
    """A copy of the model with the adapter added to its weights."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, lora_a in adapter.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += scale * (adapter[name.replace(".lora_A.", ".lora_B.")] @ lora_a)
    merged_model = type(model)(model.config).to(next(model.parameters()).dtype)
    merged_model.load_state_dict(weights)
    return merged_model.eval()


def assert_serves(engine: VerlEngine | HttpServerEngineAdapter, name: str, reference: Any) -> None:
    sampling = {**GREEDY, "max_new_tokens": 8}
    for prompt in PROMPTS:
        tokens, logprobs = greedy_with_logprobs(reference, prompt, 8)
        reply = engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True, lora_path=name)
        assert reply["output_ids"] == tokens
        for theirs, ours in zip(reply["meta_info"]["output_token_logprobs"], logprobs, strict=True):
            assert abs(theirs[0] - ours) < 2e-5


def test_adapters_by_name(engine: VerlEngine, tiny: Callable[..., Path]) -> None:
    model = reference_model(tiny("qwen3"))
    one, two = adapter_for(model, 1), adapter_for(model, 2)
    engine.load_lora_adapter("one", one.items(), CONFIG)
    engine.load_lora_adapter("two", two.items(), CONFIG)
    assert_serves(engine, "one", merged(model, one))
    assert_serves(engine, "two", merged(model, two))
    assert_equals_reference(engine, model)

    engine.load_lora_adapter("one", adapter_for(model, 3).items(), CONFIG)
    assert_serves(engine, "one", merged(model, adapter_for(model, 3)))
    assert_serves(engine, "two", merged(model, two))
    with pytest.raises(BadInputError, match="SGLang does not support use_dora=True"):
        engine.load_lora_adapter("two", one.items(), {**CONFIG, "use_dora": True})
    assert_serves(engine, "two", merged(model, two))

    engine.unload_lora_adapter("one")
    with pytest.raises(BadInputError, match=r"no LoRA adapter 'one'; loaded are \['two'\]"):
        engine.generate(input_ids=[1], lora_path="one")
    with pytest.raises(BadInputError, match="no LoRA adapter"):
        engine.unload_lora_adapter("one")

    change_weights(model, seed=4)  # the weights of the base model change
    assert engine.update_weights_from_tensor(model.state_dict().items()).num_missing == 0
    assert_equals_reference(engine, model)
    assert_serves(engine, "two", merged(model, two))
    engine.unload_lora_adapter("two")
    engine.update_weights_from_tensor(reference_model(tiny("qwen3")).state_dict().items())


@pytest.mark.parametrize(
    ("config", "pattern", "scale"),
    [
        ({"use_rslora": True}, "|".join(TARGETS), 8 / math.sqrt(RANK)),
        ({"target_modules": {"q_proj"}}, "q_proj", SCALE),
        ({"target_modules": ["self_attn.k_proj"]}, "k_proj", SCALE),
        ({"target_modules": r".*layers\.1\.mlp\.up_proj"}, r"layers\.1\.mlp\.up_proj", SCALE),
        ({"target_modules": "all-linear"}, "[a-z]+_proj", SCALE),
    ],
    ids=["rslora", "q_proj", "k_proj", "up_proj of a layer", "all-linear"],
)
def test_configurations_of_peft_equal_the_merged_model(
    config: dict[str, Any], pattern: str, scale: float, engine: VerlEngine, tiny: Callable[..., Path]
) -> None:
    """SGLang fuses q, k and v, and gate and up: the parts that a LoRA adapter lacks are sent as zeros."""
    model = reference_model(tiny("qwen3"))
    adapter = adapter_for(model, 6, pattern)
    engine.load_lora_adapter("peft", adapter.items(), {"r": RANK, "lora_alpha": 8, "target_modules": TARGETS, **config})
    assert_serves(engine, "peft", merged(model, adapter, scale))
    engine.unload_lora_adapter("peft")


def test_an_adapter_of_one_server_converts_the_configuration(engine: VerlEngine, tiny: Callable[..., Path]) -> None:
    model, server = reference_model(tiny("qwen3")), adapter_of(engine)
    lora = adapter_for(model, 7, "[a-z]+_proj")
    config = {**CONFIG, "target_modules": {*TARGETS, "k_proj", "up_proj"}, "r": 8, "rank_pattern": {".*proj": RANK}}
    server.load_lora_adapter("direct", lora, {**config, "use_rslora": True})
    assert_serves(server, "direct", merged(model, lora, 8 / math.sqrt(RANK)))
    server.unload_lora_adapter("direct")
    for field, value in (("init_lora_weights", "pissa"), ("use_dora", True)):
        with pytest.raises(BadInputError) as caught:
            server.load_lora_adapter("direct", lora, {**config, field: value})
        assert caught.value.details == {"argument": field}


def test_adapters_that_do_not_fit_are_refused(engine: VerlEngine, tiny: Callable[..., Path]) -> None:
    model = reference_model(tiny("qwen3"))
    good = adapter_for(model, 1)
    first = next(iter(good))

    def refused(tensors: dict[str, Any], config: dict[str, Any], message: str) -> None:
        with pytest.raises(BadInputError, match=message):
            engine.load_lora_adapter("bad", tensors.items(), config)

    refused({}, CONFIG, "no tensors")
    refused({**good, "nonsense": torch.ones(1)}, CONFIG, "'nonsense' is no tensor of a LoRA adapter")
    refused({**good, first: torch.ones(RANK, 7)}, CONFIG, r"has shape \[4, 7\]")
    refused({name: tensor for name, tensor in good.items() if name != first}, CONFIG, "the LoRA adapter lacks")
    refused(good, {**CONFIG, "r": 0}, "LoRA rank `r`")
    refused(good, {**CONFIG, "lora_alpha": None}, "needs lora_alpha")
    refused(good, {**CONFIG, "target_modules": ["q_proj"]}, r"target_modules=\['q_proj'\] do not match")
    refused(good, {**CONFIG, "target_modules": [*TARGETS, "k_proj"]}, "no tensors for its target module 'k_proj'")
    wide = {
        name: torch.ones(16, t.shape[1]) if "lora_A" in name else torch.ones(t.shape[0], 16) for name, t in good.items()
    }
    refused(wide, {**CONFIG, "r": 16}, "rank 16, but the servers were started with max_lora_rank=8")
    with pytest.raises(VerlServerError, match="rank") as caught:
        adapter_of(engine).load_lora_adapter("wide", wide, {**CONFIG, "r": 16})
    assert "loaded_adapters" not in caught.value.message, "the message is SGLang's text, not its JSON"
    assert issubclass(WeightManifestError, BadInputError)

    def failing_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(iter(good.items()))
        raise OSError("the disk is gone")

    with pytest.raises(PeerError, match="the disk is gone"):
        engine.load_lora_adapter("bad", failing_tensors(), CONFIG)
    assert_equals_reference(engine, model)


def test_a_server_without_enable_lora_gets_no_request(shared_engine: VerlEngine, tiny: Callable[..., Path]) -> None:
    adapter = adapter_of(shared_engine)
    message = "started without enable_lora.*Start the server with enable_lora=True"
    calls: list[Callable[[], None]] = [
        lambda: shared_engine.load_lora_adapter("a", adapter_for(reference_model(tiny("qwen3")), 1).items(), CONFIG),
        lambda: adapter.load_lora_adapter("a", {}, CONFIG),
        lambda: adapter.unload_lora_adapter("a"),
    ]
    for call in calls:
        with pytest.raises(BadInputError, match=message) as caught:
            call()
        assert caught.value.details == {"argument": "enable_lora"}


@pytest.mark.timeout(600)
def test_a_restarted_server_has_the_adapters(one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    folder = str(tiny("qwen3"))
    model = reference_model(folder)
    one = adapter_for(model, 5)
    with (
        RolloutManager(
            1,
            model_path=folder,
            dtype="float32",
            max_total_tokens=8192,
            enable_lora=True,
            max_lora_rank=8,
            lora_target_modules=TARGETS,
        ) as fleet,
        VerlEngine(one_rank, fleet=fleet, model_path=folder, dtype="float32") as engine,
    ):
        engine.update_weights_from_tensor(model.state_dict().items())
        engine.load_lora_adapter("one", one.items(), CONFIG)
        (replica,) = fleet.replicas
        assert replica.pids is not None
        os.kill(replica.pids.main, signal.SIGKILL)
        wait_until(lambda: replica.state is not ReplicaState.HEALTHY, 10.0, "the loss was not noticed")
        wait_until(lambda: replica.state is ReplicaState.HEALTHY, 250.0, "the replica did not recover")
        assert_serves(engine, "one", merged(model, one))
        assert_equals_reference(engine, model)
