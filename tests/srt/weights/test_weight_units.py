"""Checks of pushed tensors without a server: names, values, shards; and arguments that a server must have."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from aiohttp import web
from forbidden_calls import forbid
from safetensors.torch import load_file
from stub_servers import serving
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from verl_server import AsyncHttpServerEngineAdapter, errors
from verl_server.adapter.client import undefined_weights_reason
from verl_server.adapter.sglang.server_arguments import loses_weights, require_memory_saver, require_pushable
from verl_server.ranks.coordinator import RankCoordinator
from verl_server.types import TensorSpec
from verl_server.weights.arena import TABLE_OFFSET, Arena, SharedMemoryFile, plan_arena
from verl_server.weights.manifest import Manifest, read_manifest
from verl_server.weights.transports.distributed import Mirror
from verl_server.weights.transports.shared_memory import map_arena
from verl_server.weights.update.source import ShardWriter, TensorSource

NOT_FINITE = r"'x' has values that are not finite \(NaN or infinity\).*check_finite=False"
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
SPECS = {
    name: TensorSpec((2, 2), "float32")
    for name in [
        *(f"{ATTENTION}{part}_proj.weight" for part in "qkvo"),
        *(f"{MLP}{part}_proj.weight" for part in ("gate", "up", "down")),
    ]
}


def writer_for(
    staged: torch.Tensor,
    spec: TensorSpec,
    check_finite: bool = False,
    coordinator: RankCoordinator | None = None,
) -> ShardWriter:
    """The writer of the only trainer rank, for a model with the tensors `x`, `y` and `z`."""
    return ShardWriter(
        lambda _: staged,
        Manifest(dict.fromkeys("xyz", spec)),
        frozenset({0}),
        coordinator or RankCoordinator(0, 1, {}, 1.0),
        "update",
        gather_timeout_s=20.0,
        check_finite=check_finite,
        writes_whole_tensors=True,
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), NOT_FINITE),
        (float("inf"), NOT_FINITE),
        (float("-inf"), NOT_FINITE),
        (70000.0, r"'x' has values from 1 to 70144, some of which become infinite in float16.*dtype='bfloat16'"),
        (-70000.0, r"'x' has values from -70144 to 1, some of which become infinite in float16.*dtype='bfloat16'"),
    ],
)
def test_values_that_are_not_finite_are_refused(value: float, message: str) -> None:
    """In a dict and in a generator. Also values that become infinite in the dtype of the server."""
    tensor, staged = torch.ones(3, 4, dtype=torch.bfloat16), torch.zeros(3, 4, dtype=torch.float16)
    spec = TensorSpec((3, 4), "float16")
    writer_for(staged, spec, check_finite=True).write([("x", tensor)])
    tensor[1, 2] = value
    becomes_infinite = bool(torch.isfinite(tensor).all())  # such values are refused with check_finite=False, too
    with pytest.raises(errors.WeightManifestError, match=message):
        TensorSource([("x", tensor)], Manifest({"x": spec}), check_finite=not becomes_infinite)
    with pytest.raises(errors.WeightManifestError, match=message):
        writer_for(staged, spec, check_finite=not becomes_infinite).write(iter([("x", tensor)]))
    assert bool((staged == 1).all()), "the tensor was not staged"
    assert becomes_infinite or TensorSource([("x", tensor)], Manifest({"x": spec}), check_finite=False).is_checked


def test_float8_values_are_checked_without_a_cast() -> None:
    tensor, spec = torch.ones(3, 4).to(torch.float8_e4m3fn), TensorSpec((3, 4), "float8_e4m3fn")
    assert TensorSource([("x", tensor)], Manifest({"x": spec}), check_finite=True).is_checked
    tensor.view(torch.uint8)[1, 2] = 0x7F  # NaN
    with pytest.raises(errors.WeightManifestError, match=NOT_FINITE):
        TensorSource([("x", tensor)], Manifest({"x": spec}), check_finite=True)


PEFT_CURE = (
    "LoRA adapter of PEFT. Push it with load_lora_adapter. Or merge it into the weights "
    "(model.merge_adapter()), push them with the names of the checkpoint, that is without 'base_model.model.' and "
    "'.base_layer' and without the tensors of the LoRA adapter, and unmerge it"
)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{MLP}gate_up_proj.weight", "inside the server. Push the tensors of the checkpoint: gate_proj, up_proj"),
        (f"module.{ATTENTION}qkv_proj.weight", "Push the tensors of the checkpoint: q_proj, k_proj, v_proj"),
        (f"module.{ATTENTION}q_proj.weight", ": remove 'module.' from the names: '{0}q_proj.weight'"),
        (f"_orig_mod.{MLP}up_proj.weight", ": remove '_orig_mod.' from the names: '{1}up_proj.weight'"),
        (
            "module.model.layers.0._fsdp_wrapped_module.mlp._fsdp_wrapped_module.up_proj.weight",
            ": remove 'module.' and '_fsdp_wrapped_module.' from the names: '{1}up_proj.weight'",
        ),
        (f"{ATTENTION}q_proj.wieght", "; did you mean '{0}q_proj.weight'?"),
        (f"base_model.model.{ATTENTION}q_proj.base_layer.weight", PEFT_CURE),
        (f"base_model.model.{ATTENTION}q_proj.lora_A.default.weight", PEFT_CURE),
        ("module.nothing_similar", "no parameter 'module.nothing_similar'"),
    ],
)
def test_an_unknown_tensor_name_is_explained(name: str, message: str) -> None:
    with pytest.raises(errors.WeightManifestError) as caught:
        Manifest(SPECS).check(name, (2, 2), "float32")
    assert caught.value.message.startswith(f"the model has no parameter {name!r}")
    assert caught.value.message.endswith(message.format(ATTENTION, MLP))


EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model."])
def test_a_prefix_of_fused_experts_is_explained(prefix: str, tiny: Callable[..., Path]) -> None:
    """Checkpoints have one tensor for each expert. The trainer's fused tensors are converted."""
    manifest = read_manifest({"model_path": str(tiny("qwen3_moe"))})
    with pytest.raises(errors.WeightManifestError) as caught:
        TensorSource([(prefix + EXPERTS, torch.zeros(4, 128, 64))], manifest, check_finite=False)
    assert repr(prefix) in caught.value.message
    assert caught.value.message.endswith(f"from the names: {EXPERTS!r}")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3, 4, device="meta"), "'x' is on the meta device and has no values"),
        (torch.ones(3, 4).to_sparse(), r"'x' is a sparse tensor .*push tensor.to_dense\(\)"),
        (torch.ones(3, 4).to(torch.float8_e4m3fn), "dtype float8_e4m3fn, the model expects float32.*by its scale"),
        (torch.ones(3, 4, dtype=torch.int32), "dtype int32, the model expects float32. Only float16"),
        ("DTensor", "'x' is on the meta device and has no values"),
        (torch.ones(0), r"shape \[0\], .*ZeRO-3.*GatheredParameters"),
        (torch.ones(6, 1, dtype=torch.uint8), "Quantized weights .* are packed: push the dequantized tensor"),
        (torch.ones(5, 4), r"'x' has shape \[5, 4\], the model expects \[3, 4\]$"),
    ],
    ids=["meta", "sparse", "float8", "int", "meta DTensor", "ZeRO-3", "packed", "rows"],
)
def test_tensors_that_cannot_be_copied_are_refused_by_name(tensor: Any, message: str, one_rank: DeviceMesh) -> None:
    spec, staged = TensorSpec((3, 4), "float32"), torch.zeros(3, 4)
    if isinstance(tensor, str):
        tensor = DTensor.from_local(torch.ones(3, 4, device="meta"), one_rank, [Shard(0)], run_check=False)
    with pytest.raises(errors.WeightManifestError, match=message):
        TensorSource([("x", tensor)], Manifest({"x": spec}), check_finite=False)
    with pytest.raises(errors.WeightManifestError, match=message):
        writer_for(staged, spec).write(iter([("x", tensor)]))
    assert not staged.any()


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_resized_vocabulary_is_named_for_the_embedding_and_the_head(name: str, tiny: Callable[..., Path]) -> None:
    manifest = read_manifest({"model_path": str(tiny("qwen3"))})
    expected = manifest.tensors[name].shape
    with pytest.raises(errors.WeightManifestError) as raised:
        TensorSource({name: torch.zeros(expected[0] + 8, expected[1])}, manifest, check_finite=False)
    assert ("If the vocabulary was resized or padded: push only the rows" in str(raised.value)) is ("mlp" not in name)


def parts_of(values: torch.Tensor) -> dict[str, Any]:
    """Pairs of views of a matrix of 8 rows and 8 columns that begin at different addresses."""
    flat = values.view(-1)
    return {
        "parts that overlap": (flat[:10], flat[5:15]),
        "a part of the other": (values, values[3]),
        "rows and a column": (values[:2], values[:, 4]),
        "another dtype": (flat[:4], flat.view(torch.bfloat16)[6:10]),
        "memory of another storage": (flat[:10], torch.frombuffer(flat.numpy().data[5:15], dtype=torch.float32)),
        "neighbours": (flat[:10], flat[10:20]),
        "columns": (values[:, :4], values[:, 4:]),
        "every second column": (values[:, ::2], values[:, 1::2]),
        "queries and keys of groups": values.view(2, 2, 16).unbind(1),
    }


@pytest.mark.parametrize("parts", parts_of(torch.zeros(8, 8)))
def test_tensors_with_a_common_element_are_refused(parts: str) -> None:
    legal = ("neighbours", "columns", "every second column", "queries and keys of groups")
    tensors = dict(zip("ab", parts_of(torch.zeros(8, 8))[parts], strict=True))
    manifest = Manifest({name: TensorSpec.of(tensor) for name, tensor in tensors.items()})
    if parts in legal:
        TensorSource(tensors, manifest, check_finite=False)
    else:
        with pytest.raises(errors.BadInputError, match=r"'[ab]' and '[ab]' have the same memory.*not list"):
            TensorSource(tensors, manifest, check_finite=False)
    TensorSource(iter(tensors.items()), manifest, check_finite=False)  # read one after the other


def test_tensors_in_the_same_memory_are_refused_unless_they_are_tied(tiny: Callable[..., Path]) -> None:
    spec = TensorSpec((3, 4), "float32")
    manifest = Manifest(dict.fromkeys(("a", "b", "lm_head.weight"), spec), frozenset({"lm_head.weight"}))
    buffer = torch.zeros(3, 4)
    reused = [(name, buffer.fill_(value)) for value, name in enumerate(("a", "b"))]
    with pytest.raises(errors.BadInputError, match=r"'b' and 'a' have the same memory.*not list"):
        TensorSource(reused, manifest, check_finite=False)
    TensorSource([("a", buffer), ("lm_head.weight", buffer)], manifest, check_finite=False)
    # A trainer may tie the head of an untied checkpoint: both parameters of the servers get the same values.
    folder = tiny("qwen3")
    untied, tensors = read_manifest({"model_path": str(folder)}), load_file(folder / "model.safetensors")
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    TensorSource({**tensors, head: tensors[embedding].detach()}, untied, check_finite=False)
    up, gate = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    with pytest.raises(errors.BadInputError, match="have the same memory"):
        TensorSource({**tensors, up: tensors[gate]}, untied, check_finite=False)


def test_float64_is_cast() -> None:
    spec, staged = TensorSpec((2,), "float32"), torch.zeros(2)
    tensor = torch.tensor([0.1, -2.0], dtype=torch.float64)
    TensorSource([("x", tensor)], Manifest({"x": spec}), check_finite=True)
    writer_for(staged, spec, check_finite=True).write(iter([("x", tensor)]))
    assert torch.equal(staged, tensor.float())
    tensor[1] = 1e300
    with pytest.raises(errors.WeightManifestError, match="some of which become infinite in float32"):
        TensorSource([("x", tensor)], Manifest({"x": spec}), check_finite=True)


@pytest.mark.parametrize(
    ("named_tensors", "got"),
    [
        (torch.nn.Linear(1, 1), "Linear"),
        ("/models/policy", "'/models/policy'"),
        (torch.nn.Linear(1, 1).state_dict, "method"),
        (torch.nn.Linear(1, 1).parameters(), "the item Parameter"),
        (["x"], "the item 'x'"),
    ],
)
def test_an_argument_that_is_no_pairs_is_refused_with_the_cure(named_tensors: Any, got: str) -> None:
    with pytest.raises(errors.BadInputError) as caught:
        TensorSource(named_tensors, Manifest({}), check_finite=False)
    assert caught.value.message.endswith(f"for example model.state_dict().items(); got {got}")


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, MappingProxyType])
def test_every_mapping_is_accepted(kind: Any) -> None:
    spec, staged, given = TensorSpec((2,), "float32"), torch.zeros(2), kind({"x": torch.ones(2)})
    source = TensorSource(given, Manifest({"x": spec}), check_finite=False)
    assert (source.is_checked, source.names) == (True, ["x"])
    writer = writer_for(staged, spec)
    assert writer.write(given) == ["x"]
    assert staged.all()
    assert torch.equal(writer.gather_on_cpu(given)["x"], torch.ones(2))


def test_the_first_tensor_of_a_generator_is_freed_when_the_next_one_is_asked_for() -> None:
    """It is often the embedding, the largest tensor."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            tensor = torch.zeros(4)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    source = TensorSource(tensors(), Manifest({name: TensorSpec((4,), "float32") for name in "ab"}), check_finite=False)
    pairs = iter(source.pairs)
    assert next(pairs)[0] == "a"
    assert next(pairs)[0] == "b"
    assert alive[0]() is None


def test_an_array_of_numpy_is_refused_with_the_cure() -> None:
    pairs: Any = [("x", np.zeros(2))]
    with pytest.raises(errors.BadInputError, match=r"'x' is no tensor but ndarray: convert it with torch\.from_numpy"):
        TensorSource(pairs, Manifest({}), check_finite=False)


@pytest.mark.parametrize("rows", [1, 0, 3])
def test_a_shard_of_another_shape_than_its_placement_is_refused(rows: int, one_rank: DeviceMesh) -> None:
    """A copy would broadcast a shard of shape (1, 2) into the part (3, 2) of the full tensor."""
    spec, staged = TensorSpec((3, 2), "float32"), torch.zeros(3, 2)
    shard = DTensor.from_local(torch.ones(rows, 2), one_rank, [Shard(0)], shape=staged.shape, stride=(2, 1))
    if rows == 3:
        assert TensorSource([("x", shard)], Manifest({"x": spec}), check_finite=False).is_checked
        assert writer_for(staged, spec).write([("x", shard)]) == ["x"]
        assert bool((staged == 1).all())
        return
    message = rf"the shard of 'x' on this rank has shape \[{rows}, 2\].*a shard of shape \[3, 2\]"
    with pytest.raises(errors.WeightManifestError, match=message):
        TensorSource([("x", shard)], Manifest({"x": spec}), check_finite=False)
    with pytest.raises(errors.WeightManifestError, match=message):
        writer_for(staged, spec).write(iter([("x", shard)]))
    assert not staged.any()


@pytest.mark.parametrize(
    ("bad", "num_read", "has_gathered_all"),
    [("another rank", 1, False), ("nan", 3, True), ("meta", 1, False), ("array", 1, False)],
)
def test_a_rank_gathers_on_after_its_own_mistake_only(
    bad: str, num_read: int, has_gathered_all: bool, one_rank: DeviceMesh
) -> None:
    """Other ranks may wait in a collective operation for this rank.

    After an error of another rank, or a tensor that this rank cannot gather, the ranks gather nothing together.
    """
    read: list[str] = []

    coordinator = RankCoordinator(0, 1, {}, 1.0)
    if bad == "another rank":
        coordinator.announce_error("update", errors.WeightManifestError("the error"))

    def pairs() -> Iterator[tuple[str, Any]]:
        first = torch.full((4,), torch.nan if bad == "nan" else 1.0, device="meta" if bad == "meta" else "cpu")
        for name, local in (("x", first), ("y", torch.ones(4)), ("z", torch.ones(4))):
            read.append(name)
            is_array = bad == "array" and name == "x"
            yield name, np.ones(4) if is_array else DTensor.from_local(local, one_rank, [Partial()])

    staged = torch.zeros(4)
    writer = writer_for(staged, TensorSpec((4,), "float32"), check_finite=True, coordinator=coordinator)
    with pytest.raises(errors.BadInputError, match=r"the error|not finite|on the meta device|no tensor but ndarray"):
        writer.write(pairs())
    assert (len(read), writer.has_gathered_all) == (num_read, has_gathered_all)
    assert not staged.any()


@pytest.mark.parametrize(
    ("server_args", "allowed"),
    [
        ({"device": "cuda", "enable_memory_saver": False}, False),
        ({"device": "cuda"}, False),
        ({"device": "cuda", "enable_memory_saver": True}, True),
        ({"device": "cpu", "enable_memory_saver": False}, True),
    ],
)
def test_a_gpu_releases_memory_only_with_the_memory_saver(server_args: dict[str, Any], allowed: bool) -> None:
    if allowed:
        require_memory_saver(server_args)
        return
    with pytest.raises(errors.BadInputError, match="enable_memory_saver=True") as caught:
        require_memory_saver(server_args)
    assert caught.value.details == {"argument": "enable_memory_saver"}


@pytest.mark.parametrize(
    ("server_args", "refused"),
    [
        ({"quantization": "fp8"}, "quantization='fp8': serve the model without quantization"),
        ({"torchao_config": "int4wo-128"}, "torchao_config='int4wo-128'"),
        ({"load_format": "bitsandbytes"}, "load_format='bitsandbytes': a quantized checkpoint"),
        ({"load_format": "gguf"}, "load_format='gguf': a quantized checkpoint"),
        ({"model_path": "/models/a.gguf"}, "model_path='/models/a.gguf': a quantized checkpoint"),
        (
            {"json_model_override_args": '{"quantization_config": {"quant_method": "fp8"}}'},
            r"a quantized checkpoint \(quant_method 'fp8'\)",
        ),
        ({"quantization": "unquant", "torchao_config": "", "load_format": "auto"}, None),
        ({"quantization": None, "json_model_override_args": '{"rope_theta": 1}'}, None),
    ],
)
def test_servers_with_quantization_take_no_pushed_weights(server_args: dict[str, Any], refused: str | None) -> None:
    """SGLang's value "unquant" means no quantization."""
    with contextlib.nullcontext() if refused is None else pytest.raises(errors.UnsupportedError, match=refused):
        require_pushable(server_args)


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quant_model_description.json"])
def test_checkpoints_with_a_file_about_their_quantization_take_no_pushed_weights(name: str, tmp_path: Path) -> None:
    """Their `config.json` does not mention the quantization."""
    (tmp_path / "config.json").write_text("{}")
    require_pushable({"model_path": str(tmp_path)})
    (tmp_path / name).write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(errors.UnsupportedError, match=f"a quantized checkpoint .it has the file {name}"):
        require_pushable({"model_path": str(tmp_path)})


@pytest.mark.parametrize(
    "server_args",
    [
        {"hicache_storage_backend": "file"},
        {"enable_lmcache": True},
        {"enable_flexkv": True},
        {"radix_cache_backend": "flexkv"},
        {"enable_unified_cache_external_linker": True},
    ],
)
def test_servers_with_an_external_kv_store_take_no_pushed_weights(server_args: dict[str, Any]) -> None:
    """The store is not in the process of the server: after an update it would answer with the KV of old weights."""
    ((name, value),) = server_args.items()
    with pytest.raises(errors.UnsupportedError, match=f"{name}={value!r}: its external store keeps the KV cache of"):
        require_pushable(server_args)
    require_pushable({name: None, "enable_hierarchical_cache": True})


def test_a_server_with_a_weight_cache_takes_no_pushed_weights() -> None:
    """Its scheduler ends at the first update, because other servers map the same weights."""
    with pytest.raises(errors.UnsupportedError, match=r"weight_cache_mode='daemon': .*: leave it out"):
        require_pushable({"weight_cache_mode": "daemon"})
    require_pushable({"weight_cache_mode": "off"})
    require_pushable({"weight_cache_mode": None})


def test_a_server_whose_images_other_servers_encode_takes_no_pushed_weights() -> None:
    """The encoders would keep their weights."""
    with pytest.raises(errors.UnsupportedError, match="language_only=True: other servers encode its images"):
        require_pushable({"language_only": True})
    require_pushable({"language_only": False})


@pytest.mark.parametrize(
    ("backend", "has_sessions", "refused"),
    [
        ("flashinfer_trtllm_routed", False, True),
        ("flashinfer_trtllm", False, True),
        ("flashinfer_trtllm", True, False),
        ("triton", False, False),
    ],
)
def test_experts_that_are_packed_take_no_weights_without_sessions(
    backend: str, has_sessions: bool, refused: bool
) -> None:
    """SGLang packs the weights of the experts at the end of a session. A server before sessions packs them once."""
    paths: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        paths.append(f"{request.method} {request.path}")
        if request.path == "/server_info":
            return web.json_response({"model_path": "none", "moe_runner_backend": backend, "internal_states": [{}]})
        if request.method == "OPTIONS":
            is_missing = request.path == "/begin_weight_update" and not has_sessions
            return web.json_response({}, status=404 if is_missing else 405)
        return web.json_response({"success": True})

    async def update() -> None:
        async with serving(web.Server(answer)) as url, AsyncHttpServerEngineAdapter.attach(url) as adapter:
            message = f"moe_runner_backend='{backend}' .* use 'triton'"
            with pytest.raises(errors.UnsupportedError, match=message) if refused else contextlib.nullcontext():
                await adapter.begin_weight_update()

    asyncio.run(update())
    assert ("POST /begin_weight_update" in paths) is has_sessions


def test_only_the_tensors_of_a_cpu_have_a_private_mapping() -> None:
    """The kernel may count the whole size of a private mapping, which each TP rank has, as used memory."""
    layout = plan_arena({"weight": TensorSpec((8,), "float32")})
    arena = Arena.create(layout)
    arena.tensor("weight").fill_(2.0)
    table = layout.table(["weight"])
    arena.memory[TABLE_OFFSET : TABLE_OFFSET + len(table)] = table

    def num_private() -> int:
        name = arena.location.partition(":")[2]
        return sum(name in line and line.split()[1] == "rw-p" for line in Path("/proc/self/maps").open())

    mapping = map_arena(arena.location, layout.size_bytes)
    ((_, shared),) = mapping.shared_tensors(len(table))
    assert (shared.tolist(), num_private()) == ([2.0] * 8, 0)
    ((_, private),) = mapping.tensors(len(table))
    private.fill_(3.0)
    assert (arena.tensor("weight").tolist(), num_private()) == ([2.0] * 8, 1)
    assert mapping.contains(private)
    assert mapping.contains(shared)
    assert not mapping.contains(torch.ones(1))
    arena.close()


def test_a_mirror_that_does_not_fit_into_memory_is_refused() -> None:
    """The kernel would kill the server while the weights arrive."""
    with pytest.raises(errors.VerlServerError, match=r"the mirror of the weights takes \d+ bytes of memory, but only"):
        Mirror.create(2 * psutil.virtual_memory().total)
    Mirror.create(4096).close()


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_release_without_a_copy_loses_the_weights(has_copy: bool) -> None:
    args = {"enable_weights_cpu_backup": has_copy}
    loses = loses_weights(["kv_cache", "weights"], args)
    assert loses is not has_copy
    assert not loses_weights(["kv_cache"], args)
    assert (undefined_weights_reason(loses, []) is not None) is loses
    assert undefined_weights_reason(loses, ["weights"]) is None, "no update is possible while they are released"


FORBIDDEN_MEMORY_FILE = f"""
from verl_server.errors import UnsupportedError
from verl_server.weights.arena import SharedMemoryFile
{forbid("memfd_create")}
try:
    SharedMemoryFile.create("arena", 4096)
except UnsupportedError as error:
    print(error)
"""


def test_a_sandbox_may_forbid_memory_files() -> None:
    command = [sys.executable, "-c", FORBIDDEN_MEMORY_FILE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "memfd_create" in done.stdout, done.stderr
    assert "Operation not permitted" in done.stdout


@pytest.mark.parametrize("limit", [resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE], ids=["file size", "open files"])
def test_a_limit_may_forbid_a_memory_file(limit: int) -> None:
    """The error is one of ours, which all ranks learn, and no descriptor is left open."""
    before, (soft, hard) = os.listdir("/proc/self/fd"), resource.getrlimit(limit)
    resource.setrlimit(limit, (3, hard))
    try:
        with pytest.raises(errors.VerlServerError, match=r"cannot create 4096 bytes of staging memory: .*`ulimit"):
            SharedMemoryFile.create("arena", 4096)
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert os.listdir("/proc/self/fd") == before


def test_only_the_memory_file_of_the_name_is_opened() -> None:
    """`/proc/PID/fd/N` can be another file in another container, or after the owner has ended."""
    mine, other = SharedMemoryFile.create("arena", 4096), SharedMemoryFile.create("arena", 4096)
    foreign = os.memfd_create("verl_server_arena", os.MFD_CLOEXEC)
    os.ftruncate(foreign, 4096)
    path, _, name = mine.location.partition(":")
    opened = SharedMemoryFile.open(mine.location, 4096)
    opened.memory[:2] = b"ab"
    assert mine.memory[:2] == b"ab"
    assert opened.exists()
    for location in (
        f"{other.location.partition(':')[0]}:{name}",
        f"/proc/{os.getpid()}/fd/{foreign}:{name}",
        f"{path}:verl_server_arena",
        path,
        f"/etc/passwd:{name}",
        "/etc/passwd",
        f"/proc/self/../self/fd/1:{name}",
    ):
        with pytest.raises(OSError, match="memory file"):
            SharedMemoryFile.open(location, 4096)
    mine.close()
    assert not opened.exists()
    with pytest.raises(OSError, match=r"/fd/|memory file"):
        SharedMemoryFile.open(mine.location, 4096)
    for file in (opened, other):
        file.close()
    os.close(foreign)


@pytest.mark.parametrize("is_inherited", [True, False])
def test_a_server_that_reorders_experts_at_each_update_takes_no_weights(
    is_inherited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also experts that an update does not write, which are then in the wrong order."""
    env = {"SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "True"}
    if is_inherited:
        monkeypatch.setenv(*next(iter(env.items())))
    with pytest.raises(errors.UnsupportedError, match=r"variable SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED=True: remove it"):
        require_pushable({}, {} if is_inherited else env)
    require_pushable({}, {"SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "0"})
