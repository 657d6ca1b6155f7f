"""The manifest of a served model, without a server: names, shapes and dtypes that can be pushed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_families import FAMILIES, ROUTER_BIAS, make_family_model, save_family_model
from safetensors.torch import load_file, save_file

from verl_server.errors import BadInputError, WeightManifestError
from verl_server.platforms.server_report import served_dtypes
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.router.vllm_wire.calls import read_served_manifest
from verl_server.types import TensorSpec
from verl_server.weights.manifest import CheckpointNames, Manifest, read_manifest
from verl_server.weights.update.source import ShardWriter, TensorSource


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainers_tensors_become_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    """Each tensor is converted alone; `save_pretrained` has converted the whole model."""
    model = make_family_model(family)
    folder = save_family_model(model, family, tmp_path)
    manifest = read_manifest({"model_path": str(folder), "dtype": "bfloat16"})
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        specs = manifest.checkpoint_specs(name, TensorSpec.of(tensor))
        assert manifest.checkpoint_names is not None
        parts = {name: tensor} if list(specs) == [name] else dict(manifest.checkpoint_names.tensors(name, tensor))
        assert {new: tuple(part.shape) for new, part in parts.items()} == {new: s.shape for new, s in specs.items()}
        converted |= {new: part for new, part in parts.items() if new not in manifest.ignored}
    saved = load_file(folder / "model.safetensors")
    assert converted.keys() == saved.keys() == manifest.tensors.keys()
    for name, tensor in saved.items():
        assert torch.equal(converted[name], tensor), name
        assert manifest.check(name, tuple(tensor.shape), "float32") == manifest.tensors[name]
    without_files = read_manifest({"model_path": str(folder), "dtype": "bfloat16", "load_format": "dummy"})
    float32 = {name for name, spec in manifest.tensors.items() if spec.dtype == "float32"}
    assert float32 == {name for name in saved if ROUTER_BIAS in name}
    assert {n: s for n, s in manifest.tensors.items() if n not in float32} == {
        n: s for n, s in without_files.tensors.items() if n not in float32
    }


def test_a_conversion_that_keeps_the_shape_is_done() -> None:
    """Checkpoints of Inkling have the rows of gate and up in turn, in one tensor of the same shape."""
    from transformers.core_model_loading import revert_weight_conversion

    text = {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 320, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "mlp_layer_types": ["sparse"],
    }  # fmt: skip
    vision = {"text_hidden_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.InklingConfig(text_config=text, audio_config={"text_hidden_size": 64}, vision_config=vision)
    with torch.device("meta"):
        model = transformers.InklingForConditionalGeneration(config)
    names = CheckpointNames(lambda: model)
    name, renamed = (f"model.language_model.layers.0.mlp.experts.{part}_proj" for part in ("gate_up", "down"))
    tensor = torch.randn(4, 64, 64)
    expected = revert_weight_conversion(model, {name: tensor})
    ((checkpoint_name, converted),) = names.tensors(name, tensor)
    assert torch.equal(converted, expected[checkpoint_name])
    assert not torch.equal(converted, tensor)
    manifest = Manifest(names.specs(name, TensorSpec.of(tensor)), checkpoint_names=names)
    assert manifest.is_converted(name, TensorSpec.of(tensor)), "otherwise the shards would be written as they are"
    assert not manifest.is_converted(renamed, TensorSpec((4, 64, 32), "float32"))
    staged = torch.zeros_like(tensor)
    writer = ShardWriter(
        lambda _: staged,
        manifest,
        frozenset({0}),
        RankCoordinator(0, 1, {}, 1.0),
        "update",
        gather_timeout_s=1.0,
        check_finite=False,
        writes_whole_tensors=True,
    )
    assert writer.write([(name, tensor)]) == [checkpoint_name]
    assert torch.equal(staged, converted)


@pytest.mark.parametrize("shape", [(4, 8), (4,), (), (4, 32, 64), (5, 64, 64)])
def test_fused_experts_of_another_shape_are_refused_by_name(shape: tuple[int, ...], tiny: Callable[..., Path]) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    manifest = read_manifest({"model_path": str(tiny("qwen3_moe"))})
    message = re.escape(f"{name!r} has shape {list(shape)}, the model expects [4, 64, 64]. It stands for 4 tensors")
    with pytest.raises(WeightManifestError, match=message) as caught:
        TensorSource({name: torch.zeros(shape)}.items(), manifest, check_finite=False)
    assert caught.value.details == {"name": name, "expected": [4, 64, 64], "got": list(shape)}


def test_code_of_a_model_is_not_executed_because_a_server_reports_that_it_may(tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    reported = {"model_path": str(tmp_path), "tokenizer_path": str(tmp_path), "trust_remote_code": True}
    for load_format in ("auto", "dummy"):
        with pytest.raises(BadInputError, match="trust_remote_code=True"):
            read_served_manifest({**reported, "load_format": load_format})
    assert not (tmp_path / "executed").exists()


def test_tensors_that_trainers_lack_need_not_be_pushed(tmp_path: Path) -> None:
    """A checkpoint has a tied output head, a table of rotary embeddings and a layer for multi-token prediction."""
    config = {"model_type": "glm4_moe", "num_hidden_layers": 2, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    required = {"model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "visual.layers.7.weight"}
    mtp = {"model.layers.2.eh_proj.weight", "mtp.layers.0.self_attn.q_proj.weight"}
    optional = {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}
    save_file({name: torch.zeros(2) for name in {*required, *optional, *mtp}}, tmp_path / "model.safetensors")
    manifest = read_manifest({"model_path": tmp_path})
    assert manifest.required == required
    assert manifest.tensors.keys() == required | optional | mtp, "the server may load all that its checkpoint has"
    assert not manifest.ignored
    assert manifest.is_whole(required | mtp)
    assert not manifest.is_whole(required - {"visual.layers.7.weight"} | mtp | optional)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(params=["checkpoint with a head", "checkpoint without a head"])
def tied_manifest(request: pytest.FixtureRequest, tmp_path: Path) -> Manifest:
    """The manifest of a model with one parameter for output head and embedding."""
    config = {"model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 3, "hidden_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [EMBEDDING, "model.layers.0.mlp.up_proj.weight", *[HEAD] * (request.param == "checkpoint with a head")]
    save_file(
        {name: torch.zeros(3 if name in (HEAD, EMBEDDING) else 4, 2) for name in names}, tmp_path / "m.safetensors"
    )
    return read_manifest({"model_path": tmp_path})


def write_generated(manifest: Manifest, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Write tensors of a generator that uses one memory for all tensors."""
    staged = {name: torch.zeros(spec.shape) for name, spec in manifest.tensors.items()}
    buffer = torch.empty(16)

    def generate() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            view = buffer[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view

    writer = ShardWriter(
        staged.__getitem__, manifest, frozenset({0}), RankCoordinator(0, 1, {}, 1.0), "update",
        gather_timeout_s=1.0, check_finite=False, writes_whole_tensors=True,
    )  # fmt: skip
    names = writer.write(generate())
    assert all(torch.equal(staged[name], tensors[name]) for name in names)
    return names


@pytest.mark.parametrize("from_generator", [False, True])
def test_a_tied_output_head_must_be_the_embedding(tied_manifest: Manifest, from_generator: bool) -> None:
    """The servers have one parameter for both, so a trainer in which they have come apart cannot be served."""
    has_head = HEAD in tied_manifest.tensors

    def push(tensors: dict[str, torch.Tensor]) -> list[str]:
        if from_generator:
            return write_generated(tied_manifest, tensors)
        names = TensorSource(tensors, tied_manifest, check_finite=False).names
        assert names is not None
        return names

    weight = torch.randn(3, 2)
    changed = weight.clone()
    changed[2, 1] += 1e-3
    assert push({EMBEDDING: weight, HEAD: weight}) == [EMBEDDING, *[HEAD] * has_head]
    assert push({HEAD: weight.clone(), EMBEDDING: weight}) == [*[HEAD] * has_head, EMBEDDING]
    assert push({EMBEDDING: weight}) == [EMBEDDING]
    for differing in ({EMBEDDING: weight, HEAD: changed}, {HEAD: changed, EMBEDDING: weight}):
        with pytest.raises(
            WeightManifestError, match=f"'{HEAD}' and '{EMBEDDING}' are one .*has other values or shards"
        ) as caught:
            push(differing)
        assert caught.value.details == {"name": HEAD}
    with pytest.raises(WeightManifestError, match="the update lacks the second"):
        push({HEAD: weight})
    with pytest.raises(WeightManifestError, match=rf"'{HEAD}' has shape \[4, 2\], the model expects \[3, 2\]"):
        push({HEAD: torch.zeros(4, 2), EMBEDDING: weight})


def test_tied_tensors_are_compared_in_the_dtype_of_the_server(tied_manifest: Manifest) -> None:
    """A copy of the head in float32 that rounds to the embedding in bfloat16 is the same weight for the server."""
    tensors = dict(tied_manifest.tensors)
    tensors[EMBEDDING] = TensorSpec((3, 2), "bfloat16")
    manifest = dataclasses.replace(tied_manifest, tensors=tensors)
    weight = torch.randn(3, 2)
    assert TensorSource({EMBEDDING: weight.bfloat16(), HEAD: weight}, manifest, check_finite=False).is_checked


REPORT = {"main": "bfloat16", "others": {"layers.*.mlp.gate.weight": ["float32"], "layers.*.mixer.A": ["float32"]}}


@pytest.mark.parametrize(
    ("served", "stored", "others"),
    [
        ("self_attn.qkv_conv1d", ("self_attn.q_conv1d", "self_attn.v_conv1d"), ("mlp.up_proj",)),
        ("mlp.gate", ("mlp.router.gate", "mlp.up_proj"), ("self_attn.q_proj",)),
        ("mixer.A", ("mixer.A_log",), ("mlp.up_proj",)),
    ],
)
def test_a_parameter_that_an_engine_renames_or_fuses_keeps_its_dtype(
    served: str, stored: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """Too wide a dtype loses nothing."""
    report = {"main": "bfloat16", "others": {f"layers.*.{served}.weight": ["float32"]}}
    found = served_dtypes([report], [f"model.layers.2.{name}.weight" for name in (*stored, *others)])
    assert all("float32" in found[f"model.layers.2.{name}.weight"] for name in stored)
    assert all(found[f"model.layers.2.{name}.weight"] == {"bfloat16"} for name in others)


def test_tensors_travel_in_the_dtypes_that_the_servers_report(tmp_path: Path) -> None:
    """Not in those of the checkpoint. A reported parameter that the checkpoint calls otherwise widens its module."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float16"}))
    wide = ("model.language_model.layers.3.mlp.gate.weight", "backbone.layers.1.mixer.A_log")
    narrow = ("lm_head.weight", "model.layers.3.mlp.up_proj.weight", "backbone.layers.1.mixer.norm.weight")
    tensors = {name: torch.zeros(2, dtype=torch.float16) for name in (*wide, *narrow)}
    tensors |= {"model.layers.3.mlp.bias": torch.zeros(1), "positions": torch.zeros(1, dtype=torch.int64)}
    save_file(tensors, tmp_path / "model.safetensors")

    def dtypes(*reports: Any) -> dict[str, str]:
        return {name: spec.dtype for name, spec in read_manifest({"model_path": tmp_path}, reports).tensors.items()}

    kept = {"model.layers.3.mlp.bias": "float32", "positions": "int64"}
    assert dtypes(REPORT) == dict.fromkeys(wide, "float32") | dict.fromkeys(narrow, "bfloat16") | kept
    assert dtypes(None) == dict.fromkeys((*wide, *narrow), "float16") | kept, "the server does not tell"
    float16 = {"main": "float16", "others": {}}
    assert dtypes(REPORT, float16) == dict.fromkeys((*wide, *narrow), "float32") | kept, "no server gets less"
    mixed = read_manifest({"model_path": tmp_path}, [REPORT, float16])
    with pytest.raises(WeightManifestError, match="become infinite in float16, the dtype of the server"):
        TensorSource({narrow[0]: torch.tensor([1.0, 7e4])}, mixed, check_finite=False)


def test_only_the_files_of_the_index_count(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    """Folders of Mistral models contain a second copy of the weights, with other names."""
    (tmp_path / "config.json").write_text((tiny("llama") / "config.json").read_text())
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"layers.0.wq": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    assert read_manifest({"model_path": tmp_path}).tensors.keys() == {"a"}
    index.unlink()
    (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    assert read_manifest({"model_path": tmp_path}).tensors.keys() == {"a"}


def test_a_folder_with_the_index_alone_is_read_from_the_architecture(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    """The trainer of a running server may have the configuration only. An incomplete checkpoint is refused."""
    folder = tiny("llama")
    expected = read_manifest({"model_path": folder})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(expected.tensors)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert read_manifest({"model_path": tmp_path}) == expected
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(BadInputError, match=f"cannot read the checkpoint in {tmp_path}.*model-00002-of-00002"):
        read_manifest({"model_path": tmp_path})


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x02\0\0\0\0\0\0\0[]", b"\xff" * 8 + b"{}"])
def test_a_damaged_checkpoint_is_refused_with_its_folder(
    content: bytes, tmp_path: Path, tiny: Callable[..., Path]
) -> None:
    (tmp_path / "config.json").write_text((tiny("llama") / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BadInputError, match=f"cannot read the checkpoint in {tmp_path}"):
        read_manifest({"model_path": tmp_path})


def test_tensors_that_sglang_loads_only_together_are_refused_alone() -> None:
    names = [
        f"model.layers.{layer}.self_attn.{part}.weight"
        for layer in (0, 1)
        for part in ("q_a_proj", "kv_a_proj_with_mqa")
    ]
    manifest = Manifest({name: TensorSpec((2,), "float32") for name in names})
    manifest.require_loaded_together(names[:2])
    for alone in names:
        with pytest.raises(BadInputError, match=f"has '{alone}' without .* push both"):
            manifest.require_loaded_together([alone])
    without_query = Manifest({names[1]: TensorSpec((2,), "float32")})
    without_query.require_loaded_together([names[1]])


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_that_the_model_does_not_use_are_not_missing(family: str, tmp_path: Path) -> None:
    """Value heads, masks of old checkpoints and layers for other purposes, which nobody serves and nobody pushes."""
    model = make_family_model(family)
    folder = save_family_model(model, family, tmp_path)
    saved = load_file(folder / "model.safetensors")
    names = ["v_head.summary.weight", "mtp_block.0.mlp.weight", "model.layers.0.attention.bias"]
    extra = {name: torch.zeros(2, 3) for name in names}
    save_file({**saved, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    manifest = read_manifest({"model_path": str(folder), "dtype": "bfloat16"})
    assert manifest.num_missing(saved) == 0
    assert manifest.is_whole([*saved, *names])
    first = next(name for name in saved if name in manifest.required)
    assert manifest.num_missing(saved.keys() - {first}) == 1
