"""The dtype in which weights travel is that of the served parameter, not that of the checkpoint on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both_engines import KINDS, engine_settings
from helpers import adapter_of, assert_equals_reference, change_weights, mesh_of, reference_model, remote_server_of
from model_families import make_family_model, save_family_model
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from vllm_helpers import SIZES

from verl_server import VerlEngine
from verl_server.errors import WeightManifestError

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_rank")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_server_of_a_bfloat16_checkpoint_gets_float32(
    kind: str, one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    """`assert_equals_reference` allows 1e-5; values that were rounded to bfloat16 are off by 1e-2."""
    folder = tiny("qwen3", dtype="bfloat16", weight_std=0.1, **SIZES)
    model = reference_model(folder)
    change_weights(model, seed=3)
    with VerlEngine(one_rank, model_path=str(folder), **engine_settings(kind)) as engine:
        engine.update_weights_from_tensor(model.state_dict())
        assert_equals_reference(engine, model)


def test_servers_of_several_dtypes_and_values_beyond_the_checkpoints_range(
    one_rank: DeviceMesh, tiny: Callable[..., Path]
) -> None:
    """A float16 checkpoint, a server in bfloat16, and a second server in float32. Each rounds once."""
    folder = str(tiny("qwen3", dtype="float16", weight_std=0.1, **SIZES))
    settings: dict[str, Any] = {"model_path": folder, "max_total_tokens": 8192}
    model = reference_model(folder)
    change_weights(model, seed=3)
    weights = model.state_dict()
    with (
        VerlEngine(one_rank, dtype="bfloat16", **settings) as narrow,
        VerlEngine(one_rank, dtype="float32", **settings) as wide,
    ):
        large = {name: tensor.bfloat16() for name, tensor in weights.items()}
        large["model.norm.weight"][0] = 1e6  # infinite in float16
        narrow.update_weights_from_tensor(large)
        assert all(torch.equal(narrow.staging_tensors()[name], tensor) for name, tensor in large.items())
        servers = [remote_server_of(adapter_of(engine)) for engine in (narrow, wide)]
        with VerlEngine(mesh_of(1), model_path=folder, servers=servers) as both:
            both.update_weights_from_tensor(weights)
        assert_equals_reference(wide, model)


def test_parameters_that_a_bfloat16_server_has_in_float32_travel_in_float32(
    one_rank: DeviceMesh, tmp_path: Path
) -> None:
    """SGLang has router and router bias of GLM-4.5 in float32, whatever the checkpoint has."""
    folder = save_family_model(make_family_model("glm4_moe"), "glm4_moe", tmp_path)
    file = folder / "model.safetensors"
    saved = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(saved, file, {"format": "pt"})
    with VerlEngine(one_rank, model_path=str(folder), dtype="bfloat16", max_total_tokens=2048) as engine:
        trained = {name: tensor + 1e-4 * torch.randn(tensor.shape) for name, tensor in saved.items()}
        engine.update_weights_from_tensor(trained)
        staged = engine.staging_tensors()
        exact = {name for name, tensor in trained.items() if torch.equal(staged[name], tensor)}
        assert exact == {f"model.layers.1.mlp.gate.{part}" for part in ("weight", "e_score_correction_bias")}
        assert all(torch.equal(staged[name], trained[name].bfloat16()) for name in trained.keys() - exact)


def test_a_float16_server_refuses_values_that_become_infinite(one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    """And a tied model refuses an output head that has come apart. The server keeps its weights."""
    folder = tiny("qwen2", tie_word_embeddings=True, **SIZES)
    with VerlEngine(one_rank, model_path=str(folder), dtype="float16", max_total_tokens=8192) as engine:
        weights = reference_model(folder).state_dict()
        version = engine.update_weights_from_tensor(weights).weight_version
        tokens = engine.generate(input_ids=[1, 2, 3], sampling_params={"temperature": 0.0})["output_ids"]
        head = {**weights, "lm_head.weight": weights["lm_head.weight"] + 0.1}
        for tensors in (head, iter(head.items())):
            with pytest.raises(WeightManifestError, match=r"'lm_head.weight' and 'model.embed_tokens.weight' are one"):
                engine.update_weights_from_tensor(tensors)
        with pytest.raises(WeightManifestError, match=r"'model.norm.weight' has values .* infinite in float16"):
            engine.update_weights_from_tensor({"model.norm.weight": weights["model.norm.weight"] + 7e4})
        assert engine.generate(input_ids=[1, 2, 3], sampling_params={"temperature": 0.0})["output_ids"] == tokens
        assert engine.weight_version == version
