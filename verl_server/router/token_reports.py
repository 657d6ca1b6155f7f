"""Reports of the tokens of a generation that still runs, for callers that show a turn while it is generated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from verl_server.router.resumable_generation import ResumableGeneration

OnTokens: TypeAlias = Callable[[int, Sequence[int], Sequence[float]], None]
"""Function that gets new tokens of a generation: position of the first of them in the output, token ids, and their log
probabilities in nats (empty if the request has no `return_logprob`).

Only tokens that the final reply has are reported, so a generation that must start again when its server is lost (with a
grammar or stop strings, for example) reports none: its tokens are in the reply. Each token is reported once. After
position 0 is reported again, the generation has started again: a server has refused a continuation that is longer than
its context. The function must return at once, and must not raise.
"""


class TokenReports:
    """Reports the tokens of one generation to one caller."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self._num_reported = 0

    def update(self, generation: ResumableGeneration) -> None:
        """Report the tokens that are new and certain."""
        num_certain = generation.num_certain_tokens
        if num_certain < self._num_reported:
            self._num_reported = 0
        if num_certain > self._num_reported:
            token_ids, logprobs = generation.certain_tokens(self._num_reported)
            self._on_tokens(self._num_reported, token_ids, logprobs)
            self._num_reported = num_certain


@contextlib.contextmanager
def report_tokens(generation: ResumableGeneration, on_tokens: OnTokens | None) -> Iterator[None]:
    """Report the tokens of a generation to a caller within a `with` block: those so far, and those that come."""
    if on_tokens is None:
        yield
        return
    reports = TokenReports(on_tokens)
    generation.reports.append(reports)
    try:
        reports.update(generation)
        yield
    finally:
        generation.reports.remove(reports)


def in_running_loop(on_tokens: OnTokens) -> OnTokens:
    """`on_tokens`, called in the event loop that runs now, from any thread."""
    loop = asyncio.get_running_loop()

    def call(start: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop of the caller has ended
            loop.call_soon_threadsafe(on_tokens, start, token_ids, logprobs)

    return call
