"""LoRA adapters without servers: which names are loaded, replaced and refused, and which configurations are refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from verl_server.adapter import AsyncHttpServerEngineAdapter, HttpServerEngineAdapter
from verl_server.adapter.model_files import lora_paths_by_name, plain_lora_config
from verl_server.adapter.sglang.server_arguments import validate_server_args
from verl_server.engine.servers import HttpServers
from verl_server.engine.verl_engine import LoraAdapters
from verl_server.errors import BadInputError, ServerError, WeightManifestError
from verl_server.rollout.updates import FleetLoras
from verl_server.types import ServerInfo, TensorSpec
from verl_server.weights.manifest import Manifest, check_lora_adapter

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

    def list_lora_adapters(self) -> frozenset[str]:
        """None besides those that the caller knows."""
        return frozenset()


@pytest.mark.parametrize(
    ("lora_paths", "by_name"),
    [
        (None, {}),
        ({"a": "/models/a"}, {"a": "/models/a"}),
        (["a=/models/a", "/models/b"], {"a": "/models/a", "/models/b": "/models/b"}),
        ([{"lora_name": "a", "lora_path": "/models/a"}], {"a": "/models/a"}),
    ],
)
def test_the_server_argument_lora_paths(lora_paths: Any, by_name: dict[str, str]) -> None:
    assert lora_paths_by_name(lora_paths) == by_name


def test_load_replaces_an_adapter_that_the_servers_loaded_at_the_start() -> None:
    loras, server = LoraAdapters({"lora_paths": ["a=/models/a"]}), RecordingServer()
    backend: Any = server
    loras.require(backend, ["a", None])
    for name in ("a", "a", "b"):
        loras.load(backend, name, {}, CONFIG)
    assert server.calls == [("unload", "a"), ("load", "a"), ("unload", "a"), ("load", "a"), ("load", "b")]
    loras.unload(backend, "a")
    with pytest.raises(BadInputError, match=r"no LoRA adapter 'a'; loaded are \['b'\]"):
        loras.require(backend, "a")


class LoraServer(ThreadingHTTPServer):
    """Has LoRA adapters as SGLang has them. Fails at the first load when `fails` is set."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), LoraRequest)
        self.fails = fails
        self.names: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.adapter = HttpServerEngineAdapter.attach(f"http://127.0.0.1:{self.server_port}")

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/server_info":
            return 200, {"model_path": "none", "enable_lora": True, "tp_size": 1}
        if path == "/v1/models":
            cards = [{"id": "none", "parent": None}, *({"id": name, "parent": "none"} for name in self.names)]
            return 200, {"object": "list", "data": cards}
        name = body["lora_name"]
        if path == "/unload_lora_adapter":
            self.names.remove(name)
            return 200, {"success": True}
        if self.fails:
            self.fails = False
            return 500, {"error": {"message": "out of memory"}}
        if name in self.names:
            return 400, {"success": False, "error_message": f"LoRA with name {name} already exists"}
        self.names.append(name)
        return 200, {"success": True}


class LoraRequest(BaseHTTPRequestHandler):
    server: LoraServer

    def do_GET(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, reply = self.server.answer(self.path, json.loads(raw or b"{}"))
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@contextlib.contextmanager
def lora_backend(*servers: LoraServer) -> Iterator[HttpServers]:
    """The backend of `VerlEngine(servers=[...])` for these servers."""
    backend = HttpServers([s.adapter for s in servers], [ServerInfo(s.adapter.base_url, 1) for s in servers])
    try:
        yield backend
    finally:
        backend.shutdown()
        for server in servers:
            server.shutdown()
            server.server_close()


TENSORS = {name: torch.zeros(spec.shape) for name, spec in SPECS.items()}


def test_a_load_that_fails_on_one_of_two_servers_leaves_no_adapter() -> None:
    good, bad, loras = LoraServer(), LoraServer(fails=True), LoraAdapters({})
    with lora_backend(good, bad) as backend:
        with pytest.raises(ServerError, match="out of memory"):
            loras.load(backend, "tuned", TENSORS, CONFIG)
        assert (good.names, bad.names) == ([], [])
        with pytest.raises(BadInputError, match="no LoRA adapter 'tuned'"):
            loras.require(backend, "tuned")
        loras.load(backend, "tuned", TENSORS, CONFIG)
        loras.unload(backend, "tuned")
        assert (good.names, bad.names) == ([], [])


def test_an_engine_uses_the_adapters_that_running_servers_have() -> None:
    """A trainer that starts again finds, replaces and removes the adapters that it loaded before."""
    servers = [LoraServer(), LoraServer()]
    servers[0].names += ["of one server"]
    with lora_backend(*servers) as backend:
        LoraAdapters({}).load(backend, "tuned", TENSORS, CONFIG)
        loras = LoraAdapters({})
        loras.require(backend, ["tuned", None])
        with pytest.raises(BadInputError, match=r"no LoRA adapter 'of one server'; loaded are \['tuned'\]"):
            loras.require(backend, "of one server")
        LoraAdapters({}).load(backend, "tuned", TENSORS, CONFIG)
        LoraAdapters({}).load(backend, "of one server", TENSORS, CONFIG)
        LoraAdapters({}).unload(backend, "tuned")
        assert [server.names for server in servers] == [["of one server"]] * 2
    fleet = FleetLoras({"a": "/models/a", "b": "/models/b"})
    fleet.unload(lambda _: None, "b")
    assert fleet.names == {"a"}


def test_the_adapter_of_a_server_takes_pairs_of_name_and_tensor() -> None:
    server = LoraServer()
    with lora_backend(server):
        server.adapter.load_lora_adapter("pairs", iter(TENSORS.items()), CONFIG)
        assert server.adapter.list_lora_adapters() == ["pairs"]
        with pytest.raises(BadInputError, match="must be a dict of tensors by name or pairs"):
            server.adapter.load_lora_adapter("x", [1, 2], CONFIG)  # type: ignore[list-item]


@pytest.mark.parametrize("lora_paths", [5, {"/a/b"}])
def test_lora_paths_of_a_wrong_type(lora_paths: Any) -> None:
    with pytest.raises(BadInputError, match="lora_paths must be a dict of folders by name, or a list of folders, got"):
        lora_paths_by_name(lora_paths)


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
        ("a", {"target_modules": ["down_proj", "q_proj"]}, r"modules \['down_proj'\], but .*=\['v_proj', 'o_proj'\]"),
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
    loras.require(backend, "a")
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
        {"rank_pattern": {"q_proj": 4, "down_proj": 8}, "alpha_pattern": {"proj": 9, "layers.1.*": 9}},
        {"r": 2, "lora_alpha": 9, "rank_pattern": {"layers.0.*q_proj": 4}, "alpha_pattern": {r"^model\..*proj": 8}},
        {"init_lora_weights": True},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva"},
        {"init_lora_weights": "orthogonal"},
    ],
)
def test_configurations_of_peft_become_those_of_sglang(config: dict[str, Any]) -> None:
    """In `VerlEngine`, and in an adapter of one server, which does not know the model."""
    config = {**CONFIG, **config}
    assert check_lora_adapter(SPECS, config, MANIFEST) == CONFIG
    plain = plain_lora_config(config, SPECS)
    assert {**plain, "target_modules": ["q_proj"]} == CONFIG
    assert plain_lora_config(plain, SPECS) == plain


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, None),
        ({"rank_pattern": {"k_proj": 8}}, None),
        (
            {"use_rslora": True},
            "'lora_alpha': 16.0.* instead of .*'lora_alpha': 8.*load_lora_adapter",
        ),
        ({"rank_pattern": {"q_proj": 4}, "r": 2}, "'r': 4.* instead of .*'r': 2"),
        ({"init_lora_weights": "pissa_niter_4"}, "with init_lora_weights='pissa_niter_4' PEFT has changed"),
        ({"use_dora": True}, "SGLang does not support use_dora=True"),
    ],
)
def test_adapters_that_a_server_loads_at_its_start(config: Any, message: str | None, tmp_path: Path) -> None:
    """SGLang reads their files itself, so that nothing can be converted."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, "lora_alpha": 8, **config}))
    tensors = {name: torch.zeros(spec.shape) for name, spec in SPECS.items()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    server_args = {"model_path": "a/model", "lora_paths": [f"a={tmp_path}", "b=/nowhere", "a/hub_name"]}
    if message is None:
        paths = {"a": str(tmp_path), "b": "/nowhere", "a/hub_name": "a/hub_name"}
        assert lora_paths_by_name(validate_server_args(server_args)["lora_paths"]) == paths
        return
    for lora_paths in (server_args["lora_paths"], f"a={tmp_path}", f'{{"lora_name": "a", "lora_path": "{tmp_path}"}}'):
        with pytest.raises(BadInputError, match=f"the LoRA adapter in {tmp_path}.*{message}"):
            validate_server_args({**server_args, "lora_paths": lora_paths})


@pytest.mark.parametrize(("field", "value"), [("rank_pattern", 2), ("alpha_pattern", 9)])
def test_modules_with_different_ranks_or_scales_are_refused(field: str, value: int) -> None:
    names = [f"base_model.model.model.layers.{n}.mlp.up_proj.lora_{part}.weight" for n in (0, 1) for part in "AB"]
    for key in ("0.mlp.up_proj", "layers.1.*", r"^model\.layers\.0.*proj"):
        with pytest.raises(BadInputError, match=f"SGLang does not support {field}="):
            plain_lora_config({**CONFIG, field: {key: value}}, names)
    for key in ("up_proj", r"model\..*", "mlp.up_proj"):
        name = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}[field]
        assert plain_lora_config({**CONFIG, field: {key: value}}, names)[name] == value
    for key in ("p_proj", "mlp", "down_proj"):
        assert plain_lora_config({**CONFIG, field: {key: value}}, names)["r"] == CONFIG["r"]


def test_a_pattern_may_match_modules_whose_names_are_unknown() -> None:
    """For example those of a LoRA adapter on disk without safetensors."""
    assert plain_lora_config({**CONFIG, "rank_pattern": {"k_proj": 4}}, [])["r"] == 4
    with pytest.raises(BadInputError, match="SGLang does not support rank_pattern"):
        plain_lora_config({**CONFIG, "rank_pattern": {"k_proj": 8}}, [])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "SGLang does not support use_dora=True"),
        ({"alpha_pattern": {"(": 9}}, "a name in alpha_pattern is no regular expression"),
        ({"alpha_pattern": [9]}, "alpha_pattern must be a dict of numbers by name, got list"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' PEFT has changed.*path_initial_model"),
        ({"init_lora_weights": "pissa_niter_16"}, "Push the weights of the trainer's model"),
        ({"init_lora_weights": "OLoRA"}, "PEFT has changed the weights"),
        ({"init_lora_weights": "corda"}, "PEFT has changed the weights"),
        ({"init_lora_weights": "lora_ga"}, "PEFT has changed the weights"),
        ({"init_lora_weights": "loftq"}, "PEFT has changed the weights"),
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


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["embed_tokens.lora_embedding_A", "embed_tokens.lora_embedding_B"], "LoRA adapter of an embedding.*merge"),
        (["lm_head.base_layer.weight"], "no tensor of a LoRA adapter.*save_embedding_layers"),
        (["model.embed_tokens.weight"], "no tensor of a LoRA adapter.*modules_to_save.*: merge"),
        (["lm_head.lora_A.weight"], "one parameter with the embedding 'model.embed_tokens.weight'.*Leave it out"),
        (["lm_head.lora_A.default.weight"], "is no tensor of a LoRA adapter"),
    ],
)  # fmt: skip
def test_adapters_of_the_embedding_and_of_a_tied_head_are_refused_by_name(names: list[str], message: str) -> None:
    """The names are those of `peft.get_peft_model_state_dict` with `embed_tokens` or `lm_head` as target modules."""
    spec = TensorSpec((4, 8), "float32")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    tied = replace(MANIFEST, tensors={**MANIFEST.tensors, embedding: spec, head: spec}, tied=(head, embedding))
    specs = {**SPECS, **{f"base_model.model.{name}": spec for name in names}}
    with pytest.raises(WeightManifestError, match=message):
        check_lora_adapter(specs, {**CONFIG, "target_modules": ["q_proj", "lm_head", "embed_tokens"]}, tied)


def test_two_tensors_with_one_name_are_refused() -> None:
    """A dict would keep the last one."""
    pairs = [("base_model.model.q_proj.lora_A.weight", torch.zeros(2, 4))] * 2

    async def run() -> None:
        async with AsyncHttpServerEngineAdapter.attach("http://127.0.0.1:1") as adapter:
            with pytest.raises(BadInputError, match="a name occurs more than once"):
                await adapter.load_lora_adapter("a", pairs, {})

    asyncio.run(run())
