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


def count_call(name: str, error_type: str | None) -> None:
    """Count a call of the tool `name` in the present sample.

    `error_type`: that of `ToolResult`, `failed` for a call that failed the sample, or None for success.
    """
    if (counts := _COUNTS.get()) is not None:
        counts[f"{name}/calls"] += 1
        if error_type is not None:
            counts[f"{name}/errors/{error_type}"] += 1


def count_error(error_type: str) -> None:
    """Count a call in the present sample that is of no tool: its name is unknown, or the call cannot be parsed."""
    if (counts := _COUNTS.get()) is not None:
        counts[f"errors/{error_type}"] += 1


def call_metrics(samples: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """The sums of the counts of samples by names such as `tools/search/calls`."""
    total: CallCounts = Counter()
    for counts in samples:
        total.update(counts)
    return {f"tools/{name}": count for name, count in total.items()}
