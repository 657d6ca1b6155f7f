"""Tests that need an NVIDIA GPU: the trainer's tensors and the server's parameters are on it.

`make gpu-proof` runs each test as an item with a deadline, and writes what the tests record into its results. With
GPU_PROOF_DEVICE=cpu, tests that are rehearsable run with everything on the CPU, which shows that the tests are right.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from gpu_proof.items import TRANSPORTS
from gpu_proof.norm_kernel import NO_FLOAT32, missing_norm_kernel
from gpu_proof.settings import device, record, server_args
from helpers import GREEDY, PROMPTS, change_weights, mesh_of, open_files, reference_model, trainer_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from verl_server import VerlEngine, WeightsConfig
from verl_server.adapter.sglang.replies import released_memory
from verl_server.platforms.scheduler_hooks import add_state
from verl_server.server.process import ServerProcess
from verl_server.types import TensorSpec
from verl_server.weights.arena import POSITIONAL_SUM, Arena, Checksums, compute_checksum, plan_arena, positional_sum
from verl_server.weights.buckets import DeviceBucketMemory
from verl_server.weights.device import CallerOrder, StagingCopies, copies_on

MIN_TOLERANCE = {"float32": 5e-3, "bfloat16": 5e-2}
"""Tolerance of log probabilities where Hugging Face itself is nearer to the exact values: Triton multiplies float32
with the precision of TF32, and kernels for bfloat16 round at other places than those of Hugging Face."""
MAX_GROWTH_BYTES = 64 << 20
"""Maximum growth of the GPU's used memory over 45 updates through one transport."""

GPU = torch.device("cuda", 0)
CUDA: Any = torch.cuda
rehearsable = pytest.mark.gpu(rehearsable=True)


def used_gpu_bytes() -> int:
    """Used memory of the whole GPU as the driver reports it to this process, which is not the server's. 0 on a CPU."""
    if device() == "cpu":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


@contextmanager
def engine_for(
    mesh: DeviceMesh, folder: Path, dtype: str, weights: WeightsConfig | None = None, **more: Any
) -> Iterator[VerlEngine]:
    args = server_args(dtype=dtype, **{"max_total_tokens": 8192, **more})
    with VerlEngine(mesh, model_path=str(folder), weights=weights, **args) as engine:
        yield engine


def on_device(model: Any) -> dict[str, torch.Tensor]:
    """The state dict of a model in float32, as a trainer on the device has it."""
    return {name: tensor.to(device()) for name, tensor in model.state_dict().items()}


# -- the device, without a server --------------------------------------------------------------------


def read_buckets_of_another_process(description: dict[str, Any], bucket_bytes: int, results: Any) -> None:
    """Main function of a process: opens the buckets of another process and sends back what it reads."""
    memory = DeviceBucketMemory.open(description, bucket_bytes)
    found = [memory.as_tensor(memory.view(bucket)).cpu() for bucket in range(2)]
    results.put([(int(tensor[0]), bool((tensor == tensor[0]).all())) for tensor in found])
    memory.close()


@pytest.mark.gpu
class TestDevice:
    """What the CPU tests cannot show of buckets in GPU memory and of the checksums."""

    def test_the_packages_have_the_kernel_of_rms_norm(self) -> None:
        """Every server of the proof needs it. Its compiler would name the missing file at the end of a long log."""
        assert missing_norm_kernel() is None

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
    def test_checksums_are_equal_on_the_host_and_on_the_gpu(self, dtype: torch.dtype) -> None:
        for size in (1, 7, 4097, 3 * 2**20 + 5):
            tensor = torch.randint(-100, 100, (size,)).to(dtype)
            words = tensor.view(torch.uint8)
            assert positional_sum(words) == positional_sum(words.cuda())
            assert compute_checksum(tensor, POSITIONAL_SUM) == compute_checksum(tensor.cuda(), POSITIONAL_SUM)
            assert compute_checksum(tensor) == compute_checksum(tensor.cuda())
            pieces = Checksums(POSITIONAL_SUM, torch.device("cuda"))
            pieces.add(tensor)
            assert pieces.values() == [compute_checksum(tensor, POSITIONAL_SUM)]
            on_both = Checksums(POSITIONAL_SUM)
            on_both.add(tensor.cuda())
            on_both.add(tensor)
            assert on_both.values() == pieces.values() * 2

    def test_tensors_are_cast_and_copied_to_pinned_memory(self) -> None:
        """Into contiguous and strided parts of the arena, from a side stream that is still computing."""
        specs = {"rows": TensorSpec((1024, 512), "bfloat16"), "columns": TensorSpec((512, 1024), "bfloat16")}
        arena = Arena.create(plan_arena(specs))
        copies = StagingCopies(arena.pin)
        with torch.cuda.stream(CUDA.Stream()):
            source = torch.zeros(1024, 256, device="cuda")
            CUDA._sleep(200_000_000)  # about 0.1 s
            source += torch.randn(1024, 256, device="cuda")
            for _ in range(3):
                copies.copy(arena.tensor("rows")[:, 256:], source)
                copies.copy(arena.tensor("columns")[:256], source.t())
            copies.wait()
        assert arena.tensor("rows").is_pinned()
        expected = source.bfloat16().cpu()
        assert torch.equal(arena.tensor("rows")[:, 256:], expected)
        assert torch.equal(arena.tensor("columns")[:256], expected.t())
        arena.close()

    def test_another_thread_continues_after_the_callers_stream(self) -> None:
        side, found = CUDA.Stream(), []
        with torch.cuda.stream(side):
            tensor = torch.zeros(1 << 20, device="cuda")
            CUDA._sleep(400_000_000)
            tensor += 1
            order = CallerOrder(tensor)

        def read() -> None:
            with order.continue_here():
                assert torch.cuda.current_stream() != side
                found.append(tensor.sum())

        thread = threading.Thread(target=read)
        thread.start()
        thread.join(30)
        assert float(found[0]) == 1 << 20

    def test_a_model_gets_copies_of_host_tensors(self) -> None:
        specs = {f"t{i}": TensorSpec((1000 + i,), "float32") for i in range(5)}
        arena = Arena.create(plan_arena(specs))
        arena.pin()
        for i, name in enumerate(specs):
            arena.tensor(name).fill_(i)
        pairs = iter([(name, arena.tensor(name)) for name in specs])
        got = [(name, tensor.device.type, float(tensor.mean())) for name, tensor in copies_on(GPU, pairs)]
        assert got == [(name, "cuda", float(i)) for i, name in enumerate(specs)]
        arena.close()

    def test_another_process_reads_the_buckets(self) -> None:
        bucket_bytes = 3 << 20
        memory = DeviceBucketMemory.create(bucket_bytes)
        for bucket in range(2):
            memory.as_tensor(memory.view(bucket)).fill_(7 + bucket)
        memory.synchronize()
        context = mp.get_context("spawn")
        results = context.Queue()
        arguments = (memory.description(), bucket_bytes, results)
        process = context.Process(target=read_buckets_of_another_process, args=arguments)
        process.start()
        assert results.get(timeout=60) == [(7, True), (8, True)]
        process.join(20)
        assert process.exitcode == 0
        memory.close()

    def test_buckets_give_their_memory_back(self) -> None:
        before = used_gpu_bytes()
        memory = DeviceBucketMemory.create(256 << 20)
        during = used_gpu_bytes()
        memory.close()
        assert during - before >= 512 << 20
        assert abs(used_gpu_bytes() - before) < 16 << 20


def require_plugin(engine: VerlEngine) -> None:
    """The server has loaded the SGLang plugin of this repository.

    The server then tells which memory is released, or its log says that this version of SGLang has no function for the
    hook that tells it.
    """
    assert engine.adapter is not None
    process = engine.adapter.process
    assert isinstance(process, ServerProcess)
    is_told = released_memory(engine.adapter.get_server_info()) is not None
    assert is_told or f"the hook {add_state.__qualname__} is inactive" in process.log_path.read_text()


@rehearsable
def test_a_server_starts(one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    started = time.monotonic()
    with engine_for(one_rank, tiny("qwen3", dtype="bfloat16"), "bfloat16") as engine:
        record("first_server", start_s=round(time.monotonic() - started, 1))
        require_plugin(engine)
        reply = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert len(reply["output_ids"]) == GREEDY["max_new_tokens"]


# -- log probabilities -------------------------------------------------------------------------------


def log_probs_of(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Hugging Face's log probability of each token after the prompt, in float64 arithmetic after the logits."""
    parameter = next(model.parameters())
    ids = torch.tensor([prompt + tokens], device=parameter.device)
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double()
    return torch.log_softmax(logits, dim=-1).cpu().gather(1, torch.tensor(tokens)[:, None])[:, 0]


def gaps(engine: VerlEngine, model: Any, dtype: str) -> tuple[float, float]:
    """The largest distance from the exact log probabilities: that of the engine, and that of Hugging Face in `dtype`.

    The exact log probabilities are those of float64 arithmetic with weights in `dtype`.
    """
    rounded = copy.deepcopy(model).to(getattr(torch, dtype))
    exact, own = copy.deepcopy(rounded).double(), rounded.to(device())
    replies = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_logprob=True)
    engine_gap = own_gap = 0.0
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        tokens = reply["output_ids"]
        expected = log_probs_of(exact, prompt, tokens)
        got = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]], dtype=torch.float64)
        assert torch.isfinite(got).all()
        engine_gap = max(engine_gap, float((got - expected).abs().max()))
        own_gap = max(own_gap, float((log_probs_of(own, prompt, tokens) - expected).abs().max()))
    return engine_gap, own_gap


def require_near(engine: VerlEngine, model: Any, dtype: str, label: str) -> None:
    """The engine's log probabilities are as near to the exact values as those of Hugging Face in the same dtype."""
    engine_gap, own_gap = gaps(engine, model, dtype)
    tolerance = max(3 * own_gap, MIN_TOLERANCE[dtype])
    record("log_probs", label=label, dtype=dtype, engine_gap=engine_gap, hugging_face_gap=own_gap, tolerance=tolerance)
    assert engine_gap <= tolerance


def require_far(engine: VerlEngine, model: Any, dtype: str) -> None:
    """The engine does not serve the weights of `model`: the comparison would show it."""
    engine_gap, own_gap = gaps(engine, model, dtype)
    record("other_weights", dtype=dtype, engine_gap=engine_gap)
    assert engine_gap > 3 * max(3 * own_gap, MIN_TOLERANCE[dtype])


without_float32 = pytest.mark.skipif(device() == "cuda", reason=NO_FLOAT32)


@rehearsable
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=without_float32), "bfloat16"])
def test_log_probabilities_equal_hugging_face(dtype: str, one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    """Of the checkpoint's weights and of pushed weights. CUDA graphs stay on: they must read the new weights."""
    folder = tiny("qwen3", dtype=dtype)
    model = reference_model(folder)
    before = copy.deepcopy(model)
    with engine_for(one_rank, folder, dtype) as engine:
        require_near(engine, model, dtype, "checkpoint")
        change_weights(model, seed=3)
        require_far(engine, model, dtype)
        result = engine.update_weights_from_tensor(on_device(model).items())
        assert result.num_missing == 0
        require_near(engine, model, dtype, f"pushed by {result.transport}")
        require_far(engine, before, dtype)


# -- transports --------------------------------------------------------------------------------------


@rehearsable
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transport(transport: str, one_rank: DeviceMesh, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Whole and partial updates with float32 tensors of the trainer, into a bfloat16 server. All are verified."""
    folder = tiny("qwen2", dtype="bfloat16")
    model = reference_model(folder)
    config = WeightsConfig(transport=transport, folder=tmp_path)
    with engine_for(one_rank, folder, "bfloat16", config, disable_cuda_graph=True) as engine:
        for seed in (1, 2, 3):
            change_weights(model, seed=seed)
            result = engine.update_weights_from_tensor(on_device(model).items())
            assert (result.transport, result.num_missing) == (transport, 0)
            require_near(engine, model, "bfloat16", f"update {seed}")
        original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        part = {name: tensor * 0.5 for name, tensor in [*original.items()][::3]}
        model.load_state_dict(part, strict=False)
        pushed = {name: tensor.to(device()) for name, tensor in part.items()}
        assert engine.update_weights_from_tensor(iter(pushed.items())).num_tensors == len(part)
        require_near(engine, model, "bfloat16", "a part of the tensors")
        record("seconds", transport=transport, gather_s=result.gather_s, load_s=result.load_s)


def push_shards(rank: int, world: int, folder: str, transport: str) -> None:
    """One of two trainer ranks on the same GPU. Each has its shard of every tensor, or whole tensors for `cuda_ipc`."""
    model = reference_model(folder)
    mesh = init_device_mesh(device(), (world,))

    def shard(tensor: torch.Tensor) -> torch.Tensor:
        chunks = tensor.chunk(world)
        local = chunks[rank] if rank < len(chunks) else tensor[:0]
        return DTensor.from_local(
            local.to(device()), mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    config = WeightsConfig(transport=transport)
    args = server_args(dtype="bfloat16", max_total_tokens=8192, disable_cuda_graph=True)
    with VerlEngine(mesh_of(world), model_path=folder, tp_size=1, weights=config, **args) as engine:
        for seed in (1, 2):
            change_weights(model, seed=seed)
            tensors = on_device(model) if transport == "cuda_ipc" else model.state_dict()
            pairs = [(name, tensor if transport == "cuda_ipc" else shard(tensor)) for name, tensor in tensors.items()]
            side = CUDA.Stream() if device() == "cuda" else None
            with CUDA.stream(side):
                result = engine.update_weights_from_tensor(pairs)
            assert (result.transport, result.num_missing) == (transport, 0)
            require_near(engine, model, "bfloat16", f"rank {rank}, update {seed} by {transport}")


@rehearsable
@pytest.mark.parametrize("transport", ["shared_memory", "buckets", "cuda_ipc"])
def test_two_ranks(transport: str, tiny: Callable[..., Path]) -> None:
    """Two trainer ranks share the GPU. No collective operation runs on it: NCCL needs a GPU for each rank."""
    with trainer_ranks(2) as ranks:
        ranks.run(push_shards, str(tiny("qwen2", dtype="bfloat16")), transport, timeout_s=120.0)


# -- memory ------------------------------------------------------------------------------------------


@rehearsable
def test_memory_is_released_and_resumed(one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    """The driver's own figures, seen from the trainer's process: what is released can be used by the trainer."""
    sizes: dict[str, Any] = (
        {"hidden_size": 1024, "layers": 8, "heads": 16, "kv_heads": 8, "intermediate_size": 8192}
        if device() == "cuda"
        else {}
    )
    folder = tiny("qwen3", dtype="bfloat16", **sizes)
    model = reference_model(folder)
    weights = on_device(model)
    tokens = 131072 if device() == "cuda" else 8192
    more: dict[str, Any] = {"max_total_tokens": tokens, "enable_memory_saver": True, "disable_cuda_graph": True}
    with engine_for(one_rank, folder, "bfloat16", **more) as engine:
        engine.update_weights_from_tensor(weights.items())
        before = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        used = {"serving": used_gpu_bytes()}
        engine.release_memory_occupation(["weights"])
        used["without weights"] = used_gpu_bytes()
        engine.release_memory_occupation(["kv_cache"])
        used["without both"] = used_gpu_bytes()
        engine.resume_memory_occupation()
        used["resumed"] = used_gpu_bytes()
        engine.update_weights_from_tensor(weights.items())
        after = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        assert [reply["output_ids"] for reply in after] == [reply["output_ids"] for reply in before]
    config = model.config
    weight_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    kv_bytes = 2 * 2 * tokens * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    record("driver", used_bytes=used, weight_bytes=weight_bytes, kv_bytes=kv_bytes)
    if device() == "cuda":
        assert used["serving"] - used["without weights"] > 0.9 * weight_bytes
        assert used["without weights"] - used["without both"] > 0.9 * kv_bytes
        assert abs(used["resumed"] - used["serving"]) < 0.1 * (weight_bytes + kv_bytes)


@rehearsable
def test_hundred_updates_do_not_grow(one_rank: DeviceMesh, tiny: Callable[..., Path]) -> None:
    """50 updates through each of two transports, with generation in between, and different weights in each update."""
    folder = tiny("qwen3", dtype="bfloat16")
    model = reference_model(folder)
    used: dict[str, list[int]] = {}
    files: dict[str, list[int]] = {}
    for transport in ("cuda_ipc" if device() == "cuda" else "buckets", "shared_memory"):
        config = WeightsConfig(transport=transport)
        with engine_for(one_rank, folder, "bfloat16", config, disable_cuda_graph=True) as engine:
            assert engine.adapter is not None
            server = engine.adapter.pids.main
            for number in range(50):
                change_weights(model, seed=number, scale=0.01)
                engine.update_weights_from_tensor(on_device(model).items())
                reply = engine.generate(input_ids=PROMPTS[0], sampling_params={"max_new_tokens": 4})
                assert reply["meta_info"]["weight_version"] == number + 1
                if number in (4, 49):
                    used.setdefault(transport, []).append(used_gpu_bytes())
                    files.setdefault(transport, []).append(open_files() + open_files(server))
            require_near(engine, model, "bfloat16", f"after 50 updates by {transport}")
    record("growth", used_bytes=used, open_files=files)
    for early, late in used.values():
        assert late - early < MAX_GROWTH_BYTES
    for early, late in files.values():
        assert late <= early + 2
