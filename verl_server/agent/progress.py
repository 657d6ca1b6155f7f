"""How a rollout stands, live: samples, turns and sampled tokens a second, on the terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from verl_server.agent.runner import Group, RolloutRunner

TICK_S = 0.25


async def shown(
    runner: RolloutRunner, groups: AsyncIterator[Group], total: int | None = None, console: Console | None = None
) -> AsyncIterator[Group]:
    """The groups of `runner.run(...)` as they come, under a live bar; `total`: how many are wanted."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("groups  {task.description}"), TimeElapsedColumn())
    started, before, rewards = time.monotonic(), runner.counts.tokens, [0.0, 0.0]
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total)

        def draw() -> None:
            counts = runner.counts
            rate = (counts.tokens - before) / max(time.monotonic() - started, 1e-9)
            words = f"{counts.running} samples under way, {counts.finished} finished, {counts.failed} failed; "
            words += f"{counts.turns} turns, {rate:.0f} tokens/s"
            if rewards[1]:
                words += f"; mean reward {rewards[0] / rewards[1]:.3f}"
            progress.update(bar, description=words)

        async def tick() -> None:
            while True:
                draw()
                await asyncio.sleep(TICK_S)

        ticking = asyncio.create_task(tick())
        try:
            async for group in groups:
                for sample in group.samples:
                    if sample.reward is not None:
                        rewards[0] += sample.reward
                        rewards[1] += 1
                progress.advance(bar)
                draw()
                yield group
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
