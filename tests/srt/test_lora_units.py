"""LoRA adapters without servers: which names are loaded, replaced and refused, and which configurations are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from verl_server.engine.lora import LoraAdapters, names_in_lora_paths
from verl_server.errors import BadInputError
from verl_server.rollout.backend import FleetLoras
from verl_server.types import TensorSpec
from verl_server.weights.lora import check_lora_adapter
from verl_server.weights.manifest import Manifest

LAYER = "model.layers.0."
MANIFEST = Manifest(
    {
        f"{LAYER}self_attn.q_proj.weight": TensorSpec((6, 5), "float32"),
        f"{LAYER}input_layernorm.weight": TensorSpec((5,), "float32"),
    }
)
SPECS = {
    f"base_model.model.{LAYER}self_attn.q_proj.lora_A.weight": TensorSpec((4, 5), "float32"),
    f"base_model.model.{LAYER}self_attn.q_proj.lora_B.weight": TensorSpec((6, 4), "float32"),
}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}


class RecordingServer:
    """Records the calls that load and unload LoRA adapters, as `("load", name)` and `("unload", name)`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def load_lora_adapter(self, name: str, tensors: Any, config: Any) -> None:
        self.calls.append(("load", name))

    def unload_lora_adapter(self, name: str) -> None:
        self.calls.append(("unload", name))


@pytest.mark.parametrize(
    ("lora_paths", "names"),
    [
        (None, set()),
        ({"a": "/models/a"}, {"a"}),
        (["a=/models/a", "/models/b"], {"a", "/models/b"}),
        ([{"lora_name": "a", "lora_path": "/models/a"}], {"a"}),
    ],
)
def test_names_in_the_server_argument_lora_paths(lora_paths: Any, names: set[str]) -> None:
    assert names_in_lora_paths(lora_paths) == names


def test_load_replaces_an_adapter_that_the_servers_loaded_at_the_start() -> None:
    loras, server = LoraAdapters({"lora_paths": ["a=/models/a"]}), RecordingServer()
    backend: Any = server
    loras.require(["a", None])
    for name in ("a", "a", "b"):
        loras.load(backend, name, {}, CONFIG)
    assert server.calls == [("unload", "a"), ("load", "a"), ("unload", "a"), ("load", "a"), ("load", "b")]
    loras.unload(backend, "a")
    with pytest.raises(BadInputError, match=r"no LoRA adapter 'a'; loaded are \['b'\]"):
        loras.require("a")


def test_new_server_of_a_fleet_has_the_adapters_of_the_others() -> None:
    """A server loads the adapters of `lora_paths` when it starts. The fleet has replaced `a` and removed `b`."""
    loras, server, new_server = FleetLoras({"a": "/models/a", "b": "/models/b"}), RecordingServer(), RecordingServer()

    def call_all(call: Callable[[Any], object]) -> None:
        call(server)

    loras.load(call_all, "a", {}, {})
    loras.unload(call_all, "b")
    assert server.calls == [("unload", "a"), ("load", "a"), ("unload", "b")]
    begun: list[bool] = []
    adapter: Any = new_server
    loras.prepare_server(adapter, lambda: begun.append(True))
    assert new_server.calls == [("unload", "a"), ("unload", "b"), ("load", "a")]
    assert begun == [True]


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("a", {"r": 16}, "rank 16, but the servers were started with max_lora_rank=8"),
        ("a", {"target_modules": ["down_proj", "q_proj"]}, r"modules \['down_proj'\], but .*=\['o_proj', 'v_proj'\]"),
        ("", {}, "the name of a LoRA adapter must be a string"),
        ({"r": 4}, {}, "the name of a LoRA adapter must be a string"),
    ],
)
def test_a_refused_adapter_leaves_the_adapter_of_that_name_loaded(name: Any, config: Any, message: str) -> None:
    """SGLang refuses ranks and target modules only when the old LoRA adapter is unloaded already."""
    server_args = {"lora_paths": ["a=/models/a"], "max_lora_rank": 8, "lora_target_modules": ["v_proj", "o_proj"]}
    loras, server = LoraAdapters(server_args), RecordingServer()
    backend: Any = server
    with pytest.raises(BadInputError, match=message):
        loras.load(backend, name, {}, {**CONFIG, **config})
    assert server.calls == []
    loras.require("a")
    loras.load(backend, "a", {}, CONFIG)  # SGLang fuses q_proj with v_proj


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": {"q_proj"}},
        {"target_modules": "all-linear"},
        {"target_modules": [f"{LAYER}self_attn.q_proj"]},
        {"target_modules": ("self_attn.q_proj",)},
        {"target_modules": r"model\.layers\.\d+\..*q_proj"},
        {"r": np.int64(4), "lora_alpha": np.int64(8)},
        {"use_rslora": True, "lora_alpha": 4},
        {"bias": "none", "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None},
    ],
)
def test_configurations_of_peft_become_those_of_sglang(config: dict[str, Any]) -> None:
    assert check_lora_adapter(SPECS, {**CONFIG, **config}, MANIFEST) == CONFIG


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "SGLang does not support use_dora=True"),
        ({"rank_pattern": {"q_proj": 8}}, r"SGLang does not support rank_pattern=\{'q_proj': 8\}"),
        ({"alpha_pattern": {"q_proj": 8}}, "SGLang does not support alpha_pattern"),
        ({"bias": "lora_only"}, "SGLang does not support bias='lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "SGLang does not support modules_to_save"),
        ({"peft_type": "IA3"}, "only LoRA adapters can be served, .* peft_type='IA3'"),
        ({"target_modules": ["k_proj"]}, r"for 'model.layers.0.self_attn.q_proj', which .*=\['k_proj'\] do not match"),
        ({"target_modules": ["q_proj", "k_proj"]}, "no tensors for its target module 'k_proj'"),
        ({"target_modules": "("}, "is no regular expression"),
        ({"target_modules": [1]}, "needs target_modules"),
        ({"lora_alpha": "8"}, "needs lora_alpha"),
        (None, r"config must be a dict .*LoraConfig.to_dict\(\)\), got NoneType"),
        ("/models/adapter", r"config must be a dict .*LoraConfig.to_dict\(\)\), got str"),
    ],
)
def test_configurations_that_sglang_would_serve_wrongly_are_refused(config: Any, message: str) -> None:
    config = {**CONFIG, **config} if isinstance(config, dict) else config
    with pytest.raises(BadInputError, match=message):
        check_lora_adapter(SPECS, config, MANIFEST)


def test_a_norm_has_no_lora_adapter() -> None:
    specs = {f"base_model.model.{LAYER}input_layernorm.lora_A.weight": TensorSpec((4, 5), "float32")}
    with pytest.raises(BadInputError, match=r"it is no linear layer, its weight has shape \[5\]"):
        check_lora_adapter(specs, {**CONFIG, "target_modules": ["input_layernorm"]}, MANIFEST)
