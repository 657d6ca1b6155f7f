"""Progress of a run, and the chart of its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verl_server.config import parse_engine_kind
from verl_server.demo.settings import Outcome, Ready, Settings, StepMetrics

STEPS_PER_LINE = 10
"""Number of steps between two printed lines."""


class Display:
    """Shows the progress of one run: one line every ten steps, and a bar if the output is a terminal."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings, self._console = settings, console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"))
        self._bar = Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting the server", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        self._console.print(f"Starting two trainer ranks and one {parse_engine_kind(None).label} server.")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def ready(self, ready: Ready) -> None:
        """Show that the server is ready."""
        self._print(f"Ready after {ready.startup_s:.0f} s. The server has {ready.parameters:,} random weights.")
        self._bar.reset(self._task, total=self._settings.steps, description="learning to sort five digits")

    def step(self, metrics: StepMetrics) -> None:
        """Show a finished training step."""
        self._bar.update(self._task, advance=1, description=f"reward {metrics.reward:.3f}")
        is_last = metrics.step + 1 == self._settings.steps
        if metrics.step % STEPS_PER_LINE == 0 or is_last:
            self._print(
                f"step {metrics.step + 1:3d}/{self._settings.steps}  reward {metrics.reward:.3f}  "
                f"fully correct {metrics.solved:4.0%}  "
                f"logprob gap max {metrics.gap_max:.1e} mean {metrics.gap_mean:.1e}  "
                f"rollout {metrics.rollout_s:.2f} s  train {metrics.train_s:.2f} s  "
                f"weight update {metrics.sync_s:.2f} s"
            )

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)


# -- Chart ------------------------------------------------------------------------------------------
# Draws the result of a run: the reward curve, the logprob gap between trainer and server, and the time by phase.

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
BLUE, TEAL, AMBER, ROSE = "#2563eb", "#0d9488", "#d97706", "#e11d48"


def draw(outcome: Outcome, path: Path) -> None:
    """Write the chart of `outcome` as a PNG file to `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12, wspace=0.03, hspace=0.05)
    figure = Figure(figsize=(10, 5.6), dpi=150, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(2.1, 1))
    _draw_rewards(figure.add_subplot(grid[:, 0]), outcome)
    _draw_logprob_gap(figure.add_subplot(grid[0, 1]), outcome)
    _draw_seconds(figure.add_subplot(grid[1, 1]), outcome)
    figure.savefig(path)


def _style_axes(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold", pad=8)
    axes.grid(True, axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _draw_rewards(axes: Any, outcome: Outcome) -> None:
    steps = [step.step + 1 for step in outcome.steps]
    rewards = [step.reward for step in outcome.steps]
    _style_axes(axes, f"Learning to sort five digits, starting from {outcome.ready.parameters:,} random weights")
    axes.axhline(outcome.settings.target_reward, color=MUTED, linewidth=1, linestyle=(0, (4, 4)))
    axes.text(
        steps[0], outcome.settings.target_reward + 0.012, "target", fontsize=8, color=MUTED, ha="left", va="bottom"
    )
    axes.fill_between(steps, rewards, color=BLUE, alpha=0.08, linewidth=0)
    axes.plot(steps, rewards, color=BLUE, linewidth=2.2, label=f"mean reward, {rewards[-1]:.2f} at the end")
    solved = [step.solved for step in outcome.steps]
    axes.plot(steps, solved, color=TEAL, linewidth=1.6, label=f"fully correct, {solved[-1]:.2f} at the end")
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(steps[0], steps[-1] + 0.001)
    axes.set_xlabel("training step", fontsize=9, color=MUTED)


def _draw_logprob_gap(axes: Any, outcome: Outcome) -> None:
    steps = [step.step + 1 for step in outcome.steps]
    _style_axes(axes, "Trainer-server logprob gap")
    axes.plot(steps, [step.gap_max for step in outcome.steps], color=ROSE, linewidth=1.4, label="maximum")
    axes.plot(steps, [step.gap_mean for step in outcome.steps], color=AMBER, linewidth=1.4, label="mean")
    axes.set_yscale("log")
    axes.set_ylim(1e-8, 1e-2)
    axes.minorticks_off()
    axes.set_yticks([10.0**power for power in (-8, -6, -4, -2)])
    axes.axhline(outcome.settings.max_logprob_gap, color=MUTED, linewidth=1, linestyle=(0, (4, 4)))
    axes.text(steps[0], outcome.settings.max_logprob_gap * 1.3, "limit", fontsize=8, color=MUTED, va="bottom")
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper right", ncols=2, bbox_to_anchor=(1.0, 0.82))


def _draw_seconds(axes: Any, outcome: Outcome) -> None:
    seconds = outcome.seconds()
    _style_axes(axes, f"Time by phase, {outcome.total_s:.0f} s in total")
    axes.grid(False)
    names = list(seconds)[::-1]
    bars = axes.barh(names, [seconds[name] for name in names], color=[TEAL, AMBER, BLUE, MUTED], height=0.6)
    axes.bar_label(bars, fmt="%.1f s", padding=4, fontsize=8, color=INK)
    axes.set_xlim(0, max(seconds.values()) * 1.25)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
