"""Measures the duration of a weight update, against one memcpy of the same bytes and against SGLang's own methods.

One configuration is a model and a number of TP ranks, with one server for all methods. SGLang's adapter starts its own
server, as it always does. Each round runs every method once, and a ratio is computed with the memcpy of the same round.
An update is the whole protocol: pause, begin the update, load, flush the cache, continue.

SGLang's own methods are not measured with models above 0.6 B: their copies of the weights do not fit into 24 GB.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import vllm_weight_sync
from common import (
    CONSOLE,
    cores,
    environment,
    parse_options,
)
from servers import ProcessLeakCheck, free_port, one_rank_mesh
from weight_sync_report import NAME, SERVER, Configuration, Samples, report
from weight_update_methods import (
    FSDP2,
    FSDP2_VERIFIED,
    MODELS,
    QUICK_MODELS,
    TWO_BUCKETS,
    TWO_BUCKETS_VERIFIED,
    UpdateMethod,
    arena_and_state_dict_methods,
    engine_method,
    memcpy_method,
    sglang_adapter_methods,
    sglang_buckets_method,
    timed,
)

BASELINE_LIMIT_BYTES = 1.3e9


@contextmanager
def model_folder(sizes: Mapping[str, Any]) -> Iterator[Path]:
    from verl_server.tiny import make_model

    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        yield make_model(Path(folder) / "model", "qwen2", dtype="bfloat16", tie_word_embeddings=True, **sizes)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint in ordinary memory, as in a trainer's state dict."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update({name: tensor.clone() for name, tensor in load_file(file).items()})
    return tensors


def run_rounds(methods: list[UpdateMethod], rounds: int) -> Samples:
    """Run every method once per round, in rotating order, after one update of each method that is not measured."""
    for method in methods:
        method.prepare()
        method.update()
    samples: Samples = {method.name: [] for method in methods}
    for number in range(rounds):
        first = number % len(methods)
        for method in [*methods[first:], *methods[:first]]:
            method.prepare()
            gc.collect()
            samples[method.name].append(timed(method.update))
    return samples


def measure_one_rank(folder: Path, tp_size: int, rounds: int, with_sglang_adapter: bool) -> tuple[Samples, int]:
    """Measure all methods of a trainer with one rank. Returns the seconds, and the bytes of one update."""
    from verl_server import VerlEngine

    weights = weights_of(folder)
    size = sum(tensor.nbytes for tensor in weights.values())
    leak_check = ProcessLeakCheck()
    with ExitStack() as stack:
        mesh = stack.enter_context(one_rank_mesh())
        engine = stack.enter_context(VerlEngine(mesh, model_path=str(folder), tp_size=tp_size, **SERVER))
        bucket_engine = stack.enter_context(engine_with_buckets(mesh, folder, tp_size))
        torch.set_num_threads(cores())
        leak_check.record()
        methods = [
            memcpy_method(size),
            *arena_and_state_dict_methods(engine, weights),
            engine_method(bucket_engine, TWO_BUCKETS, weights, False),
            engine_method(bucket_engine, TWO_BUCKETS_VERIFIED, weights, True),
        ]
        if size < BASELINE_LIMIT_BYTES:
            methods.append(sglang_buckets_method(engine, weights))
        sglang_adapter = start_sglang_adapter(folder) if with_sglang_adapter and size < BASELINE_LIMIT_BYTES else None
        try:
            samples = run_rounds(
                [*methods, *(sglang_adapter_methods(sglang_adapter, weights) if sglang_adapter else [])], rounds
            )
        finally:
            if sglang_adapter is not None:
                sglang_adapter.shutdown()
    leak_check.check()
    return samples, size


def engine_with_buckets(mesh: Any, folder: Path, tp_size: int) -> Any:
    """A second engine, whose staging memory is two buckets instead of the whole model. It has a server of its own."""
    from verl_server import VerlEngine, WeightsConfig

    weights = WeightsConfig(transport="buckets")
    return VerlEngine(mesh, model_path=str(folder), tp_size=tp_size, weights=weights, **SERVER)


def start_sglang_adapter(folder: Path) -> Any:
    """Start SGLang's adapter, which starts its own server."""
    from sglang.srt.entrypoints.http_server_engine import HttpServerEngineAdapter

    return HttpServerEngineAdapter(model_path=str(folder), port=free_port(), **SERVER)


def measure_two_ranks(folder: Path, rounds: int) -> Samples:
    """Measure the methods of a trainer with two FSDP2 ranks. Returns the seconds on rank 0."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="verl-bench-") as store:
        ranks = [
            context.Process(target=_fsdp2_rank, args=(rank, str(folder), f"{store}/rendezvous", rounds, results))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise RuntimeError(f"a trainer rank failed: exit codes {[rank.exitcode for rank in ranks]}")
        return dict(results.get())


def _fsdp2_rank(rank: int, folder: str, store: str, rounds: int, results: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from verl_server import VerlEngine

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    full = weights_of(Path(folder))
    size = sum(tensor.nbytes for tensor in full.values())
    shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in full.items()}
    del full
    with VerlEngine(mesh, model_path=folder, tp_size=1, **SERVER) as engine:

        def method(name: str, verify: bool) -> UpdateMethod:
            return UpdateMethod(name, lambda: engine.update_weights_from_tensor(shards.items(), verify=verify))

        methods = [method(FSDP2, False), method(FSDP2_VERIFIED, True)]
        if rank == 0:
            torch.set_num_threads(cores())
        samples = run_rounds([memcpy_method(size if rank == 0 else 1), *methods], rounds)
    if rank == 0:
        results.put(samples)
    dist.barrier()
    dist.destroy_process_group()


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds (default 9, with --quick 2)")
    parser.add_argument("--engine", choices=("sglang", "vllm"), default="sglang", help="engine of the server")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), help="measure only these models")


def main() -> None:
    mp.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call] # SGLang's methods send file handles; the server ends with the default strategy
    options = parse_options(
        NAME, "Measure the duration of a weight update, against one memcpy and SGLang's own methods.", _more_options
    )
    rounds = options.extra.rounds or (2 if options.quick else 9)
    models = QUICK_MODELS if options.quick else {name: MODELS[name] for name in options.extra.models or MODELS}
    machine = environment()
    if options.extra.engine == "vllm":
        vllm_weight_sync.run(options, machine, model_folder, models, rounds, run_rounds)
        return
    configurations = []
    for model, sizes in models.items():
        with model_folder(sizes) as folder:
            for tp_size in (1, 2):
                started = time.monotonic()
                samples, size = measure_one_rank(folder, tp_size, rounds, with_sglang_adapter=tp_size == 1)
                configurations.append(Configuration(model, tp_size, size, samples))
                CONSOLE.print(f"{configurations[-1].name}: {time.monotonic() - started:.0f} s", style="dim")
            two = measure_two_ranks(folder, rounds)
            configurations.append(Configuration(f"{model}, 2 trainer ranks", 1, size, two))
    report(options, machine, configurations, rounds)


if __name__ == "__main__":
    main()
