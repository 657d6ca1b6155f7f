"""Seconds and spans of the phases of a sample: waiting, setup, generation, tools and rewards."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import time
from collections.abc import Iterator

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from verl_server.tracing import span


class Phase(enum.StrEnum):
    """A phase of a sample. Phases of concurrent branches and calls are summed, so they can exceed the duration."""

    QUEUE = "queue"
    """Waiting until `max_concurrency` admits the sample."""
    SETUP = "setup"
    """Setup and teardown of the environment."""
    GENERATE = "generate"
    """Requests to the engine, and the wait for a place in the engine."""
    TOOL = "tool"
    """Calls of tools."""
    REWARD = "reward"
    """Rewards and metrics."""


PhaseTimes = dict[str, float]
_TIMES: contextvars.ContextVar[PhaseTimes | None] = contextvars.ContextVar("verl_server_phase_times", default=None)


@contextlib.contextmanager
def measure_sample() -> Iterator[PhaseTimes]:
    """Collect the seconds of a sample's phases, by their names. Tasks that begin within the block count, too."""
    times: PhaseTimes = dict.fromkeys(Phase, 0.0)
    token = _TIMES.set(times)
    try:
        yield times
    finally:
        _TIMES.reset(token)


@contextlib.contextmanager
def measure(phase: Phase, **attributes: AttributeValue) -> Iterator[Span]:
    """Add the seconds of the block to a phase of the current sample. The block is a span with these attributes."""
    times, start = _TIMES.get(), time.monotonic()
    try:
        with span(phase, attributes) as opened:
            yield opened
    finally:
        if times is not None:
            times[phase] += time.monotonic() - start
