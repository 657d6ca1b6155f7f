"""How long new weights take into a server, against one memcpy of the same bytes and against SGLang's own ways.

One configuration is a model and a number of TP ranks, with one server for all ways (SGLang's adapter starts its
own, as it always does). The ways take turns within a round; a ratio is formed with the memcpy of the same
round. Pushing means the whole protocol: pause, session, load, flush, continue.

SGLang's own ways are left out for models beyond 0.6 B: their copies of the weights do not fit into 24 GB.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from common import (
    CONSOLE,
    Json,
    Options,
    Summary,
    Target,
    cores,
    environment,
    parse_options,
    show_table,
    show_targets,
    summarize,
    write_result,
)
from plots import COLOURS, grouped_bars, legend_below, new_figure, save_figure
from servers import Watch, free_port, one_rank_mesh
from weight_ways import (
    ARENA,
    ARENA_VERIFIED,
    BUCKETS,
    FSDP2,
    FSDP2_VERIFIED,
    MEMCPY,
    MODELS,
    QUICK_MODELS,
    SHIPPED,
    SHIPPED_EACH,
    STATE_DICT,
    TWO_BUCKETS,
    TWO_BUCKETS_VERIFIED,
    Way,
    buckets_way,
    memcpy_way,
    our_way,
    our_ways,
    shipped_ways,
    timed,
)

NAME = "bench_weight_sync"
SERVER: Json = {"dtype": "bfloat16", "max_total_tokens": 4096, "load_format": "auto"}
PEERS_LIMIT_BYTES = 1.3e9
#: Of 0.5 B parameters with TP 1: at most this many times one memcpy.
TARGETS = {ARENA: 1.3, ARENA_VERIFIED: 2.5, STATE_DICT: 2.5, FSDP2: 3.0}
SHIPPED_TARGET = 20.0
TARGET_MODEL = "0.5 B"
#: way -> seconds of each round.
Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Configuration:
    """One model and one number of TP ranks, and what was measured."""

    model: str
    tp_size: int
    bytes: int
    samples: Samples

    @property
    def name(self) -> str:
        return f"{self.model}, TP {self.tp_size}"

    def ratio(self, way: str) -> Summary:
        """Over the memcpy of the same round."""
        return summarize([a / b for a, b in zip(self.samples[way], self.samples[MEMCPY], strict=True)])


@contextmanager
def model_folder(sizes: Mapping[str, Any]) -> Iterator[Path]:
    from verl_server.tiny import make_model

    with tempfile.TemporaryDirectory(prefix="verl-bench-") as folder:
        yield make_model(Path(folder) / "model", "qwen2", dtype="bfloat16", tie_word_embeddings=True, **sizes)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors in ordinary memory, as a trainer's state dict holds them."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update({name: tensor.clone() for name, tensor in load_file(file).items()})
    return found


def take_turns(ways: list[Way], rounds: int) -> Samples:
    """Every way once a round, after one push each that is not counted; the order turns."""
    for way in ways:
        way.prepare()
        way.push()
    samples: Samples = {way.name: [] for way in ways}
    for number in range(rounds):
        turn = number % len(ways)
        for way in [*ways[turn:], *ways[:turn]]:
            way.prepare()
            gc.collect()
            samples[way.name].append(timed(way.push))
    return samples


def measure_one_rank(folder: Path, tp_size: int, rounds: int, with_shipped: bool) -> tuple[Samples, int]:
    """All ways of a trainer of one rank; also the bytes of one update."""
    from verl_server import VerlEngine

    weights = weights_of(folder)
    size = sum(tensor.nbytes for tensor in weights.values())
    watch = Watch()
    with ExitStack() as stack:
        mesh = stack.enter_context(one_rank_mesh())
        engine = stack.enter_context(VerlEngine(mesh, model_path=str(folder), tp_size=tp_size, **SERVER))
        torch.set_num_threads(cores())
        watch.note()
        small = stack.enter_context(small_staging(engine, mesh, folder))
        ways = [
            memcpy_way(size),
            *our_ways(engine, weights),
            our_way(small, TWO_BUCKETS, weights, False),
            our_way(small, TWO_BUCKETS_VERIFIED, weights, True),
        ]
        if size < PEERS_LIMIT_BYTES:
            ways.append(buckets_way(engine, weights))
        shipped = start_shipped(folder) if with_shipped and size < PEERS_LIMIT_BYTES else None
        try:
            samples = take_turns([*ways, *(shipped_ways(shipped, weights) if shipped else [])], rounds)
        finally:
            if shipped is not None:
                shipped.shutdown()
    watch.check()
    return samples, size


def small_staging(engine: Any, mesh: Any, folder: Path) -> Any:
    """A second engine for the same server, whose staging memory is two buckets instead of the whole model."""
    from verl_server import RemoteServer, VerlEngine, WeightsConfig

    args = engine.adapter.asynchronous.server_args
    server = RemoteServer(engine.adapter.base_url, args["api_key"], args["admin_api_key"])
    weights = WeightsConfig(transport="buckets")
    return VerlEngine(mesh, servers=[server], model_path=str(folder), dtype=SERVER["dtype"], weights=weights)


def start_shipped(folder: Path) -> Any:
    """SGLang's adapter; it starts a server of its own."""
    from sglang.srt.entrypoints.http_server_engine import HttpServerEngineAdapter

    return HttpServerEngineAdapter(model_path=str(folder), port=free_port(), **SERVER)


def measure_two_ranks(folder: Path, rounds: int) -> Samples:
    """Two FSDP2 ranks; rank 0 tells the seconds."""
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

        def way(name: str, verify: bool) -> Way:
            return Way(name, lambda: engine.update_weights_from_tensor(shards.items(), verify=verify))

        ways = [way(FSDP2, False), way(FSDP2_VERIFIED, True)]
        if rank == 0:
            torch.set_num_threads(cores())
        samples = take_turns([memcpy_way(size if rank == 0 else 1), *ways], rounds)
    if rank == 0:
        results.put(samples)
    dist.barrier()
    dist.destroy_process_group()


def report(options: Options, machine: Json, found: list[Configuration], rounds: int) -> None:
    """Print tables and targets, write the files."""
    for one in found:
        rows = []
        for way, seconds in one.samples.items():
            summary, ratio = summarize(seconds), one.ratio(way)
            rows.append([
                way,
                f"{summary.median * 1e3:.1f} ({summary.q1 * 1e3:.1f} to {summary.q3 * 1e3:.1f})",
                f"{one.bytes / summary.median / 1e9:.2f}",
                f"{ratio.median:.2f} ({ratio.q1:.2f} to {ratio.q3:.2f})",
            ])  # fmt: skip
        show_table(f"{one.name}: {one.bytes / 1e6:.0f} MB", ["way", "ms (quartiles)", "GB/s", "of one memcpy"], rows)
    targets = targets_of(found)
    show_targets(targets)
    write_result(
        options,
        NAME,
        machine,
        settings={"server_args": SERVER, "rounds": rounds},
        figures={
            one.name: {"bytes": one.bytes, "over_memcpy": {way: asdict(one.ratio(way)) for way in one.samples}}
            for one in found
        },
        targets=targets,
        samples=[{**asdict(one), "samples": _rounded(one.samples)} for one in found],
    )
    plot(options, machine, found)


def _rounded(samples: Samples) -> Samples:
    return {way: [round(seconds, 5) for seconds in found] for way, found in samples.items()}


def targets_of(found: list[Configuration]) -> list[Target]:
    """The promises for 0.5 B parameters with TP 1."""
    targets = []
    for one in found:
        if not one.model.startswith(TARGET_MODEL) or one.tp_size != 1:
            continue
        for way, limit in TARGETS.items():
            if way in one.samples:
                targets.append(Target(f"{one.name}, {way}: over one memcpy", one.ratio(way).median, limit, False))
        for peer in (SHIPPED_EACH, SHIPPED):
            if peer in one.samples:
                pairs = zip(one.samples[peer], one.samples[STATE_DICT], strict=True)
                speed_up = summarize([a / b for a, b in pairs]).median
                targets.append(Target(f"{one.name}: {peer} over state dict", speed_up, SHIPPED_TARGET, True))
    return targets


def plot(options: Options, machine: Json, found: list[Configuration]) -> None:
    """Seconds by configuration, on a logarithmic scale, and our ways over one memcpy."""
    title = f"Weights into a server, bfloat16, {machine['cores']} cores, SGLang {machine['versions'].get('sglang')}"
    figure, (seconds, ratio) = new_figure(2, title, width=14)
    groups: dict[str, dict[str, Configuration]] = {}
    for one in found:  # a model's two trainer ranks stand beside its one
        group = groups.setdefault(f"{one.model.partition(',')[0]}, TP {one.tp_size}", {})
        for way in one.samples:
            group.setdefault(way, one)
    names = list(dict.fromkeys(way for group in groups.values() for way in group))
    colours = dict(zip(names, COLOURS, strict=False))
    grouped_bars(
        seconds,
        list(groups),
        {way: [summarize(g[way].samples[way]) if way in g else None for g in groups.values()] for way in names},
        title="Seconds of one update (median; whiskers: quartiles)",
        ylabel="seconds, logarithmic",
        colours=colours,
    )
    seconds.set_yscale("log")
    ours = [way for way in names if way not in (MEMCPY, SHIPPED, SHIPPED_EACH, BUCKETS)]
    grouped_bars(
        ratio,
        list(groups),
        {way: [g[way].ratio(way) if way in g else None for g in groups.values()] for way in ours},
        title="Over one memcpy of the same bytes in the same round",
        ylabel="ratio",
        colours=colours,
    )
    legend_below(figure, seconds, ratio)
    save_figure(figure, options.png)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of all ways (default 9, quick 2)")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), help="only these models")


def main() -> None:
    mp.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call] # SGLang's own ways send handles, and die of the default kind
    options = parse_options(NAME, "Seconds from a trainer's tensors to served weights.", _more_options)
    rounds = options.extra.rounds or (2 if options.quick else 9)
    models = QUICK_MODELS if options.quick else {name: MODELS[name] for name in options.extra.models or MODELS}
    machine = environment()
    found = []
    for model, sizes in models.items():
        with model_folder(sizes) as folder:
            for tp_size in (1, 2):
                started = time.monotonic()
                samples, size = measure_one_rank(folder, tp_size, rounds, with_shipped=tp_size == 1)
                found.append(Configuration(model, tp_size, size, samples))
                CONSOLE.print(f"{found[-1].name}: {time.monotonic() - started:.0f} s", style="dim")
            two = measure_two_ranks(folder, rounds)
            found.append(Configuration(f"{model}, 2 trainer ranks", 1, size, two))
    report(options, machine, found, rounds)


if __name__ == "__main__":
    main()
