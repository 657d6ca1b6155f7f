"""Live progress of a rollout on the terminal: finished groups, samples, turns, and sampled tokens per second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from verl_server.agent.runner import RolloutRunner
from verl_server.agent.samples import SampleGroup

REFRESH_INTERVAL_S = 0.25


async def with_progress(
    runner: RolloutRunner, groups: AsyncIterator[SampleGroup], total: int | None = None, console: Console | None = None
) -> AsyncIterator[SampleGroup]:
    """Yield the groups of `runner.run(...)` and show a progress bar meanwhile.

    `total`: number of groups that are expected. None shows no total. `console`: where the bar is shown; None is the
    standard output. Raises the exceptions of `groups`.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("groups  {task.description}"), TimeElapsedColumn())
    start, tokens_at_start = time.monotonic(), runner.counters.num_sampled_tokens
    rewards: list[float] = []
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total)

        def refresh() -> None:
            tokens = runner.counters.num_sampled_tokens - tokens_at_start
            progress.update(bar, description=_describe(runner, tokens / max(time.monotonic() - start, 1e-9), rewards))

        async def refresh_periodically() -> None:
            while True:
                refresh()
                await asyncio.sleep(REFRESH_INTERVAL_S)

        refreshing = asyncio.create_task(refresh_periodically())
        try:
            async for group in groups:
                rewards += [sample.reward for sample in group.samples if sample.reward is not None]
                progress.advance(bar)
                refresh()
                yield group
        finally:
            refreshing.cancel()
            await asyncio.gather(refreshing, return_exceptions=True)


def _describe(runner: RolloutRunner, tokens_per_s: float, rewards: list[float]) -> str:
    """The text beside the progress bar."""
    counters = runner.counters
    text = f"{counters.num_running_samples} samples running, {counters.num_finished_samples} finished, "
    text += f"{counters.num_failed_samples} failed; {counters.num_turns} turns, {tokens_per_s:.0f} tokens/s"
    if rewards:
        text += f"; mean reward {sum(rewards) / len(rewards):.3f}"
    return text
