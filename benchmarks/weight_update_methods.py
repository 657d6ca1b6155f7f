"""The methods of weight update that `bench_weight_sync` and `bench_transports` compare, and their models.

The lower bound is one memcpy of the same bytes in the trainer, into memory that was written before. The baselines are
SGLang's own `HttpServerEngineAdapter`, called as its users call it, and SGLang's flattened buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

MEMCPY = "one memcpy"
ARENA, ARENA_VERIFIED = "arena", "arena, verified"
STATE_DICT, STATE_DICT_VERIFIED = "state dict", "state dict, verified"
FSDP2, FSDP2_VERIFIED = "2 FSDP2 ranks", "2 FSDP2 ranks, verified"
TWO_BUCKETS, TWO_BUCKETS_VERIFIED = "two buckets", "two buckets, verified"
SGLANG_BUCKETS, SGLANG_ADAPTER_ONE_CALL, SGLANG_ADAPTER = (
    "SGLang's buckets",
    "SGLang's adapter, one call",
    "SGLang's adapter",
)

#: Qwen2 shapes, bfloat16, tied embeddings; 0.5 B and 1.5 B are those of Qwen2.5.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "0.1 B": {"hidden_size": 768, "layers": 12, "heads": 12, "kv_heads": 2, "intermediate_size": 2048,
              "vocab_size": 32000},
    "0.5 B": {"hidden_size": 896, "layers": 24, "heads": 14, "kv_heads": 2, "intermediate_size": 4864,
              "vocab_size": 151936},
    "1.5 B": {"hidden_size": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate_size": 8960,
              "vocab_size": 151936},
}  # fmt: skip
QUICK_MODELS: Mapping[str, Mapping[str, Any]] = {
    "0.01 B": {"hidden_size": 256, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate_size": 1024,
               "vocab_size": 8000},
}  # fmt: skip


@dataclass(frozen=True)
class UpdateMethod:
    """One method. `update` runs one weight update and returns when the server uses the new weights."""

    name: str
    update: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    """Runs before each update and is not timed."""


def timed(update: Callable[[], object]) -> float:
    """Run `update` and return its duration in seconds."""
    started = time.perf_counter()
    update()
    return time.perf_counter() - started


def memcpy_method(size: int) -> UpdateMethod:
    """Copy `size` bytes with all threads of torch between two buffers that were written before."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    return UpdateMethod(MEMCPY, lambda: target.copy_(source))


def arena_and_state_dict_methods(engine: Any, weights: dict[str, torch.Tensor]) -> list[UpdateMethod]:
    """Updates by `VerlEngine` from an ordinary state dict, and from parameters in the arena."""
    staging = engine.staging_tensors()
    in_arena = {name: staging[name] for name in weights}
    for name, tensor in weights.items():
        in_arena[name].copy_(tensor)

    return [
        engine_method(engine, ARENA, in_arena, False),
        engine_method(engine, ARENA_VERIFIED, in_arena, True),
        engine_method(engine, STATE_DICT, weights, False),
        engine_method(engine, STATE_DICT_VERIFIED, weights, True),
    ]


def engine_method(engine: Any, name: str, tensors: dict[str, torch.Tensor], verify: bool) -> UpdateMethod:
    """An update with `tensors` by `engine`."""

    def update() -> None:
        result = engine.update_weights_from_tensor(tensors.items(), verify=verify)
        assert result.num_missing == 0, result

    return UpdateMethod(name, update)


def sglang_buckets_method(engine: Any, weights: dict[str, torch.Tensor]) -> UpdateMethod:
    """Updates of the same server with SGLang's flattened bucket of the whole model, serialized by SGLang."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    adapter = engine.adapter
    tp_size = int(adapter.server_args.get("tp_size") or 1)

    def update() -> None:
        adapter.pause_generation("retract")
        adapter.begin_weight_update()
        bucket = FlattenedTensorBucket(named_tensors=list(weights.items()))
        wire = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        bodies = [MultiprocessingSerializer.serialize(wire, output_str=True) for _ in range(tp_size)]
        adapter.update_weights_from_tensor(bodies, load_format="flattened_bucket")
        adapter.end_weight_update()
        adapter.continue_generation()

    return UpdateMethod(SGLANG_BUCKETS, update)


def sglang_adapter_methods(sglang_adapter: Any, weights: dict[str, torch.Tensor]) -> list[UpdateMethod]:
    """Updates by SGLang's HTTP adapter of its own server. The tensors are new in each update, as after a gather.

    SGLang's historical `VerlEngine` calls the adapter once per tensor, so that only one gathered tensor is in memory.
    """
    tensors: list[tuple[str, torch.Tensor]] = []

    def prepare() -> None:
        tensors[:] = [(name, tensor.clone()) for name, tensor in weights.items()]

    def update() -> None:
        sglang_adapter.begin_weight_update()
        sglang_adapter.update_weights_from_tensor(tensors, flush_cache=True)
        sglang_adapter.end_weight_update()

    def update_per_tensor() -> None:
        sglang_adapter.begin_weight_update()
        for number, tensor in enumerate(tensors, 1):
            sglang_adapter.update_weights_from_tensor([tensor], flush_cache=number == len(tensors))
        sglang_adapter.end_weight_update()

    return [
        UpdateMethod(SGLANG_ADAPTER_ONE_CALL, update, prepare),
        UpdateMethod(SGLANG_ADAPTER, update_per_tensor, prepare),
    ]
