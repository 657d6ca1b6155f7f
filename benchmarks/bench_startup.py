"""Measures the seconds from the start of a server until it is ready: supervised launch against the bare engine.

All methods use the same server arguments and alternate; the order changes in each round, so that the page cache and
drift favour none. One start of each before the first round is not measured. A bare server is ready at the first
`GET /ready` (SGLang) or `GET /health` (vLLM) with status 200, polled every 50 or 200 ms; a server of this library when
the constructor of its adapter returns. The import of this library in the trainer is not measured.

The launch starts a new program each time, without the forkserver. The forked launch is what a second server of the same
trainer costs: the forkserver runs already.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import (
    CONSOLE,
    Options,
    Summary,
    Target,
    environment,
    named_after,
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
from verl_server.conformance.other_processes import find_vllm_python
from verl_server.types import Json

NAME = "bench_startup"
RATIO_TARGET = 1.15
OURS, FORKED = "launch", "forked launch"
ENGINES = ("sglang", "vllm")
TITLES = {"sglang": "SGLang", "vllm": "vLLM"}
SETTINGS: dict[str, Json] = {
    "sglang": {"dtype": "float32", "max_total_tokens": 8192},
    "vllm": {"dtype": "float32", "context_length": 2048, "max_running_requests": 4},
}
VLLM_OPTIONS: Json = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 4}
"""The same arguments for a bare vLLM server."""

Methods = dict[str, Callable[[], AbstractContextManager[Any]]]
"""What starts a server, by the name of the method. In the body of the context the server is ready."""


def bare_name(engine: str) -> str:
    return f"bare {TITLES[engine]}"


def seconds_until_ready(start: Callable[[], AbstractContextManager[Any]]) -> float:
    """Start a server, end it, and return the seconds until it was ready."""
    leak_check = ProcessLeakCheck()
    started = time.perf_counter()
    with start():
        seconds = time.perf_counter() - started
        leak_check.record()
    leak_check.check()
    return seconds


@contextmanager
def bare_sglang(model: Path) -> Iterator[None]:
    """A bare SGLang server that is ready."""
    with BareServer({"model_path": str(model), **SETTINGS["sglang"]}) as server:
        server.wait_ready()
        yield


def sglang_methods(model: Path) -> Methods:
    return {bare_name("sglang"): lambda: bare_sglang(model), **our_methods("sglang", model, None)}


def vllm_methods(model: Path, python: Path) -> Methods:
    """The bare server has the plugin of the conformance suite."""
    from verl_server.conformance.systems.vllm import VllmProcess

    bare = {bare_name("vllm"): lambda: closing(VllmProcess(python, model, VLLM_OPTIONS))}
    return {**bare, **our_methods("vllm", model, python)}


def our_methods(engine: str, model: Path, python: Path | None) -> Methods:
    def start(use_forkserver: bool) -> HttpServerEngineAdapter:
        config = AdapterConfig(engine_kind=engine, server_python=python, use_forkserver=use_forkserver)
        return HttpServerEngineAdapter(config=config, model_path=str(model), **SETTINGS[engine])

    return {OURS: lambda: start(use_forkserver=False), FORKED: lambda: start(use_forkserver=True)}


def measure(methods: Methods, rounds: int, warm_up: bool) -> dict[str, list[float]]:
    """Start each method once per round. Returns the seconds until ready, by method."""
    if warm_up:
        for name, start in methods.items():
            CONSOLE.print(f"not measured: {name}: {seconds_until_ready(start):.1f} s", style="dim")
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(rounds):
        for name, start in list(methods.items())[:: -1 if number % 2 else 1]:
            samples[name].append(seconds_until_ready(start))
            CONSOLE.print(f"round {number + 1} of {rounds}, {name}: {samples[name][-1]:.2f} s", style="dim")
    return samples


def plot(
    options: Options, machine: Json, engine: str, summaries: dict[str, Summary], samples: dict[str, list[float]]
) -> None:
    """Plot one bar per method and one dot per start."""
    title = f"Seconds until ready, {machine['cores']} cores, {TITLES[engine]} {machine['versions'].get(engine)}"
    figure, (axis,) = new_figure(1, title, width=5.5)
    series: dict[str, list[Any]] = {name: [summary] for name, summary in summaries.items()}
    limit = summaries[bare_name(engine)].median * RATIO_TARGET
    grouped_bars(
        axis,
        [""],
        series,
        title="median; whiskers: quartiles; dots: single starts",
        ylabel="seconds",
        limit=(limit, f"target: {RATIO_TARGET:g} x bare"),
        colours={bare_name(engine): "#b8b8b8", OURS: "#0072b2", FORKED: "#56b4e9"},
    )
    for x, values in zip((-0.19, 0.08, 0.35), samples.values(), strict=True):  # beside the whisker
        axis.plot([x] * len(values), values, "o", color="#222222", markersize=3, alpha=0.7)
    legend_below(figure, axis)
    save_figure(figure, options.png)


def report(options: Options, machine: Json, engine: str, samples: dict[str, list[float]]) -> None:
    """Print the table and the target, and write the result files."""
    summaries = {name: summarize(values) for name, values in samples.items()}
    ratio = summaries[OURS].median / summaries[bare_name(engine)].median
    rows = [[name, f"{s.median:.2f}", f"{s.q1:.2f} to {s.q3:.2f}", str(s.count)] for name, s in summaries.items()]
    show_table("Seconds until ready", ["method", "seconds", "quartiles", "starts"], rows)
    targets = [Target(f"start-up over {bare_name(engine)}", ratio, RATIO_TARGET, at_least=False)]
    show_targets(targets)
    write_result(
        options,
        NAME if engine == "sglang" else f"{NAME} --engine {engine}",
        machine,
        settings={"server_args": SETTINGS[engine], "rounds": summaries[OURS].count},
        figures={**{name: asdict(summary) for name, summary in summaries.items()}, "ratio_of_medians": ratio},
        targets=targets,
        samples={name: [round(value, 4) for value in values] for name, values in samples.items()},
    )
    plot(options, machine, engine, summaries, samples)


def _more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="number of starts per method (default 5, with --quick 1)"
    )
    parser.add_argument("--engine", choices=ENGINES, default="sglang", help="engine of the server")


def main() -> None:
    options = parse_options(
        NAME, "Measure the seconds until a server is ready, against the bare engine.", _more_options
    )
    engine: str = options.extra.engine
    vllm = find_vllm_python(None) if engine == "vllm" else None
    rounds = options.extra.rounds or (1 if options.quick else 5)
    machine = environment()
    if vllm is not None:
        machine["versions"]["vllm"] = vllm.version
    with tiny_model() as model:
        methods = sglang_methods(model) if vllm is None else vllm_methods(model, vllm.path)
        samples = measure(methods, rounds, warm_up=not options.quick)
    if engine != "sglang":
        options = named_after(options, NAME, f"{NAME}_{engine}")
    report(options, machine, engine, samples)


if __name__ == "__main__":
    main()
