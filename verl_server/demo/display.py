"""Live progress: a panel that follows the run on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verl_server.demo.settings import Ready, Settings, StepMetrics

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 92
CURVE_WIDTH = 50
LINE_EVERY = 10
"""Steps between two lines where there is no terminal."""
RECENT = 10
"""Steps that the remaining time is reckoned from."""


class Display:
    """Shows one run. A context manager; call `tick` often."""

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
            self._console.print("starting two trainer ranks and the rollout server")
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self.tick()
            self._live.stop()

    def ready(self, ready: Ready) -> None:
        self._ready = ready
        self._line(f"ready after {ready.startup_s:.0f} s: {ready.parameters:,} random weights, served")

    def step(self, metrics: StepMetrics) -> None:
        self._steps.append(metrics)
        last = metrics.step + 1 == self._settings.steps
        if metrics.step % LINE_EVERY == 0 or last:
            self._line(
                f"step {metrics.step + 1:3d}/{self._settings.steps}  reward {metrics.reward:.3f}  "
                f"all right {metrics.solved:4.0%}  logprob gap max {metrics.gap_max:.1e} mean {metrics.gap_mean:.1e}  "
                f"seconds {metrics.rollout_s:.2f} {metrics.train_s:.2f} {metrics.sync_s:.2f}  "
                f"left {clock(remaining(self._steps, self._settings.steps))}"
            )

    def tick(self) -> None:
        """Draw again."""
        if self._console.is_terminal:
            self._live.update(self._panel(), refresh=True)

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, highlight=False, soft_wrap=True)

    def _panel(self) -> RenderableType:
        done, total = len(self._steps), self._settings.steps
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column()
        head.add_column(ratio=1)
        head.add_column(justify="right")
        waited = clock(time.monotonic() - self._started)
        if done:
            state = f"{clock(remaining(self._steps, total))} left"
        else:
            state = "first step" if self._ready else "starting the server"
        head.add_row(
            f"step [bold]{done}[/]/{total}",
            ProgressBar(total=total, completed=done, pulse=self._ready is None),
            f"{waited}, {state}",
        )
        parts: list[RenderableType] = [head]
        if self._steps:
            parts += [Text(), _figures(self._steps)]
        width = min(WIDTH, self._console.width)
        subtitle = f"seed {self._settings.seed}, GRPO, {self._settings.ranks} FSDP2 ranks, one SGLang server"
        return Panel(
            Group(*parts), title="learning to sort five digits", subtitle=subtitle, width=width, padding=(1, 2)
        )


def _figures(steps: Sequence[StepMetrics]) -> Table:
    now = steps[-1]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row("reward", f"[bold blue]{now.reward:.3f}[/]  [blue]{sparkline([s.reward for s in steps])}[/]")
    table.add_row("all right", f"[green]{now.solved:.0%}[/] of {now.response_tokens:.1f}-token answers")
    table.add_row("last answer", Text(now.example))
    table.add_row("logprob gap", f"max {now.gap_max:.1e}   mean {now.gap_mean:.1e}   [dim]trainer against server[/]")
    table.add_row(
        "seconds a step",
        f"rollout [bold]{now.rollout_s:.2f}[/]   train [bold]{now.train_s:.2f}[/]   sync [bold]{now.sync_s:.3f}[/]",
    )
    table.add_row("weights", f"version {now.weight_version}")
    return table


def sparkline(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Values from 0 to 1 as a row of blocks, at most `width` of them."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [fmean(values[a:b]) for a, b in pairwise(edges)]
    return "".join(BLOCKS[min(int(max(value, 0.0) * len(BLOCKS)), len(BLOCKS) - 1)] for value in values)


def remaining(steps: Sequence[StepMetrics], total: int) -> float | None:
    """Seconds until the last step, at the pace of the latest ones. The first one warms up and tells nothing."""
    recent = steps[1:][-RECENT:]
    if not recent:
        return None
    return (total - len(steps)) * fmean(s.rollout_s + s.train_s + s.sync_s for s in recent)


def clock(seconds: float | None) -> str:
    """Minutes and seconds, `?` when unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
