"""From the rounds of `bench_generate` to its figures, targets, tables and plot. Nothing is measured here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common import Json, Options, Summary, Target, show_table, summarize
from load import Round
from plots import COLOURS, grouped_bars, legend_below, new_figure, save_figure
from ways import NEW_TOKENS, Way

RATIO_TARGET, ADDED_TARGET_MS = 0.95, 1.0
#: (way, in flight) -> one entry for each round.
Samples = dict[tuple[str, int], list[Round]]


@dataclass(frozen=True)
class Figures:
    """One way at one concurrency: medians and quartiles over the rounds."""

    throughput: Summary
    """Requests per second."""
    latency_ms: Summary
    """Over all requests of all rounds."""
    cpu_ms: Summary
    """Client CPU per request."""
    client_ms: Summary
    """Over all requests of all rounds: the part of the latency that is not the server's own."""
    peer: str | None = None
    """The raw way that it is compared with: of those that are allowed, the faster one."""
    ratio: Summary | None = None
    """Throughput over the peer's in the same round."""
    added_ms: Summary | None = None
    """Median of `client_ms` minus the peer's in the same round."""


def figures_of(ways: tuple[Way, ...], samples: Samples, level: int) -> dict[str, Figures]:
    """The figures of every way at one concurrency, by name."""
    speed = {way.name: summarize([r.throughput for r in samples[way.name, level]]) for way in ways}
    found = {}
    for way in ways:
        rounds = samples[way.name, level]
        plain = Figures(
            throughput=speed[way.name],
            latency_ms=summarize([ms for r in rounds for ms in r.latencies_ms]),
            cpu_ms=summarize([r.cpu_ms for r in rounds]),
            client_ms=summarize([ms for r in rounds for ms in r.client_ms]),
        )
        found[way.name] = plain if not way.peers else _compared(plain, rounds, way, samples, speed, level)
    return found


def _compared(
    plain: Figures, rounds: list[Round], way: Way, samples: Samples, speed: dict[str, Summary], level: int
) -> Figures:
    peer = max(way.peers, key=lambda name: speed[name].median)
    pairs = list(zip(rounds, samples[peer, level], strict=True))
    return Figures(
        throughput=plain.throughput,
        latency_ms=plain.latency_ms,
        cpu_ms=plain.cpu_ms,
        client_ms=plain.client_ms,
        peer=peer,
        ratio=summarize([ours.throughput / raw.throughput for ours, raw in pairs]),
        added_ms=summarize([_client_ms(ours) - _client_ms(raw) for ours, raw in pairs]),
    )


def _client_ms(one: Round) -> float:
    return summarize(one.client_ms).median


def targets_of(figures: dict[int, dict[str, Figures]]) -> list[Target]:
    """Two promises for each of our ways at each concurrency."""
    found = []
    for level, ways in figures.items():
        for name, figure in ways.items():
            if figure.ratio is None or figure.added_ms is None:
                continue
            where = f"{name}, {level} in flight"
            found.append(Target(f"{where}: throughput over {figure.peer}", figure.ratio.median, RATIO_TARGET, True))
            found.append(Target(f"{where}: added latency", figure.added_ms.median, ADDED_TARGET_MS, False, " ms"))
    return found


def show(figures: dict[int, dict[str, Figures]]) -> None:
    """One table for each concurrency."""
    columns = [
        "way",
        "requests/s",
        "latency ms (quartiles)",
        "client ms",
        "client CPU ms",
        "of raw (quartiles)",
        "added ms",
    ]
    for level, ways in figures.items():
        rows = [_row(name, figure) for name, figure in ways.items()]
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
    """Throughput, its ratio to raw, and the client's CPU time, by concurrency."""
    groups = [f"{level} in flight" for level in figures]
    names = list(next(iter(figures.values())))
    title = f"/generate, {NEW_TOKENS} tokens, {machine['cores']} cores, SGLang {machine['versions'].get('sglang')}"
    figure, (speed, ratio, cpu) = new_figure(3, title, height=3.6, width=9.5)
    series: dict[str, list[Any]] = {name: [ways[name] for ways in figures.values()] for name in names}
    grouped_bars(
        speed,
        groups,
        {name: [f.throughput for f in found] for name, found in series.items()},
        title="Throughput (median of the rounds; whiskers: quartiles)",
        ylabel="requests/s",
        digits=0,
    )
    ours = {name: [f.ratio for f in found] for name, found in series.items() if found[0].ratio is not None}
    colours = dict(zip(names, COLOURS, strict=False))
    limit = (RATIO_TARGET, f"target {RATIO_TARGET:g}")
    grouped_bars(
        ratio,
        groups,
        ours,
        title="Throughput over raw HTTP in the same round",
        ylabel="ratio",
        limit=limit,
        colours=colours,
        digits=3,
    )
    grouped_bars(
        cpu,
        groups,
        {name: [f.cpu_ms for f in found] for name, found in series.items()},
        title="CPU time of the client per request",
        ylabel="ms",
    )
    legend_below(figure, speed, ratio)
    save_figure(figure, options.png)
