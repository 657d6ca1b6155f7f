"""Live progress of a run: a panel on a terminal, otherwise one line every ten steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verl_server.config import parse_engine_kind
from verl_server.demo.settings import Outcome, Ready, Settings, StepMetrics

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 92
CURVE_WIDTH = 50
STEPS_PER_LINE = 10
"""Number of steps between two lines when the output is not a terminal."""
RECENT_STEPS = 10
"""Number of latest steps from which the remaining time is estimated."""


class Display:
    """Shows the progress of one run. A context manager; call `tick` several times per second to update the panel."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings, self._console = settings, console
        self._started = time.monotonic()
        self._ready: Ready | None = None
        self._steps: list[StepMetrics] = []
        self._live = Live(self._panel(), console=console, refresh_per_second=4, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(f"Starting two trainer ranks and one {parse_engine_kind(None).label} server.")
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self.tick()
            self._live.stop()

    def ready(self, ready: Ready) -> None:
        """Show that the server is ready."""
        self._ready = ready
        self._print_line(f"Ready after {ready.startup_s:.0f} s. The server has {ready.parameters:,} random weights.")

    def step(self, metrics: StepMetrics) -> None:
        """Show a finished training step."""
        self._steps.append(metrics)
        is_last = metrics.step + 1 == self._settings.steps
        if metrics.step % STEPS_PER_LINE == 0 or is_last:
            self._print_line(
                f"step {metrics.step + 1:3d}/{self._settings.steps}  reward {metrics.reward:.3f}  "
                f"fully correct {metrics.solved:4.0%}  "
                f"logprob gap max {metrics.gap_max:.1e} mean {metrics.gap_mean:.1e}  "
                f"rollout {metrics.rollout_s:.2f} s  train {metrics.train_s:.2f} s  "
                f"weight update {metrics.sync_s:.2f} s  "
                f"time left {format_time(remaining_s(self._steps, self._settings.steps))}"
            )

    def tick(self) -> None:
        """Update the panel."""
        if self._console.is_terminal:
            self._live.update(self._panel(), refresh=True)

    def _print_line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, highlight=False, soft_wrap=True)

    def _panel(self) -> RenderableType:
        done, total = len(self._steps), self._settings.steps
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column()
        head.add_column(ratio=1)
        head.add_column(justify="right")
        elapsed = format_time(time.monotonic() - self._started)
        if done:
            state = f"{format_time(remaining_s(self._steps, total))} left"
        else:
            state = "first step" if self._ready else "starting the server"
        head.add_row(
            f"step [bold]{done}[/]/{total}",
            ProgressBar(total=total, completed=done, pulse=self._ready is None),
            f"{elapsed} elapsed, {state}",
        )
        parts: list[RenderableType] = [head]
        if self._steps:
            parts += [Text(), _metrics_table(self._steps)]
        width = min(WIDTH, self._console.width)
        engine, settings = parse_engine_kind(None).label, self._settings
        subtitle = f"seed {settings.seed}, GRPO, {settings.ranks} FSDP2 ranks, one {engine} server"
        return Panel(
            Group(*parts), title="Learning to sort five digits", subtitle=subtitle, width=width, padding=(1, 2)
        )


def _metrics_table(steps: Sequence[StepMetrics]) -> Table:
    last = steps[-1]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row("reward", f"[bold blue]{last.reward:.3f}[/]  [blue]{sparkline([s.reward for s in steps])}[/]")
    length = f"mean length {last.response_tokens:.1f} tokens"
    table.add_row("fully correct", f"[green]{last.solved:.0%}[/] of the answers, {length}")
    table.add_row("last answer", Text(last.example))
    gap = f"max {last.gap_max:.1e}   mean {last.gap_mean:.1e}"
    table.add_row("logprob gap", f"{gap}   [dim]between trainer and server[/]")
    table.add_row(
        "seconds per step",
        f"rollout [bold]{last.rollout_s:.2f}[/]   train [bold]{last.train_s:.2f}[/]   "
        f"weight update [bold]{last.sync_s:.3f}[/]",
    )
    table.add_row("weights", f"version {last.weight_version}")
    return table


def sparkline(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Values from 0 to 1 as a row of at most `width` block characters."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [fmean(values[a:b]) for a, b in pairwise(edges)]
    return "".join(BLOCKS[min(int(max(value, 0.0) * len(BLOCKS)), len(BLOCKS) - 1)] for value in values)


def remaining_s(steps: Sequence[StepMetrics], total: int) -> float | None:
    """Estimated seconds until the end of the last step, from the duration of the latest steps.

    None when only the first step is finished: it is slower than the others and is not used.
    """
    recent = steps[1:][-RECENT_STEPS:]
    if not recent:
        return None
    return (total - len(steps)) * fmean(s.rollout_s + s.train_s + s.sync_s for s in recent)


def format_time(seconds: float | None) -> str:
    """Seconds as `minutes:seconds`, or `?` for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


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
    axes.plot(steps, rewards, color=BLUE, linewidth=2.2)
    axes.plot(steps, [step.solved for step in outcome.steps], color=TEAL, linewidth=1.6)
    ends = [("mean reward", rewards[-1], BLUE), ("fully correct", outcome.steps[-1].solved, TEAL)]
    _label_curves(axes, steps[-1], ends)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(steps[0], steps[-1] + 0.001)
    axes.set_xlabel("training step", fontsize=9, color=MUTED)


def _label_curves(axes: Any, x: float, ends: Sequence[tuple[str, float, str]]) -> None:
    """Write the name and the last value of each curve at its end. Labels of close curves are moved apart."""
    label_y = 2.0
    for name, value, colour in sorted(ends, key=lambda end: -end[1]):
        label_y = min(value, label_y - 0.075)
        axes.annotate(
            f"{name}\n{value:.2f}",
            (x, label_y),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=8.5,
            color=colour,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )


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
