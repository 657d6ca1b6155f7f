"""Computes the figures, targets, tables and plot of `bench_generate` from its rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common import Options, Summary, Target, show_table, summarize
from generate_clients import NEW_TOKENS, GenerateClient
from load import Round
from plots import COLOURS, grouped_bars, legend_below, new_figure, save_figure

from verl_server.types import Json

RATIO_TARGET, ADDED_TARGET_MS = 0.95, 1.0
#: The rounds, by client and number of requests in flight.
Samples = dict[tuple[str, int], list[Round]]


@dataclass(frozen=True)
class Figures:
    """Medians and quartiles of one client with one number of requests in flight."""

    throughput: Summary
    """Requests per second."""
    latency_ms: Summary
    """Latency over all requests of all rounds."""
    cpu_ms: Summary
    """CPU time of the client process per request."""
    client_ms: Summary
    """Latency without the time of the server itself, over all requests of all rounds."""
    baseline: str | None = None
    """Name of the raw client with which the client is compared: the fastest of its `baselines`."""
    ratio: Summary | None = None
    """Throughput divided by that of the baseline in the same round."""
    added_ms: Summary | None = None
    """Median of `client_ms` minus that of the baseline in the same round."""


def figures_of(clients: tuple[GenerateClient, ...], samples: Samples, level: int) -> dict[str, Figures]:
    """The figures of every client with `level` requests in flight, by name."""
    speed = {client.name: summarize([r.throughput for r in samples[client.name, level]]) for client in clients}
    figures = {}
    for client in clients:
        rounds = samples[client.name, level]
        plain = Figures(
            throughput=speed[client.name],
            latency_ms=summarize([ms for r in rounds for ms in r.latencies_ms]),
            cpu_ms=summarize([r.cpu_ms for r in rounds]),
            client_ms=summarize([ms for r in rounds for ms in r.client_ms]),
        )
        figures[client.name] = (
            plain if not client.baselines else _compared(plain, rounds, client, samples, speed, level)
        )
    return figures


def _compared(
    plain: Figures, rounds: list[Round], client: GenerateClient, samples: Samples, speed: dict[str, Summary], level: int
) -> Figures:
    baseline = max(client.baselines, key=lambda name: speed[name].median)
    pairs = list(zip(rounds, samples[baseline, level], strict=True))
    return Figures(
        throughput=plain.throughput,
        latency_ms=plain.latency_ms,
        cpu_ms=plain.cpu_ms,
        client_ms=plain.client_ms,
        baseline=baseline,
        ratio=summarize([ours.throughput / raw.throughput for ours, raw in pairs]),
        added_ms=summarize([_client_ms(ours) - _client_ms(raw) for ours, raw in pairs]),
    )


def _client_ms(measured: Round) -> float:
    return summarize(measured.client_ms).median


def targets_of(figures: dict[int, dict[str, Figures]]) -> list[Target]:
    """Two targets for each client of this library and each number of requests in flight."""
    targets = []
    for level, clients in figures.items():
        for name, figure in clients.items():
            if figure.ratio is None or figure.added_ms is None:
                continue
            where = f"{name}, {level} in flight"
            targets.append(
                Target(f"{where}: throughput over {figure.baseline}", figure.ratio.median, RATIO_TARGET, True)
            )
            targets.append(Target(f"{where}: added latency", figure.added_ms.median, ADDED_TARGET_MS, False, " ms"))
    return targets


def show(figures: dict[int, dict[str, Figures]]) -> None:
    """Print one table for each number of requests in flight."""
    columns = [
        "client",
        "requests/s",
        "latency ms (quartiles)",
        "client ms",
        "client CPU ms",
        "ratio to raw (quartiles)",
        "added ms",
    ]
    for level, clients in figures.items():
        rows = [_row(name, figure) for name, figure in clients.items()]
        show_table(f"{level} in flight", columns, rows)


def _row(name: str, figure: Figures) -> list[str]:
    wait = figure.latency_ms
    row = [
        name,
        f"{figure.throughput.median:.1f}",
        f"{wait.median:.2f} ({wait.q1:.2f} to {wait.q3:.2f})",
        f"{figure.client_ms.median:.2f}",
        f"{figure.cpu_ms.median:.3f}",
    ]
    if figure.ratio is None or figure.added_ms is None:
        return [*row, "", ""]
    ratio = figure.ratio
    return [*row, f"{ratio.median:.3f} ({ratio.q1:.3f} to {ratio.q3:.3f})", f"{figure.added_ms.median:+.2f}"]


def plot(options: Options, machine: Json, figures: dict[int, dict[str, Figures]]) -> None:
    """Plot throughput, its ratio to the raw client, and CPU time of the client, by number of requests in flight."""
    groups = [f"{level} in flight" for level in figures]
    names = list(next(iter(figures.values())))
    title = f"/generate, {NEW_TOKENS} tokens, {machine['cores']} cores, SGLang {machine['versions'].get('sglang')}"
    figure, (speed, ratio, cpu) = new_figure(3, title, height=3.6, width=9.5)
    series: dict[str, list[Any]] = {name: [clients[name] for clients in figures.values()] for name in names}
    grouped_bars(
        speed,
        groups,
        {name: [f.throughput for f in group_figures] for name, group_figures in series.items()},
        title="Throughput (median of the rounds; whiskers: quartiles)",
        ylabel="requests/s",
        digits=0,
    )
    ours = {
        name: [f.ratio for f in group_figures]
        for name, group_figures in series.items()
        if group_figures[0].ratio is not None
    }
    colours = dict(zip(names, COLOURS, strict=False))
    limit = (RATIO_TARGET, f"target {RATIO_TARGET:g}")
    grouped_bars(
        ratio,
        groups,
        ours,
        title="Throughput divided by that of the raw client in the same round",
        ylabel="ratio",
        limit=limit,
        colours=colours,
        digits=3,
    )
    grouped_bars(
        cpu,
        groups,
        {name: [f.cpu_ms for f in group_figures] for name, group_figures in series.items()},
        title="CPU time of the client per request",
        ylabel="ms",
    )
    legend_below(figure, speed, ratio)
    save_figure(figure, options.png)
