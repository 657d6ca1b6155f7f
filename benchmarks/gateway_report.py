"""Tables, targets, result file and plot of `bench_gateway.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from common import CONSOLE, Options, Summary, Target, show_table, show_targets, summarize, write_result
from gateway_systems import ENGINE, ENGINE_LOGPROBS, GATEWAY, LITELLM, ROUTER, UPSTREAM
from plots import COLOURS, grouped_bars, legend_below, new_figure, save_figure

from verl_server.types import Json

if TYPE_CHECKING:
    from bench_gateway import Plan

NAME = "bench_gateway"
BASELINES = {"engine": ENGINE, "upstream": UPSTREAM}
SYSTEM_COLOURS = dict(
    zip((ENGINE, ENGINE_LOGPROBS, ROUTER, GATEWAY, LITELLM, UPSTREAM), (*COLOURS[:5], "#bb8844"), strict=True)
)
"""The same colour for a system in all parts."""
MAX_KEPT_LATENCIES = 200
"""Number of latencies of a burst that the result file has: evenly chosen from the sorted latencies."""


def _rates(bursts: Sequence[Json]) -> list[float]:
    return [burst["requests_per_s"] for burst in bursts]


def _medians(bursts: Sequence[Json]) -> list[float]:
    """Median latency of each burst."""
    return [summarize(burst["latencies_ms"]).median for burst in bursts]


def _paired(
    systems: Json, name: str, baseline: str, of: Callable[[Sequence[Json]], list[float]], combine: Callable[..., float]
) -> Summary:
    """A figure of a system combined with that of the baseline in the same round."""
    pairs = zip(of(systems[name]), of(systems[baseline]), strict=True)
    return summarize([combine(one, other) for one, other in pairs])


def ratio(systems: Json, name: str, baseline: str) -> Summary:
    """Requests per second of a system over those of the baseline."""
    return _paired(systems, name, baseline, _rates, lambda one, other: one / other)


def added_ms(systems: Json, name: str, baseline: str) -> Summary:
    """Median latency of a system minus that of the baseline."""
    return _paired(systems, name, baseline, _medians, lambda one, other: one - other)


def by_turn(conversations: Sequence[Sequence[float]]) -> list[float]:
    """Median CPU time of each turn over the conversations."""
    return [summarize(list(values)).median for values in zip(*conversations, strict=True)]


def growth(cpu_ms: Sequence[float]) -> float:
    """Median of the last fifth of the turns over that of the first fifth. The first turn is left out: its prompt has no
    history, and it opens the session."""
    fifth = max(1, len(cpu_ms) // 5)
    return summarize(cpu_ms[-fifth:]).median / summarize(cpu_ms[1 : fifth + 1]).median


def show_systems(part: str, cases: Json) -> None:
    """Print the table of a part."""
    rows = []
    for case, systems in cases.items():
        for name, bursts in systems.items():
            over, added = ratio(systems, name, BASELINES[part]), added_ms(systems, name, BASELINES[part])
            cpu_ms = summarize([burst["cpu_ms"] for burst in bursts]).median
            rows.append([
                f"{case}: {name}", f"{summarize(_rates(bursts)).median:.0f}",
                f"{over.median:.2f} ({over.q1:.2f} to {over.q3:.2f})", f"{summarize(_medians(bursts)).median:.2f}",
                f"{added.median:+.2f}", f"{cpu_ms:.2f}" if cpu_ms else "",
            ])  # fmt: skip
    columns = ["load and system", "requests/s", f"ratio to {BASELINES[part]}", "median ms", "added ms", "CPU ms"]
    show_table(f"Part {part}", columns, rows)


def _name(plan: Plan, in_flight: int) -> str:
    return next(case.name for case in plan.cases if case.in_flight == in_flight)


def make_targets(plan: Plan, samples: Json) -> list[Target]:
    """The targets of the measured parts."""
    targets = list[Target]()
    one, many = plan.in_flight[0], plan.in_flight[-2]
    if "engine" in samples:
        alone, loaded = samples["engine"][_name(plan, one)], samples["engine"][_name(plan, many)]
        for name in (ENGINE, ENGINE_LOGPROBS):
            targets += [
                Target(f"throughput over the {name}, {many} in flight", ratio(loaded, GATEWAY, name).median, 0.9, True),
                Target(f"added to the median latency of the {name}, short, {one} in flight",
                       added_ms(alone, GATEWAY, name).median, 3.0, False, " ms"),
            ]  # fmt: skip
    if "upstream" in samples:
        alone, loaded = samples["upstream"][_name(plan, one)], samples["upstream"][_name(plan, many)]
        added = [
            ours / theirs for ours, theirs in zip(*(_added_of(alone, name) for name in (GATEWAY, LITELLM)), strict=True)
        ]
        targets += [
            Target(f"throughput over LiteLLM's proxy, {many} in flight", ratio(loaded, GATEWAY, LITELLM).median, 20,
                   True),
            Target(f"added latency over that of LiteLLM's proxy, {one} in flight", summarize(added).median, 0.1, False),
        ]  # fmt: skip
    if "turns" in samples:
        targets += [
            Target(f"CPU time of the last turns over the first turns of {plan.turns}, {dialect}",
                   growth(by_turn(conversations)), 1.2, False)
            for dialect, conversations in samples["turns"]["cpu_ms"].items()
        ]  # fmt: skip
    return targets


def _added_of(systems: Json, name: str) -> list[float]:
    return [one - other for one, other in zip(_medians(systems[name]), _medians(systems[UPSTREAM]), strict=True)]


def make_figures(samples: Json) -> Json:
    """Medians and quartiles."""
    figures: Json = {}
    for part in BASELINES.keys() & samples.keys():
        figures[part] = {
            case: {
                name: {
                    "requests_per_s": asdict(summarize(_rates(bursts))),
                    "latency_ms": asdict(summarize(_medians(bursts))),
                    "cpu_ms": asdict(summarize([burst["cpu_ms"] for burst in bursts])),
                }
                for name, bursts in systems.items()
            }
            for case, systems in samples[part].items()
        }
    if "turns" in samples:
        figures["turns"] = {
            dialect: {"cpu_ms_by_turn": [round(ms, 3) for ms in by_turn(found)], "growth": growth(by_turn(found))}
            for dialect, found in samples["turns"]["cpu_ms"].items()
        }
    return figures


def report(options: Options, machine: Json, plan: Plan, samples: Json) -> None:
    """Print the tables and the targets, and write the result file and the plot."""
    for part in BASELINES:
        if part in samples:
            show_systems(part, samples[part])
    if "turns" in samples:
        for dialect, conversations in samples["turns"]["cpu_ms"].items():
            cpu_ms = by_turn(conversations)
            CONSOLE.print(
                f"{dialect}: CPU time of turn 2 {cpu_ms[1]:.2f} ms, of turn {len(cpu_ms)} {cpu_ms[-1]:.2f} ms"
            )
    targets, figures = make_targets(plan, samples), make_figures(samples)
    show_targets(targets)
    _shorten(samples)
    write_result(options, NAME, machine, settings=asdict(plan), figures=figures, targets=targets, samples=samples)
    plot(options, machine, samples, figures)


def _shorten(samples: Json) -> None:
    for part in BASELINES.keys() & samples.keys():
        for systems in samples[part].values():
            for burst in (burst for bursts in systems.values() for burst in bursts):
                latencies = sorted(burst["latencies_ms"])
                step = max(1, len(latencies) // MAX_KEPT_LATENCIES)
                burst["num_requests"] = len(latencies)
                burst["latencies_ms"] = [round(ms, 3) for ms in latencies[::step]]


def plot(options: Options, machine: Json, samples: Json, figures: Json) -> None:
    """Throughput of all systems, and the CPU time of the turns of a conversation."""
    parts = [part for part in (*BASELINES, "turns") if part in samples]
    figure, axes = new_figure(len(parts), f"The gateway, {machine['cores']} cores", width=12)
    for part, axis in zip(parts, axes, strict=True):
        if part == "turns":
            _plot_turns(axis, figures["turns"])
        else:
            _plot_systems(axis, part, samples[part])
    legend_below(figure, *axes)
    save_figure(figure, options.png)


def _plot_systems(axis: Any, part: str, cases: Mapping[str, Any]) -> None:
    names = list(next(iter(cases.values())))
    bars = {name: [summarize(_rates(systems[name])) for systems in cases.values()] for name in names}
    title = f"Requests per second, {part} (median; whiskers: quartiles)"
    groups = [case.replace(", ", "\n") for case in cases]
    grouped_bars(axis, groups, bars, title=title, ylabel="requests/s", digits=0, colours=SYSTEM_COLOURS)
    axis.set_yscale("log")


def _plot_turns(axis: Any, figures: Mapping[str, Any]) -> None:
    for dialect, found in figures.items():
        cpu_ms = found["cpu_ms_by_turn"]
        axis.plot(range(1, len(cpu_ms) + 1), cpu_ms, label=dialect)
    axis.set_title("CPU time of the gateway for a turn of one conversation", fontsize=10, loc="left")
    axis.set(xlabel="turn", ylabel="ms", ylim=(0, None))
