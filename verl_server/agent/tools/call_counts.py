"""How many calls of each tool a sample has made, and how many of these calls failed."""

from __future__ import annotations

import contextlib
import contextvars
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

CallCounts = Counter[str]
"""Counts by names such as `search/calls` and `search/errors/timeout`."""
_COUNTS: contextvars.ContextVar[CallCounts | None] = contextvars.ContextVar("verl_server_call_counts", default=None)


@contextlib.contextmanager
def count_calls() -> Iterator[CallCounts]:
    """Count the calls of a sample. Calls in tasks that begin within the block count, too."""
    counts: CallCounts = Counter()
    token = _COUNTS.set(counts)
    try:
        yield counts
    finally:
        _COUNTS.reset(token)


def count_call(tool: str) -> None:
    """Count a call of a tool in the current sample, when the call begins."""
    _count(f"{tool}/calls")


def count_error(error_type: str, tool: str | None = None) -> None:
    """Count a call that failed in the current sample.

    `error_type`: that of `ToolResult`, or `failed` for a call that failed the sample. `tool`: name of the tool. None if
    the call is of no tool: its name is unknown, or the call cannot be parsed.
    """
    _count(f"errors/{error_type}" if tool is None else f"{tool}/errors/{error_type}")


def _count(name: str) -> None:
    if (counts := _COUNTS.get()) is not None:
        counts[name] += 1


def call_metrics(samples: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """The sums of the counts of samples by names such as `tools/search/calls`."""
    total: CallCounts = Counter()
    for counts in samples:
        total.update(counts)
    return {f"tools/{name}": count for name, count in total.items()}
