"""The picture at the end: the reward curve, the logprob gap, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_server.demo.outcome import Outcome

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
BLUE, TEAL, AMBER, ROSE = "#2563eb", "#0d9488", "#d97706", "#e11d48"


def draw(outcome: Outcome, path: Path) -> None:
    """Write the chart as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12, wspace=0.03, hspace=0.05)
    figure = Figure(figsize=(10, 5.6), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(2.1, 1))
    _reward(figure.add_subplot(grid[:, 0]), outcome)
    _gap(figure.add_subplot(grid[0, 1]), outcome)
    _time(figure.add_subplot(grid[1, 1]), outcome)
    figure.savefig(path)


def _plain(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold", pad=8)
    axes.grid(True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _reward(axes: Any, outcome: Outcome) -> None:
    steps = [step.step + 1 for step in outcome.steps]
    rewards = [step.reward for step in outcome.steps]
    _plain(axes, f"Learning to sort five digits, from {outcome.ready.parameters:,} random weights")
    axes.axhline(outcome.settings.wanted_reward, color=MUTED, linewidth=1, linestyle=(0, (4, 4)))
    axes.text(
        steps[0], outcome.settings.wanted_reward + 0.012, "wanted", fontsize=8, color=MUTED, ha="left", va="bottom"
    )
    axes.fill_between(steps, rewards, color=BLUE, alpha=0.08, linewidth=0)
    axes.plot(steps, rewards, color=BLUE, linewidth=2.2)
    axes.plot(steps, [step.solved for step in outcome.steps], color=TEAL, linewidth=1.6)
    _name_curves(axes, steps[-1], [("mean reward", rewards[-1], BLUE), ("all right", outcome.steps[-1].solved, TEAL)])
    axes.set_ylim(0, 1.02)
    axes.set_xlim(steps[0], steps[-1] + 0.001)
    axes.set_xlabel("training step", fontsize=9, color=MUTED)


def _name_curves(axes: Any, x: float, ends: Sequence[tuple[str, float, str]]) -> None:
    """Label each curve at its end, the labels pushed apart when the curves meet."""
    at = 2.0
    for name, value, colour in sorted(ends, key=lambda end: -end[1]):
        at = min(value, at - 0.075)
        axes.annotate(
            f"{name}\n{value:.2f}",
            (x, at),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=8.5,
            color=colour,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )


def _gap(axes: Any, outcome: Outcome) -> None:
    steps = [step.step + 1 for step in outcome.steps]
    _plain(axes, "Logprob gap, trainer to server")
    axes.plot(steps, [step.gap_max for step in outcome.steps], color=ROSE, linewidth=1.4, label="largest")
    axes.plot(steps, [step.gap_mean for step in outcome.steps], color=AMBER, linewidth=1.4, label="mean")
    axes.set_yscale("log")
    axes.set_ylim(1e-8, 1e-2)
    axes.minorticks_off()
    axes.set_yticks([10.0**power for power in (-8, -6, -4, -2)])
    axes.axhline(outcome.settings.tolerated_gap, color=MUTED, linewidth=1, linestyle=(0, (4, 4)))
    axes.text(steps[0], outcome.settings.tolerated_gap * 1.3, "tolerated", fontsize=8, color=MUTED, va="bottom")
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper right", ncols=2, bbox_to_anchor=(1.0, 0.82))


def _time(axes: Any, outcome: Outcome) -> None:
    seconds = outcome.seconds()
    _plain(axes, f"Where {outcome.total_s:.0f} seconds went")
    axes.grid(False)
    names = list(seconds)[::-1]
    bars = axes.barh(names, [seconds[name] for name in names], color=[TEAL, AMBER, BLUE, MUTED], height=0.6)
    axes.bar_label(bars, fmt="%.1f s", padding=4, fontsize=8, color=INK)
    axes.set_xlim(0, max(seconds.values()) * 1.25)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
