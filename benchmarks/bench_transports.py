"""Weights into servers that run already: broadcast to one and to two, changes only, a file; and 500 updates in a row.

Two servers on this machine stand for two on one other machine: a broadcast brings the bytes there once, whatever
number of servers it has. The ways take turns in blocks, as a server listens to one trainer at a time; the first
push of a block connects and is not counted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from bench_weight_sync import SERVER, model_folder, weights_of
from common import (
    CONSOLE,
    Json,
    Options,
    Target,
    cores,
    environment,
    parse_options,
    show_table,
    show_targets,
    summarize,
    write_result,
)
from plots import grouped_bars, legend_below, new_figure, save_figure
from servers import Watch, one_rank_mesh
from weight_ways import MEMCPY, MODELS, QUICK_MODELS, Way, memcpy_way, timed

NAME = "bench_transports"
ONE, TWO, DELTA, DISK = "broadcast, 1 server", "broadcast, 2 servers", "changes of 1 %", "file"
ONE_FAST, TWO_FAST = "broadcast, 1 server, not verified", "broadcast, 2 servers, not verified"
ONE_BUCKETS, TWO_BUCKETS = "to buckets, 1 server", "to buckets, 2 servers"
WAYS = (ONE, TWO, ONE_FAST, TWO_FAST, ONE_BUCKETS, TWO_BUCKETS, DELTA, DISK)
CHANGED = 0.01
TWO_TARGET, DELTA_TARGET, EXTRA_TARGET = 1.2, 0.05, 0.05
WARM_UPDATES = 20


@dataclass
class Found:
    """What was measured: seconds by way, bytes that were sent by way, and the long run."""

    model: str
    bytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    row: Json = field(default_factory=dict)


@contextmanager
def two_servers(folder: Path) -> Iterator[list[Any]]:
    """Started at the same time, ended at the end."""
    from verl_server import HttpServerEngineAdapter

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(HttpServerEngineAdapter, model_path=str(folder), **SERVER) for _ in range(2)]
        yield [stack.enter_context(start.result()) for start in starts]


def engine_to(mesh: Any, servers: Sequence[Any], folder: Path, transport: str, scratch: Path) -> Any:
    """An engine that drives servers which it did not start."""
    from verl_server import VerlEngine
    from verl_server.config import RemoteServer, WeightsConfig

    remotes = [
        RemoteServer(
            one.base_url, one.asynchronous.server_args["api_key"], one.asynchronous.server_args["admin_api_key"]
        )
        for one in servers
    ]
    config = WeightsConfig(transport=transport, folder=scratch)
    return VerlEngine(mesh, servers=remotes, model_path=str(folder), dtype=SERVER["dtype"], weights=config)


def change_some(weights: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """One element in a hundred gets another value, as after an optimizer step in low precision."""
    for tensor in weights.values():
        flat = tensor.view(-1)
        places = torch.randint(flat.numel(), (int(CHANGED * flat.numel()),), generator=generator)
        flat[places] += 0.25


def measure(model: str, folder: Path, blocks: int, pushes: int, updates: int) -> Found:
    """All blocks, then the long run from parameters in the arena."""
    weights = weights_of(folder)
    size = sum(tensor.nbytes for tensor in weights.values())
    found = Found(model, size, {name: [] for name in (MEMCPY, *WAYS)})
    generator = torch.Generator().manual_seed(0)
    memcpy = memcpy_way(size)
    watch = Watch()
    with one_rank_mesh() as mesh, two_servers(folder) as servers:
        torch.set_num_threads(cores())
        watch.note()
        for number in range(blocks):
            block: list[tuple[str, list[Any], str]] = [
                (ONE, servers[:1], "distributed"),
                (TWO, servers, "distributed"),
                (ONE_FAST, servers[:1], "distributed"),
                (TWO_FAST, servers, "distributed"),
                (ONE_BUCKETS, servers[:1], "distributed_buckets"),
                (TWO_BUCKETS, servers, "distributed_buckets"),
                (DELTA, servers[:1], "delta"),
                (DISK, servers[:1], "disk"),
            ]
            for name, targets, transport in block[number % len(block) :] + block[: number % len(block)]:
                with engine_to(mesh, targets, folder, transport, folder.parent / "updates") as engine:
                    _push_block(found, name, engine, weights, pushes, memcpy, generator)
            CONSOLE.print(f"block {number + 1} of {blocks}: done", style="dim")
    watch.check()
    with one_rank_mesh() as mesh:
        found.row = in_a_row(mesh, folder, weights, updates)
    return found


def _push_block(
    found: Found, name: str, engine: Any, weights: dict[str, torch.Tensor], pushes: int, memcpy: Way, generator: Any
) -> None:
    engine.update_weights_from_tensor(weights.items())
    for _ in range(pushes):
        if name == DELTA:
            change_some(weights, generator)
        found.seconds[MEMCPY].append(timed(memcpy.push))
        result: list[Any] = []

        def push() -> None:
            result.append(engine.update_weights_from_tensor(weights.items(), verify=name not in (ONE_FAST, TWO_FAST)))  # noqa: B023

        found.seconds[name].append(timed(push))
        found.sent[name] = result[0].sent_bytes


def in_a_row(mesh: Any, folder: Path, weights: dict[str, torch.Tensor], updates: int) -> Json:
    """Many updates without pause: seconds of each, and what trainer and server hold after some and after all.

    The extra memory is what the trainer maps beyond its weights, which live in the arena.
    """
    from verl_server import VerlEngine

    size = sum(tensor.nbytes for tensor in weights.values())
    before = psutil.Process().memory_info().rss
    with VerlEngine(mesh, model_path=str(folder), tp_size=1, **SERVER) as engine:
        places = engine.staging_tensors()
        kept = {name: places[name] for name in weights}
        for name, tensor in weights.items():
            kept[name].copy_(tensor)
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        seconds, early = [], {}
        for number in range(updates):
            seconds.append(timed(lambda: engine.update_weights_from_tensor(kept.items())))
            if number + 1 == WARM_UPDATES:
                early = footprint(processes)
        late = footprint(processes)
        grown = psutil.Process().memory_info().rss - before
    tenth = max(updates // 10, 1)
    return {
        "updates": updates,
        "seconds": [round(one, 5) for one in seconds],
        "first": summarize(seconds[WARM_UPDATES : WARM_UPDATES + tenth]).median,
        "last": summarize(seconds[-tenth:]).median,
        "early": early,
        "late": late,
        "trainer_grew_bytes": grown,
        "extra_share": grown / size - 1,
    }


def footprint(processes: Sequence[psutil.Process]) -> Json:
    """Open files, and resident memory that is not shared, of all these processes."""
    return {
        "files": sum(one.num_fds() for one in processes),
        "private_bytes": sum(one.memory_info().rss - one.memory_info().shared for one in processes),
        "shared_memory_files": len(os.listdir("/dev/shm")),
    }


def targets_of(found: Found) -> list[Target]:
    """The promises."""
    median: Callable[[str], float] = lambda way: summarize(found.seconds[way]).median  # noqa: E731
    row = found.row
    return [
        Target("broadcast to 2 servers over 1", median(TWO) / median(ONE), TWO_TARGET, False),
        Target("broadcast to 2 servers over 1, not verified", median(TWO_FAST) / median(ONE_FAST), TWO_TARGET, False),
        Target("changes of 1 %: bytes sent over all", found.sent[DELTA] / found.bytes, DELTA_TARGET, False),
        Target("trainer's memory beyond one copy of the weights", row["extra_share"], EXTRA_TARGET, False),
        Target(f"{row['updates']} updates: the last over the first", row["last"] / row["first"], 1.1, False),
        Target(f"{row['updates']} updates: open files grown", row["late"]["files"] - row["early"]["files"], 0, False),
    ]


def report(options: Options, machine: Json, found: Found, settings: Json) -> None:
    """Print a table and the targets, write the files."""
    memcpy = summarize(found.seconds[MEMCPY]).median
    rows = []
    for way, seconds in found.seconds.items():
        one = summarize(seconds)
        rows.append([
            way,
            f"{one.median * 1e3:.0f} ({one.q1 * 1e3:.0f} to {one.q3 * 1e3:.0f})",
            f"{found.bytes / one.median / 1e9:.2f}",
            f"{one.median / memcpy:.1f}",
            f"{found.sent[way] / 1e6:.1f}" if way in found.sent else "",
        ])  # fmt: skip
    show_table(
        f"{found.model}: {found.bytes / 1e6:.0f} MB",
        ["way", "ms (quartiles)", "GB/s", "of one memcpy", "MB sent"],
        rows,
    )
    row = found.row
    CONSOLE.print(f"{row['updates']} updates from the arena: early {row['early']}, late {row['late']}")
    targets = targets_of(found)
    show_targets(targets)
    write_result(
        options, NAME, machine,
        settings={**settings, "server_args": SERVER, "changed": CHANGED},
        figures={way: asdict(summarize(seconds)) for way, seconds in found.seconds.items()},
        targets=targets,
        samples=asdict(found),
    )  # fmt: skip
    title = f"Weights into running servers, {found.model}, bfloat16, {machine['cores']} cores"
    figure, (seconds_axes, row_axes) = new_figure(2, title, width=10)
    grouped_bars(
        seconds_axes,
        [found.model],
        {way: [summarize(seconds)] for way, seconds in found.seconds.items()},
        title="Seconds of one update (median; whiskers: quartiles)",
        ylabel="seconds",
    )
    row_axes.plot(range(1, row["updates"] + 1), row["seconds"], ".", markersize=2)
    row_axes.set(title=f"{row['updates']} updates in a row from the arena", xlabel="update", ylabel="seconds", ylim=0)
    legend_below(figure, seconds_axes)
    save_figure(figure, options.png)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, metavar="N", help="blocks of all ways (default 4, quick 1)")


def main() -> None:
    options = parse_options(NAME, "Weights into servers that run already.", _more_options)
    models = QUICK_MODELS if options.quick else {"0.5 B": MODELS["0.5 B"]}
    ((model, sizes),) = models.items()
    blocks = options.extra.rounds or (1 if options.quick else 4)
    pushes, updates = (2, 40) if options.quick else (5, 500)
    machine = environment()
    with model_folder(sizes) as folder:
        found = measure(model, folder, blocks, pushes, updates)
    report(options, machine, found, {"blocks": blocks, "pushes": pushes})


if __name__ == "__main__":
    main()
