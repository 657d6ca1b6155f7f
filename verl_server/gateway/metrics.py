"""`GatewayMetrics`: what a gateway has done, in the text format of Prometheus.

Labels have few values: no ids of sessions, no keys, no names of models.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from verl_server.agent.generate_fn import GenerateFn, with_reports
from verl_server.gateway.context import ARRIVED_AT
from verl_server.router.token_reports import OnTokens
from verl_server.trajectory.nodes import Node
from verl_server.types import Json

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper limits of the buckets of the histograms."""


class GatewayMetrics:
    """Counters, gauges and histograms of one gateway. Any thread may read them."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.turns = Counter(
            "verl_gateway_turns", "Requests for a turn that ended", ["dialect", "status"], registry=registry
        )
        self.open_streams = Gauge("verl_gateway_open_streams", "Streams that are open", registry=registry)
        self.running_turns = Gauge("verl_gateway_running_turns", "Turns that the engine generates", registry=registry)
        self.sessions_open = Gauge("verl_gateway_sessions_open", "Sessions that accept requests", registry=registry)
        seconds = functools.partial(Histogram, buckets=SECONDS, registry=registry)
        self.queue_seconds = seconds(
            "verl_gateway_queue_seconds", "Seconds from the arrival of a request to the call of the engine"
        )
        self.first_token_seconds = seconds(
            "verl_gateway_first_token_seconds",
            "Seconds from the arrival of a request to the first part of the reply that has content of the turn",
        )
        self.turn_seconds = seconds(
            "verl_gateway_turn_seconds", "Seconds from the arrival of a request to the end of its reply"
        )
        self.prompt_tokens = Counter(
            "verl_gateway_prompt_tokens", "Prompt tokens of generated turns", registry=registry
        )
        self.cached_tokens = Counter(
            "verl_gateway_cached_tokens", "Prompt tokens that a prefix cache of the engine provided", registry=registry
        )
        self.sampled_tokens = Counter(
            "verl_gateway_sampled_tokens", "Tokens that the policy sampled", registry=registry
        )
        self.attached_retries = Counter(
            "verl_gateway_attached_retries",
            "Requests that received a running turn or the result of a finished turn",
            registry=registry,
        )
        self.forks = Counter("verl_gateway_forks", "Forks of recorded conversations", ["reason"], registry=registry)
        self.aborted = Counter(
            "verl_gateway_aborted_generations", "Generations that were aborted before their end", registry=registry
        )
        self.failed = Counter(
            "verl_gateway_failed_generations", "Generations that ended with an error of the engine", registry=registry
        )
        self._tokens_at = -math.inf
        """Time at which the engine has returned or reported the last tokens of a turn (`time.monotonic`)."""
        self._silent_since = -math.inf
        """Time of the first turn after the last tokens that does not report its tokens before its end."""
        self._num_silent = 0
        """Number of running turns that do not report their tokens before their end."""

    @property
    def has_silent_turns(self) -> bool:
        """Whether turns run that do not report their tokens before their end."""
        return self._num_silent > 0

    def seconds_without_tokens(self) -> float:
        """Seconds since the last tokens of a turn, or since the first silent turn after them. Infinite before both.

        A turn that is aborted and sent again does not begin the time anew.
        """
        return time.monotonic() - max(self._tokens_at, self._silent_since)

    def text(self) -> bytes:
        """The metrics, in the text format of Prometheus."""
        return generate_latest(self._registry)

    def count_node(self, node: Node) -> None:
        """Count a node that was recorded, if it is a fork."""
        if node.fork_reason is not None:
            self.forks.labels(node.fork_reason.value).inc()

    @contextlib.contextmanager
    def _silent_turn(self, *, is_silent: bool) -> Iterator[None]:
        """Count a turn that runs, if it does not report its tokens before its end."""
        if is_silent and self._silent_since <= self._tokens_at:
            self._silent_since = time.monotonic()
        self._num_silent += is_silent
        try:
            yield
        finally:
            self._num_silent -= is_silent

    def measure(self, generate: GenerateFn) -> GenerateFn:
        """`generate`, whose calls are measured."""

        async def measured(*, rid: str, session_id: str, on_tokens: OnTokens | None = None, **request: Any) -> Json:
            arrived_at = ARRIVED_AT.get()
            if arrived_at is not None:
                ARRIVED_AT.set(None)  # a turn that a weight update has aborted is generated again in the same task
                self.queue_seconds.observe(time.monotonic() - arrived_at)

            def report(start: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
                self._tokens_at = time.monotonic()
                if on_tokens is not None:
                    on_tokens(start, token_ids, logprobs)

            with self.running_turns.track_inprogress(), self._silent_turn(is_silent=on_tokens is None):
                try:
                    reply = await with_reports(generate, on_tokens and report)(
                        rid=rid, session_id=session_id, **request
                    )
                except asyncio.CancelledError:
                    self.aborted.inc()
                    raise
                except Exception:
                    self.failed.inc()
                    raise
            if (reply["meta_info"].get("finish_reason") or {}).get("type") == "abort":
                return reply
            self._tokens_at = time.monotonic()
            self.prompt_tokens.inc(len(request.get("input_ids") or ()))
            self.cached_tokens.inc(int(reply["meta_info"].get("cached_tokens") or 0))
            self.sampled_tokens.inc(len(reply["output_ids"]))
            return reply

        return measured
