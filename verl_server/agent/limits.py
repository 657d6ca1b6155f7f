"""Limits of an episode, and the exception that ends an episode at a limit."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from verl_server.config import Positive, PositiveInt
from verl_server.tracing import span
from verl_server.validation import check_fields


@check_fields()
@dataclass(frozen=True)
class RolloutLimits:
    """Limits of one episode over all of its turns. The stop reason of an episode is the name of the limit it reached.

    Raises BadInputError for a limit that is not a whole number of at least 1, and for a `timeout_s` that is not a
    positive number.
    """

    max_response_tokens: PositiveInt | None = None
    """Maximum number of tokens after the first prompt: sampled tokens, and tokens of tool results and messages. None:
    `max_context_tokens` is the only limit of the number of tokens."""
    max_turns: PositiveInt = 64
    """Maximum number of turns that the policy generates."""
    timeout_s: Positive | None = None
    """Maximum duration in seconds. A turn that is being generated is abandoned; tools have their own timeout."""
    max_tool_tokens: PositiveInt = 2048
    """Maximum number of text tokens of one tool result, and of one text of `Episode.append_text`. A longer text is
    truncated; the episode goes on."""
    max_context_tokens: PositiveInt | None = None
    """Maximum number of tokens of prompt plus response. None: a runner takes the context length of its engine, less 6
    tokens that SGLang reserves, if the engine can be asked. For an engine that cannot be asked, pass the context length
    less 6: an episode then stops at this limit, and does not fail at the context length of the server."""

    @property
    def has_token_limit(self) -> bool:
        """Whether the number of tokens of an episode is limited. An `Episode` needs such a limit."""
        return self.max_response_tokens is not None or self.max_context_tokens is not None


class EpisodeStopped(BaseException):
    """An episode has reached a limit. Raised through the agent loop of the episode, and caught by `run_episode`.

    It is no `Exception`, so that an agent loop which repeats failed turns with `except Exception` ends at the limit.
    Code that runs another episode, for example a reward or a tool, must catch the `EpisodeStopped` of that other
    episode. Otherwise the code fails with a RuntimeError.
    """

    def __init__(self, stop_reason: str, state: object) -> None:
        super().__init__(f"the episode reached its limit {stop_reason}")
        self.stop_reason = stop_reason
        """Name of the field of `RolloutLimits`."""
        self._state = state

    def is_of(self, state: object) -> bool:
        """Whether the episode with this `EpisodeState` has reached the limit."""
        return self._state is state


class LastStop:
    """Remembers at which limit the last block with this context manager has stopped. The exception goes on."""

    stop_reason: str | None = None
    """Name of the limit. None if the block did not stop at a limit."""

    def __enter__(self) -> None:
        self.stop_reason = None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, EpisodeStopped):
            self.stop_reason = error.stop_reason


# -- Loop slots -------------------------------------------------------------------------------------
# `LoopSlots`: a number of slots in each event loop. A semaphore of asyncio belongs to one event loop.


class LoopSlots:
    """Semaphores with the same number of slots, one for each event loop that asks. Threads may share the object."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._semaphores = dict[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        self._lock = threading.Lock()

    def of_running_loop(self) -> asyncio.Semaphore:
        """The semaphore of the running event loop."""
        loop = asyncio.get_running_loop()
        if (semaphore := self._semaphores.get(loop)) is None:
            with self._lock:
                # Not a dict of weak keys: a semaphore refers to its event loop, and would keep it.
                for other in [other for other in self._semaphores if other.is_closed()]:
                    del self._semaphores[other]
                semaphore = self._semaphores[loop] = asyncio.Semaphore(self._num_slots)
        return semaphore


# -- Figures of a sample ----------------------------------------------------------------------------
# Seconds and spans of the phases of a sample (waiting, setup, generation, tools and rewards), and counts of its calls.


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


@dataclass(frozen=True)
class SampleFigures:
    """What a sample has spent so far."""

    times: dict[str, float]
    """Seconds of each phase."""
    tool_counts: Counter[str]
    """Calls of tools by names such as `search/calls` and `search/errors/timeout`, see `Sample.tool_counts`."""


_FIGURES: contextvars.ContextVar[SampleFigures | None] = contextvars.ContextVar("verl_server_sample", default=None)


@contextlib.contextmanager
def measure_sample() -> Iterator[SampleFigures]:
    """Collect the figures of a sample. Tasks that begin within the block count, too."""
    figures = SampleFigures(dict.fromkeys(Phase, 0.0), Counter())
    token = _FIGURES.set(figures)
    try:
        yield figures
    finally:
        _FIGURES.reset(token)


@contextlib.contextmanager
def measure(phase: Phase, **attributes: AttributeValue) -> Iterator[Span]:
    """Add the seconds of the block to a phase of the current sample. The block is a span with these attributes."""
    figures, start = _FIGURES.get(), time.monotonic()
    try:
        with span(phase, attributes) as opened:
            yield opened
    finally:
        if figures is not None:
            figures.times[phase] += time.monotonic() - start


def count(name: str) -> None:
    """Count a call of a tool in the current sample."""
    if (figures := _FIGURES.get()) is not None:
        figures.tool_counts[name] += 1
