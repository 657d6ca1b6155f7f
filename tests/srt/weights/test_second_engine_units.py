"""What starts a server of either engine, and partial updates of engines that load whole modules, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from verl_server.adapter.engine import get_engine
from verl_server.config import AdapterConfig, EngineKind
from verl_server.errors import BadInputError, WeightManifestError
from verl_server.server.environment import VISIBLE_DEVICES
from verl_server.types import ServerInfo, TensorSpec
from verl_server.weights.manifest import Manifest
from verl_server.weights.transports.base import parse_message, serialize_message
from verl_server.weights.update.staged import complete_modules

FUSED = (
    ("k_proj.weight", "q_proj.bias", "q_proj.weight", "v_proj.weight"),
    ("*.down_proj.weight", "*.gate_proj.weight"),
    ("input_linear.weight", "output_linear.weight"),
)
NAMES = [
    "layers.0.attn.q_proj.weight", "layers.0.attn.q_proj.bias", "layers.0.attn.k_proj.weight",
    "layers.0.attn.v_proj.weight", "layers.0.attn.o_proj.weight", "layers.1.attn.q_proj.weight",
    "layers.0.mlp.experts.0.gate_proj.weight", "layers.0.mlp.experts.1.down_proj.weight", "lm_head.weight",
    "layers.0.moe.input_linear.weight", "layers.0.moe.output_linear.weight", "layers.1.moe.output_linear.weight",
]  # fmt: skip
MANIFEST = Manifest({name: TensorSpec((1,), "float32") for name in NAMES}, frozenset({"lm_head.weight"}), frozenset())
PUBLISHED = {name: number for number, name in enumerate(NAMES)}


def complete(names: Sequence[str], published: dict[str, int] = PUBLISHED, fused: Any = FUSED) -> list[str]:
    members = [ServerInfo("a", 1), ServerInfo("b", 1, fused)]
    return complete_modules(names, members, MANIFEST, published, lambda missing: [PUBLISHED[name] for name in missing])


def test_the_other_tensors_of_a_module_are_added() -> None:
    assert complete(["layers.0.attn.q_proj.weight"]) == NAMES[:4]
    assert complete(["layers.0.attn.o_proj.weight"]) == ["layers.0.attn.o_proj.weight"]
    assert complete(["layers.0.mlp.experts.1.down_proj.weight"]) == NAMES[6:8], "the experts of a layer"
    assert complete(["layers.0.attn.q_proj.weight"], fused=None) == NAMES[:1], "an engine that loads single tensors"
    assert complete(["lm_head.weight"]) == ["lm_head.weight"]
    assert complete(["layers.0.moe.output_linear.weight"]) == NAMES[9:11], "tensors of all experts"


def test_tensors_that_were_not_published_or_have_changed_are_refused() -> None:
    for published in ({}, {**PUBLISHED, "layers.0.attn.k_proj.weight": 77}):
        with pytest.raises(WeightManifestError, match=r"lacks layers\.0\.attn\.k_proj"):
            complete(["layers.0.attn.q_proj.weight", "layers.0.attn.q_proj.bias"], published)


def test_the_message_of_an_update_is_read_without_pickle() -> None:
    message = {"transport": "shared_memory", "update_id": "é", "n": [1, 2]}
    assert parse_message(serialize_message(message)) == message
    for wrong in ("", "nonsense", "gASVAAAA", serialize_message(message)[:40]):
        with pytest.raises(ValueError, match=r".*"):
            parse_message(wrong)


def test_the_engine_kind_comes_from_the_setting_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_SERVER_ENGINE", raising=False)
    assert AdapterConfig().engine_kind is EngineKind.SGLANG
    monkeypatch.setenv("VERL_SERVER_ENGINE", "vllm")
    assert AdapterConfig().engine_kind is EngineKind.VLLM
    assert AdapterConfig(engine_kind="sglang").engine_kind is EngineKind.SGLANG
    monkeypatch.setenv("VERL_SERVER_ENGINE", "vlm")
    with pytest.raises(BadInputError, match=r"VERL_SERVER_ENGINE must be one of .*did you mean 'vllm'"):
        AdapterConfig()
    with pytest.raises(BadInputError, match="engine_kind must be one of"):
        AdapterConfig(engine_kind="trt")


def test_vllm_replicas_get_the_devices_that_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = get_engine("vllm")
    monkeypatch.delenv(VISIBLE_DEVICES, raising=False)
    assert engine.place_on_devices({}, {}, 2, 2)[1][VISIBLE_DEVICES] == "2,3"
    monkeypatch.setenv(VISIBLE_DEVICES, "4,5,6,7")
    assert engine.place_on_devices({}, {}, 2, 2)[1][VISIBLE_DEVICES] == "6,7"
    assert engine.place_on_devices({}, {VISIBLE_DEVICES: "1,3"}, 1, 1)[1][VISIBLE_DEVICES] == "3"
    assert get_engine("sglang").place_on_devices({"a": 1}, {}, 2, 2) == ({"a": 1, "base_gpu_id": 2}, {})


def test_vllms_names_of_shared_arguments_are_understood() -> None:
    engine = get_engine("vllm")
    given = {"model": "m", "tensor_parallel_size": 2, "seed": 1}
    assert engine.with_common_names(given) == {"model_path": "m", "tp_size": 2, "random_seed": 1}
    assert engine.with_common_names({"model": "m", "model_path": "n"}) == {"model": "m", "model_path": "n"}
