"""Measures weight updates of servers that already run: broadcast, delta, a file on disk; and 500 consecutive updates.

Two servers on this machine stand for two servers on another machine: a broadcast sends the bytes to a machine once,
independent of the number of its servers. Each method runs in blocks, because a server is connected to one trainer at a
time. The first update of a block opens the connections and is not measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from bench_weight_sync import model_folder, weights_of
from common import (
    CONSOLE,
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
from servers import ProcessLeakCheck, one_rank_mesh, two_servers
from weight_sync_report import SERVER
from weight_update_methods import MEMCPY, MODELS, QUICK_MODELS, UpdateMethod, memcpy_method, timed

from verl_server.types import Json

NAME = "bench_transports"
ONE, TWO, DELTA, DISK = "broadcast, 1 server", "broadcast, 2 servers", "delta of 1 % of the elements", "file on disk"
ONE_FAST, TWO_FAST = "broadcast, 1 server, not verified", "broadcast, 2 servers, not verified"
ONE_BUCKETS, TWO_BUCKETS = "broadcast to buckets, 1 server", "broadcast to buckets, 2 servers"
METHODS = (ONE, TWO, ONE_FAST, TWO_FAST, ONE_BUCKETS, TWO_BUCKETS, DELTA, DISK)
CHANGED_FRACTION = 0.01
TWO_TARGET, DELTA_TARGET, EXTRA_TARGET = 1.2, 0.05, 0.05
WARMUP_UPDATES = 20


@dataclass
class Measurements:
    """The measurements of one model."""

    model: str
    bytes: int
    """Bytes of the weights."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each update, by method."""
    sent_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that the last update sent, by method."""
    consecutive_updates: Json = field(default_factory=dict)
    """Result of `measure_consecutive_updates`."""


def engine_to(mesh: Any, servers: Sequence[Any], folder: Path, transport: str, scratch: Path) -> Any:
    """An engine for servers that it did not start."""
    from verl_server import VerlEngine
    from verl_server.config import RemoteServer, WeightsConfig

    remotes = [
        RemoteServer(server.base_url, server.server_args["api_key"], server.server_args["admin_api_key"])
        for server in servers
    ]
    config = WeightsConfig(transport=transport, folder=scratch)
    return VerlEngine(mesh, servers=remotes, model_path=str(folder), dtype=SERVER["dtype"], weights=config)


def change_some(weights: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """Change one element in a hundred, as an optimizer step in low precision does."""
    for tensor in weights.values():
        flat = tensor.view(-1)
        indices = torch.randint(flat.numel(), (int(CHANGED_FRACTION * flat.numel()),), generator=generator)
        flat[indices] += 0.25


def measure(model: str, folder: Path, blocks: int, updates_per_block: int, updates: int) -> Measurements:
    """Measure all methods in blocks, then consecutive updates from parameters in the arena."""
    weights = weights_of(folder)
    size = sum(tensor.nbytes for tensor in weights.values())
    measurements = Measurements(model, size, {name: [] for name in (MEMCPY, *METHODS)})
    generator = torch.Generator().manual_seed(0)
    memcpy = memcpy_method(size)
    leak_check = ProcessLeakCheck()
    with one_rank_mesh() as mesh, two_servers(folder, SERVER) as servers:
        torch.set_num_threads(cores())
        leak_check.record()
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
                    _run_block(measurements, name, engine, weights, updates_per_block, memcpy, generator)
            CONSOLE.print(f"block {number + 1} of {blocks}: done", style="dim")
    leak_check.check()
    with one_rank_mesh() as mesh:
        measurements.consecutive_updates = measure_consecutive_updates(mesh, folder, weights, updates)
    return measurements


def _run_block(
    measurements: Measurements,
    name: str,
    engine: Any,
    weights: dict[str, torch.Tensor],
    updates_per_block: int,
    memcpy: UpdateMethod,
    generator: Any,
) -> None:
    engine.update_weights_from_tensor(weights.items())
    for _ in range(updates_per_block):
        if name == DELTA:
            change_some(weights, generator)
        measurements.seconds[MEMCPY].append(timed(memcpy.update))
        result: list[Any] = []

        def update() -> None:
            result.append(engine.update_weights_from_tensor(weights.items(), verify=name not in (ONE_FAST, TWO_FAST)))  # noqa: B023

        measurements.seconds[name].append(timed(update))
        measurements.sent_bytes[name] = result[0].sent_bytes


def measure_consecutive_updates(mesh: Any, folder: Path, weights: dict[str, torch.Tensor], updates: int) -> Json:
    """Run many updates without a break; measure their seconds and the resources of trainer and server.

    Resources are measured after `WARMUP_UPDATES` updates and after the last. `extra_memory_fraction` is the memory of
    the trainer beyond one copy of the weights, which are in the arena, divided by the size of the weights.
    """
    from verl_server import VerlEngine

    size = sum(tensor.nbytes for tensor in weights.values())
    before = psutil.Process().memory_info().rss
    with VerlEngine(mesh, model_path=str(folder), tp_size=1, **SERVER) as engine:
        staging = engine.staging_tensors()
        in_arena = {name: staging[name] for name in weights}
        for name, tensor in weights.items():
            in_arena[name].copy_(tensor)
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        seconds, after_warmup = [], {}
        for number in range(updates):
            seconds.append(timed(lambda: engine.update_weights_from_tensor(in_arena.items())))
            if number + 1 == WARMUP_UPDATES:
                after_warmup = measure_resources(processes)
        after_last = measure_resources(processes)
        grown = psutil.Process().memory_info().rss - before
    tenth = max(updates // 10, 1)
    return {
        "updates": updates,
        "seconds": [round(duration, 5) for duration in seconds],
        "first_median_s": summarize(seconds[WARMUP_UPDATES : WARMUP_UPDATES + tenth]).median,
        "last_median_s": summarize(seconds[-tenth:]).median,
        "after_warmup": after_warmup,
        "after_last": after_last,
        "trainer_growth_bytes": grown,
        "extra_memory_fraction": grown / size - 1,
    }


def measure_resources(processes: Sequence[psutil.Process]) -> Json:
    """Open files and private resident memory of all `processes`, and the number of files in /dev/shm."""
    return {
        "open_files": sum(process.num_fds() for process in processes),
        "private_bytes": sum(process.memory_info().rss - process.memory_info().shared for process in processes),
        "shared_memory_files": len(os.listdir("/dev/shm")),
    }


def targets_of(measurements: Measurements) -> list[Target]:
    """The targets and their measured values."""
    median: Callable[[str], float] = lambda method: summarize(measurements.seconds[method]).median  # noqa: E731
    consecutive = measurements.consecutive_updates
    return [
        Target("broadcast: duration with 2 servers over 1", median(TWO) / median(ONE), TWO_TARGET, False),
        Target(
            "broadcast, not verified: duration with 2 servers over 1",
            median(TWO_FAST) / median(ONE_FAST),
            TWO_TARGET,
            False,
        ),
        Target(
            "delta of 1 % of the elements: sent bytes over all bytes",
            measurements.sent_bytes[DELTA] / measurements.bytes,
            DELTA_TARGET,
            False,
        ),
        Target(
            "memory of the trainer beyond one copy of the weights",
            consecutive["extra_memory_fraction"],
            EXTRA_TARGET,
            False,
        ),
        Target(
            f"{consecutive['updates']} consecutive updates: duration of the last over the first",
            consecutive["last_median_s"] / consecutive["first_median_s"],
            1.1,
            False,
        ),
        Target(
            f"{consecutive['updates']} consecutive updates: growth of open files",
            consecutive["after_last"]["open_files"] - consecutive["after_warmup"]["open_files"],
            0,
            False,
        ),
    ]


def report(options: Options, machine: Json, measurements: Measurements, settings: Json) -> None:
    """Print a table and the targets, and write the result files."""
    memcpy = summarize(measurements.seconds[MEMCPY]).median
    rows = []
    for method, seconds in measurements.seconds.items():
        summary = summarize(seconds)
        rows.append([
            method,
            f"{summary.median * 1e3:.0f} ({summary.q1 * 1e3:.0f} to {summary.q3 * 1e3:.0f})",
            f"{measurements.bytes / summary.median / 1e9:.2f}",
            f"{summary.median / memcpy:.1f}",
            f"{measurements.sent_bytes[method] / 1e6:.1f}" if method in measurements.sent_bytes else "",
        ])  # fmt: skip
    show_table(
        f"{measurements.model}: {measurements.bytes / 1e6:.0f} MB",
        ["method", "ms (quartiles)", "GB/s", "ratio to one memcpy", "MB sent"],
        rows,
    )
    consecutive = measurements.consecutive_updates
    CONSOLE.print(
        f"{consecutive['updates']} updates from the arena: after {WARMUP_UPDATES}: {consecutive['after_warmup']}; "
        f"after the last: {consecutive['after_last']}"
    )
    targets = targets_of(measurements)
    show_targets(targets)
    write_result(
        options, NAME, machine,
        settings={**settings, "server_args": SERVER, "changed_fraction": CHANGED_FRACTION},
        figures={method: asdict(summarize(seconds)) for method, seconds in measurements.seconds.items()},
        targets=targets,
        samples=asdict(measurements),
    )  # fmt: skip
    plot(options, machine, measurements)


def plot(options: Options, machine: Json, measurements: Measurements) -> None:
    """Plot the seconds by method, and the seconds of the consecutive updates."""
    consecutive = measurements.consecutive_updates
    title = f"Weight updates of running servers, {measurements.model}, bfloat16, {machine['cores']} cores"
    figure, (seconds_axes, consecutive_axes) = new_figure(2, title, width=10)
    grouped_bars(
        seconds_axes,
        [measurements.model],
        {method: [summarize(seconds)] for method, seconds in measurements.seconds.items()},
        title="Seconds of one update (median; whiskers: quartiles)",
        ylabel="seconds",
    )
    consecutive_axes.plot(range(1, consecutive["updates"] + 1), consecutive["seconds"], ".", markersize=2)
    consecutive_axes.set(
        title=f"{consecutive['updates']} consecutive updates from the arena", xlabel="update", ylabel="seconds", ylim=0
    )
    legend_below(figure, seconds_axes)
    save_figure(figure, options.png)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="number of blocks per method (default 4, with --quick 1)"
    )


def main() -> None:
    options = parse_options(
        NAME, "Measure weight updates of servers that already run, for each transport.", _more_options
    )
    models = QUICK_MODELS if options.quick else {"0.5 B": MODELS["0.5 B"]}
    ((model, sizes),) = models.items()
    blocks = options.extra.rounds or (1 if options.quick else 4)
    updates_per_block, updates = (2, 40) if options.quick else (5, 500)
    machine = environment()
    with model_folder(sizes) as folder:
        measurements = measure(model, folder, blocks, updates_per_block, updates)
    report(options, machine, measurements, {"blocks": blocks, "updates_per_block": updates_per_block})


if __name__ == "__main__":
    main()
