"""Plots of benchmark results: grouped bars with the spread of the rounds, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from common import CONSOLE, Summary, shown

#: Okabe and Ito's colours: told apart with any kind of colour blindness.
COLOURS = (
    "#7f7f7f", "#b8b8b8", "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#332288", "#882255",
    "#ddcc77", "#117733",
)  # fmt: skip


def new_figure(panels: int, title: str, *, height: float = 4.6, width: float = 7.0) -> tuple[Any, list[Any]]:
    """A figure of panels one above the other, with a common title."""
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
    """Bars of medians, whiskers from quartile to quartile, the value on top; `limit` draws a target line.

    `series` maps a legend name to one summary for each group (None: not measured).
    """
    width = 0.84 / len(series)
    for i, (name, summaries) in enumerate(series.items()):
        colour = (colours or {}).get(name, COLOURS[i % len(COLOURS)])
        places = [(place, found) for place, found in enumerate(summaries) if found is not None]
        xs = [place - 0.42 + width * (i + 0.5) for place, _ in places]
        heights = [found.median for _, found in places]
        whiskers = [
            [found.median - found.q1 for _, found in places],
            [found.q3 - found.median for _, found in places],
        ]
        axis.bar(xs, heights, width * 0.92, label=name, color=colour)
        axis.errorbar(xs, heights, yerr=whiskers, fmt="none", ecolor="#222222", elinewidth=1, capsize=2)
        for x, (_, found) in zip(xs, places, strict=True):
            above = (x, max(found.median, found.q3))
            axis.annotate(f"{found.median:.{digits}f}", above, (0, 2), textcoords="offset points", ha="center", size=7)
    if limit is not None:
        axis.axhline(limit[0], color="#222222", linestyle="--", linewidth=1, label=limit[1])
    axis.set_xticks(range(len(groups)), groups)
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_ylabel(ylabel)
    axis.margins(y=0.15)
    axis.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Any, *axes: Any) -> None:
    """One legend for all panels, under the last one, so that it hides no bar. Each name once."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def save_figure(figure: Any, path: Path) -> None:
    """Write the PNG and forget the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    CONSOLE.print(f"plot: {shown(path)}")
