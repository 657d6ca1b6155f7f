"""Measures the seconds from the start of a server until it is ready: supervised launch against bare SGLang.

Both methods use the same server arguments and alternate; the order changes in each round, so that the page cache and
drift favour neither. One start before the first round is not measured. A server is ready at the first `GET /ready` with
status 200, polled every 50 ms: the launch polls itself, and the constructor returns then; the benchmark polls for
`python -m sglang.launch_server`. The import of this library in the trainer is not measured.
The launch starts a new program each time. The forkserver, which makes the second server of a process start faster, is
switched off.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from common import (
    CONSOLE,
    Options,
    Summary,
    Target,
    environment,
    parse_options,
    show_table,
    show_targets,
    summarize,
    write_result,
)
from plots import grouped_bars, legend_below, new_figure, save_figure
from servers import BareServer, ProcessLeakCheck, tiny_model

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import AdapterConfig
from verl_server.types import Json

NAME = "bench_startup"
RATIO_TARGET = 1.15
BARE, OURS = "bare SGLang", "verl_server launch"
SETTINGS: Json = {"dtype": "float32", "max_total_tokens": 8192}


def start_bare(server_args: Json) -> float:
    """Start a bare server, end it, and return the seconds until it was ready."""
    leak_check = ProcessLeakCheck()
    started = time.perf_counter()
    with BareServer(server_args) as server:
        server.wait_ready()
        seconds = time.perf_counter() - started
        leak_check.record()
    leak_check.check()
    return seconds


def start_ours(server_args: Json) -> float:
    """Start a server with the adapter, end it, and return the seconds until the constructor returned."""
    leak_check = ProcessLeakCheck()
    started = time.perf_counter()
    with HttpServerEngineAdapter(config=AdapterConfig(use_forkserver=False), **server_args):
        seconds = time.perf_counter() - started
        leak_check.record()
    leak_check.check()
    return seconds


def measure(server_args: Json, rounds: int, warm_up: bool) -> dict[str, list[float]]:
    """Start each method once per round. Returns the seconds until ready, by method."""
    methods: list[tuple[str, Callable[[Json], float]]] = [(BARE, start_bare), (OURS, start_ours)]
    if warm_up:
        CONSOLE.print(f"not measured: {start_bare(server_args):.1f} s", style="dim")
    samples: dict[str, list[float]] = {name: [] for name, _ in methods}
    for number in range(rounds):
        for name, start in methods[:: -1 if number % 2 else 1]:
            samples[name].append(start(server_args))
            CONSOLE.print(f"round {number + 1} of {rounds}, {name}: {samples[name][-1]:.2f} s", style="dim")
    return samples


def plot(options: Options, machine: Json, summaries: dict[str, Summary], samples: dict[str, list[float]]) -> None:
    """Plot one bar per method and one dot per start."""
    title = f"Seconds until ready, {machine['cores']} cores, SGLang {machine['versions'].get('sglang')}"
    figure, (axis,) = new_figure(1, title, width=5.5)
    series: dict[str, list[Any]] = {name: [summary] for name, summary in summaries.items()}
    limit = summaries[BARE].median * RATIO_TARGET
    grouped_bars(
        axis,
        [""],
        series,
        title="median; whiskers: quartiles; dots: single starts",
        ylabel="seconds",
        limit=(limit, f"target: {RATIO_TARGET:g} x bare"),
        colours={BARE: "#b8b8b8", OURS: "#0072b2"},
    )
    for x, values in zip((-0.12, 0.30), samples.values(), strict=True):  # beside the whisker
        axis.plot([x] * len(values), values, "o", color="#222222", markersize=3, alpha=0.7)
    legend_below(figure, axis)
    save_figure(figure, options.png)


def report(options: Options, machine: Json, samples: dict[str, list[float]]) -> None:
    """Print the table and the target, and write the result files."""
    summaries = {name: summarize(values) for name, values in samples.items()}
    ratio = summaries[OURS].median / summaries[BARE].median
    rows = [[name, f"{s.median:.2f}", f"{s.q1:.2f} to {s.q3:.2f}", str(s.count)] for name, s in summaries.items()]
    show_table("Seconds until ready", ["method", "seconds", "quartiles", "starts"], rows)
    targets = [Target("start-up over bare SGLang", ratio, RATIO_TARGET, at_least=False)]
    show_targets(targets)
    write_result(
        options,
        NAME,
        machine,
        settings={"server_args": SETTINGS, "poll_s": 0.05, "rounds": summaries[OURS].count},
        figures={**{name: asdict(summary) for name, summary in summaries.items()}, "ratio_of_medians": ratio},
        targets=targets,
        samples={name: [round(value, 4) for value in values] for name, values in samples.items()},
    )
    plot(options, machine, summaries, samples)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="number of starts per method (default 5, with --quick 1)"
    )


def main() -> None:
    options = parse_options(NAME, "Measure the seconds until a server is ready, against bare SGLang.", _more_options)
    rounds = options.extra.rounds or (1 if options.quick else 5)
    machine = environment()
    with tiny_model() as model:
        samples = measure({"model_path": str(model), **SETTINGS}, rounds, warm_up=not options.quick)
    report(options, machine, samples)


if __name__ == "__main__":
    main()
