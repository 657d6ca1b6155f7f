"""The ways of bringing new weights into a server that `bench_weight_sync` compares, and the models it uses.

The limit is one memcpy of the same bytes in the trainer, into memory that was written before. The peers are
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
BUCKETS, SHIPPED, SHIPPED_EACH = "SGLang's buckets", "SGLang's adapter, one call", "SGLang's adapter"

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
class Way:
    """One way; `push` brings the weights once and returns when the server serves them."""

    name: str
    push: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    """Before each push; not timed."""


def timed(push: Callable[[], object]) -> float:
    """Seconds of one push."""
    started = time.perf_counter()
    push()
    return time.perf_counter() - started


def memcpy_way(size: int) -> Way:
    """`size` bytes from one place to another with all of torch's threads, both written before."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    return Way(MEMCPY, lambda: target.copy_(source))


def our_ways(engine: Any, weights: dict[str, torch.Tensor]) -> list[Way]:
    """From an ordinary state dict, and from parameters that live in the arena."""
    places = engine.staging_tensors()
    kept = {name: places[name] for name in weights}
    for name, tensor in weights.items():
        kept[name].copy_(tensor)

    return [
        our_way(engine, ARENA, kept, False),
        our_way(engine, ARENA_VERIFIED, kept, True),
        our_way(engine, STATE_DICT, weights, False),
        our_way(engine, STATE_DICT_VERIFIED, weights, True),
    ]


def our_way(engine: Any, name: str, tensors: dict[str, torch.Tensor], verify: bool) -> Way:
    """A push of `tensors` by `engine`."""

    def push() -> None:
        result = engine.update_weights_from_tensor(tensors.items(), verify=verify)
        assert result.missing == 0, result

    return Way(name, push)


def buckets_way(engine: Any, weights: dict[str, torch.Tensor]) -> Way:
    """SGLang's flattened bucket of the whole model, serialized by SGLang, to the same server."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    adapter = engine.adapter
    tp_size = int(adapter.asynchronous.server_args.get("tp_size") or 1)

    def push() -> None:
        adapter.pause_generation("retract")
        adapter.begin_weight_update()
        bucket = FlattenedTensorBucket(named_tensors=list(weights.items()))
        wire = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        bodies = [MultiprocessingSerializer.serialize(wire, output_str=True) for _ in range(tp_size)]
        adapter.update_weights_from_tensor(bodies, load_format="flattened_bucket")
        adapter.end_weight_update()
        adapter.continue_generation()

    return Way(BUCKETS, push)


def shipped_ways(shipped: Any, weights: dict[str, torch.Tensor]) -> list[Way]:
    """SGLang's own HTTP adapter with its own server. Tensors are new ones each time, as a gather makes them.

    SGLang's historical `VerlEngine` calls it once for each tensor, which keeps one gathered tensor at a time.
    """
    tensors: list[tuple[str, torch.Tensor]] = []

    def prepare() -> None:
        tensors[:] = [(name, tensor.clone()) for name, tensor in weights.items()]

    def push() -> None:
        shipped.begin_weight_update()
        shipped.update_weights_from_tensor(tensors, flush_cache=True)
        shipped.end_weight_update()

    def push_each() -> None:
        shipped.begin_weight_update()
        for number, tensor in enumerate(tensors, 1):
            shipped.update_weights_from_tensor([tensor], flush_cache=number == len(tensors))
        shipped.end_weight_update()

    return [Way(SHIPPED, push, prepare), Way(SHIPPED_EACH, push_each, prepare)]
