"""What our supervised launch adds to the start of a server: seconds to ready, against a bare SGLang.

The same server arguments both ways, in turns (who is first changes each round, so that page cache and
drift favour nobody), after one start that is not counted. Ready is the first `GET /ready` that answers
200, asked every 50 ms: the launch does that itself and the constructor returns then; the benchmark does it
for `python -m sglang.launch_server`. Importing this library in the trainer is not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from common import (
    CONSOLE,
    Json,
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
from servers import BareServer, Watch, tiny_model

from verl_server.adapter import HttpServerEngineAdapter

NAME = "bench_startup"
RATIO_TARGET = 1.15
BARE, OURS = "bare SGLang", "verl_server launch"
SETTINGS: Json = {"dtype": "float32", "max_total_tokens": 8192}


def start_bare(server_args: Json) -> float:
    """Seconds to ready of a bare server, which is then ended."""
    watch = Watch()
    started = time.perf_counter()
    with BareServer(server_args) as server:
        server.wait_ready()
        seconds = time.perf_counter() - started
        watch.note()
    watch.check()
    return seconds


def start_ours(server_args: Json) -> float:
    """Seconds until the adapter's constructor returns with a ready server, which is then ended."""
    watch = Watch()
    started = time.perf_counter()
    with HttpServerEngineAdapter(**server_args):
        seconds = time.perf_counter() - started
        watch.note()
    watch.check()
    return seconds


def measure(server_args: Json, rounds: int, warm_up: bool) -> dict[str, list[float]]:
    """Seconds to ready, by way; one start of each way in each round."""
    ways: list[tuple[str, Callable[[Json], float]]] = [(BARE, start_bare), (OURS, start_ours)]
    if warm_up:
        CONSOLE.print(f"not counted: {start_bare(server_args):.1f} s", style="dim")
    samples: dict[str, list[float]] = {name: [] for name, _ in ways}
    for number in range(rounds):
        for name, start in ways[:: -1 if number % 2 else 1]:
            samples[name].append(start(server_args))
            CONSOLE.print(f"round {number + 1} of {rounds}, {name}: {samples[name][-1]:.2f} s", style="dim")
    return samples


def plot(options: Options, machine: Json, found: dict[str, Summary], samples: dict[str, list[float]]) -> None:
    """Two bars, and every single start as a dot."""
    title = f"Start to ready, {machine['cores']} cores, SGLang {machine['versions'].get('sglang')}"
    figure, (axis,) = new_figure(1, title, width=5.5)
    series: dict[str, list[Any]] = {name: [summary] for name, summary in found.items()}
    limit = found[BARE].median * RATIO_TARGET
    grouped_bars(
        axis,
        [""],
        series,
        title="median; whiskers: quartiles; dots: single starts",
        ylabel="seconds",
        limit=(limit, f"target: {RATIO_TARGET:g} x bare"),
        colours={BARE: "#b8b8b8", OURS: "#0072b2"},
    )
    for place, values in zip((-0.12, 0.30), samples.values(), strict=True):  # beside the whisker
        axis.plot([place] * len(values), values, "o", color="#222222", markersize=3, alpha=0.7)
    legend_below(figure, axis)
    save_figure(figure, options.png)


def report(options: Options, machine: Json, samples: dict[str, list[float]]) -> None:
    """Print the table and the target, write the files."""
    found = {name: summarize(values) for name, values in samples.items()}
    ratio = found[OURS].median / found[BARE].median
    rows = [[name, f"{s.median:.2f}", f"{s.q1:.2f} to {s.q3:.2f}", str(s.count)] for name, s in found.items()]
    show_table("Start to ready", ["way", "seconds", "quartiles", "starts"], rows)
    targets = [Target("start-up over bare SGLang", ratio, RATIO_TARGET, at_least=False)]
    show_targets(targets)
    write_result(
        options,
        NAME,
        machine,
        settings={"server_args": SETTINGS, "poll_s": 0.05, "rounds": found[OURS].count},
        figures={**{name: asdict(summary) for name, summary in found.items()}, "ratio_of_medians": ratio},
        targets=targets,
        samples={name: [round(value, 4) for value in values] for name, values in samples.items()},
    )
    plot(options, machine, found, samples)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, metavar="N", help="starts of each way (default 5, quick 1)")


def main() -> None:
    options = parse_options(NAME, "Seconds to ready, against a bare SGLang.", _more_options)
    rounds = options.extra.rounds or (1 if options.quick else 5)
    machine = environment()
    with tiny_model() as model:
        samples = measure({"model_path": str(model), **SETTINGS}, rounds, warm_up=not options.quick)
    report(options, machine, samples)


if __name__ == "__main__":
    main()
