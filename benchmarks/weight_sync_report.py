"""Computes the ratios, targets, tables and plot of `bench_weight_sync` from its measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from common import Options, Summary, Target, show_table, show_targets, summarize, write_result
from plots import COLOURS, grouped_bars, legend_below, new_figure, save_figure
from weight_update_methods import (
    ARENA,
    ARENA_VERIFIED,
    FSDP2,
    MEMCPY,
    SGLANG_ADAPTER,
    SGLANG_ADAPTER_ONE_CALL,
    SGLANG_BUCKETS,
    STATE_DICT,
    STATE_DICT_VERIFIED,
)  # fmt: skip

from verl_server.types import Json

NAME = "bench_weight_sync"
SERVER: Json = {"dtype": "bfloat16", "max_total_tokens": 4096, "load_format": "auto"}
#: Maximum duration for 0.5 B parameters and TP 1, as a multiple of one memcpy.
TARGETS = {ARENA: 1.3, ARENA_VERIFIED: 2.5, STATE_DICT: 2.0, FSDP2: 3.0}
VERIFIED_TARGET = 1.3
"""Maximum duration of a verified update, as a multiple of the same update without verification."""
SGLANG_ADAPTER_TARGET = 20.0
TARGET_MODEL = "0.5 B"
#: Seconds of each round, by method.
Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Configuration:
    """The measurements of one model with one number of TP ranks."""

    model: str
    tp_size: int
    bytes: int
    samples: Samples

    @property
    def name(self) -> str:
        return f"{self.model}, TP {self.tp_size}"

    def ratio(self, method: str, reference: str = MEMCPY) -> Summary:
        """Duration of `method` divided by that of `reference` in the same round."""
        return summarize([a / b for a, b in zip(self.samples[method], self.samples[reference], strict=True)])


def report(options: Options, machine: Json, configurations: list[Configuration], rounds: int) -> None:
    """Print tables and targets, and write the result files."""
    for configuration in configurations:
        show_samples(configuration)
    targets = targets_of(configurations)
    show_targets(targets)
    write_result(
        options,
        NAME,
        machine,
        settings={"server_args": SERVER, "rounds": rounds},
        figures={
            configuration.name: {
                "bytes": configuration.bytes,
                "ratio_to_memcpy": {method: asdict(configuration.ratio(method)) for method in configuration.samples},
            }
            for configuration in configurations
        },
        targets=targets,
        samples=[
            {**asdict(configuration), "samples": _rounded(configuration.samples)} for configuration in configurations
        ],
    )
    plot(options, machine, configurations, f"SGLang {machine['versions'].get('sglang')}")


def show_samples(configuration: Configuration) -> None:
    """Print the times of all methods of one configuration."""
    rows = []
    for method, seconds in configuration.samples.items():
        summary, ratio = summarize(seconds), configuration.ratio(method)
        rows.append([
            method,
            f"{summary.median * 1e3:.1f} ({summary.q1 * 1e3:.1f} to {summary.q3 * 1e3:.1f})",
            f"{configuration.bytes / summary.median / 1e9:.2f}",
            f"{ratio.median:.2f} ({ratio.q1:.2f} to {ratio.q3:.2f})",
        ])  # fmt: skip
    title = f"{configuration.name}: {configuration.bytes / 1e6:.0f} MB"
    show_table(title, ["method", "ms (quartiles)", "GB/s", "ratio to one memcpy"], rows)


def _rounded(samples: Samples) -> Samples:
    return {method: [round(seconds, 5) for seconds in durations] for method, durations in samples.items()}


def targets_of(configurations: list[Configuration]) -> list[Target]:
    """The targets for 0.5 B parameters with TP 1."""
    targets = []
    for configuration in configurations:
        if not configuration.model.startswith(TARGET_MODEL) or configuration.tp_size != 1:
            continue
        for method, limit in TARGETS.items():
            if method in configuration.samples:
                targets.append(
                    Target(
                        f"{configuration.name}, {method}: duration over one memcpy",
                        configuration.ratio(method).median,
                        limit,
                        False,
                    )
                )
        for verified, unverified in ((STATE_DICT_VERIFIED, STATE_DICT), (ARENA_VERIFIED, ARENA)):
            if verified in configuration.samples:
                ratio = configuration.ratio(verified, unverified).median
                targets.append(
                    Target(f"{configuration.name}: {verified} over {unverified}", ratio, VERIFIED_TARGET, False)
                )
        for baseline in (SGLANG_ADAPTER, SGLANG_ADAPTER_ONE_CALL):
            if baseline in configuration.samples:
                speed_up = configuration.ratio(baseline, STATE_DICT).median
                targets.append(
                    Target(f"{configuration.name}: {baseline} over state dict", speed_up, SGLANG_ADAPTER_TARGET, True)
                )
    return targets


def plot(options: Options, machine: Json, configurations: list[Configuration], server: str) -> None:
    """Plot the seconds by configuration on a logarithmic scale, and the ratios of our methods to one memcpy."""
    title = f"Weight updates, bfloat16, {machine['cores']} cores, {server}"
    figure, (seconds, ratio) = new_figure(2, title, width=14)
    groups: dict[str, dict[str, Configuration]] = {}
    for configuration in configurations:  # results with two trainer ranks are drawn next to those with one
        group = groups.setdefault(f"{configuration.model.partition(',')[0]}, TP {configuration.tp_size}", {})
        for method in configuration.samples:
            group.setdefault(method, configuration)
    names = list(dict.fromkeys(method for group in groups.values() for method in group))
    colours = dict(zip(names, COLOURS, strict=False))
    grouped_bars(
        seconds,
        list(groups),
        {
            method: [summarize(g[method].samples[method]) if method in g else None for g in groups.values()]
            for method in names
        },
        title="Seconds of one update (median; whiskers: quartiles)",
        ylabel="seconds, logarithmic",
        colours=colours,
    )
    seconds.set_yscale("log")
    ours = [
        method for method in names if method not in (MEMCPY, SGLANG_ADAPTER_ONE_CALL, SGLANG_ADAPTER, SGLANG_BUCKETS)
    ]
    grouped_bars(
        ratio,
        list(groups),
        {method: [g[method].ratio(method) if method in g else None for g in groups.values()] for method in ours},
        title="Duration divided by that of one memcpy of the same bytes in the same round",
        ylabel="ratio",
        colours=colours,
    )
    legend_below(figure, seconds, ratio)
    save_figure(figure, options.png)
