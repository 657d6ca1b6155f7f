"""Plots of benchmark results: grouped bars with the quartiles of the rounds. No display is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from common import CONSOLE, Summary, display_path

#: The colours of Okabe and Ito, which can be distinguished with any kind of colour blindness.
COLOURS = (
    "#7f7f7f", "#b8b8b8", "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#332288", "#882255",
    "#ddcc77", "#117733",
)  # fmt: skip


def new_figure(panels: int, title: str, *, height: float = 4.6, width: float = 7.0) -> tuple[Any, list[Any]]:
    """A figure with `panels` panels in one column and a common title. Returns the figure and the axes."""
    figure, axes = plt.subplots(panels, 1, figsize=(width, height * panels), layout="constrained", squeeze=False)
    figure.suptitle(title)
    return figure, [row[0] for row in axes]


def grouped_bars(
    axis: Any,
    groups: Sequence[str],
    series: Mapping[str, Sequence[Summary | None]],
    *,
    title: str,
    ylabel: str,
    limit: tuple[float, str] | None = None,
    colours: Mapping[str, str] | None = None,
    digits: int = 2,
) -> None:
    """Draw bars of medians with whiskers from quartile to quartile and the value on top. `limit` is a target line.

    `series` maps a legend name to one summary per group; None for a group that was not measured.
    """
    width = 0.84 / len(series)
    for i, (name, summaries) in enumerate(series.items()):
        colour = (colours or {}).get(name, COLOURS[i % len(COLOURS)])
        bars = [(group, summary) for group, summary in enumerate(summaries) if summary is not None]
        xs = [group - 0.42 + width * (i + 0.5) for group, _ in bars]
        heights = [summary.median for _, summary in bars]
        whiskers = [
            [summary.median - summary.q1 for _, summary in bars],
            [summary.q3 - summary.median for _, summary in bars],
        ]
        axis.bar(xs, heights, width * 0.92, label=name, color=colour)
        axis.errorbar(xs, heights, yerr=whiskers, fmt="none", ecolor="#222222", elinewidth=1, capsize=2)
        for x, (_, summary) in zip(xs, bars, strict=True):
            above = (x, max(summary.median, summary.q3))
            axis.annotate(
                f"{summary.median:.{digits}f}", above, (0, 2), textcoords="offset points", ha="center", size=7
            )
    if limit is not None:
        axis.axhline(limit[0], color="#222222", linestyle="--", linewidth=1, label=limit[1])
    axis.set_xticks(range(len(groups)), groups)
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_ylabel(ylabel)
    axis.margins(y=0.15)
    axis.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Any, *axes: Any) -> None:
    """Draw one legend for all panels below the last panel, with each name once."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure as a PNG file and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    CONSOLE.print(f"Plot: {display_path(path)}")
