"""`GatewayHealth`: whether a gateway can serve turns now, and why not."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from verl_server.agent.engines import GenerateFn, with_reports
from verl_server.agent.user_code import call_within
from verl_server.errors import DeadlineError
from verl_server.gateway.conversation import ARRIVED_AT
from verl_server.gateway.engines import EngineReport, EngineSource
from verl_server.gateway.errors import OPEN_FILE_ERRORS, GatewayError
from verl_server.gateway.records import TOO_MANY_FILES
from verl_server.gateway.sessions.session_store import SessionStore
from verl_server.gateway.threads import CallThatMayHang
from verl_server.router.resumable_generation import OnTokens
from verl_server.trajectory.graph import Node
from verl_server.types import Json

# -- Metrics ----------------------------------------------------------------------------------------
# `GatewayMetrics`: what a gateway has done, in the text format of Prometheus.
#
# Labels have few values: no ids of sessions, no keys, no names of models.

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

        async def measured(
            *, rid: str, session_id: str, on_tokens: OnTokens | None = None, **request: Any
        ) -> Mapping[str, Any]:
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


# -- Health -----------------------------------------------------------------------------------------

PING_TIMEOUT_S = 10.0
"""Seconds in which the engine must generate one token, unless it is busy with turns."""
RECENT_TOKENS_S = 60.0
"""Seconds after the last tokens of a turn in which a ping without a token does not make the engine unhealthy."""
SILENT_TURNS_S = 600.0
"""Seconds without tokens for which turns without a stream keep an engine healthy that does not answer a ping in time.
The tokens of these turns come at their end. The official SDKs wait 600 seconds for a reply without a stream.
"""
FOLDER_TIMEOUT_S = 5.0
"""Seconds in which a file must be written into the folder of the records."""
PROBE_FILE = ".gateway.probe"


class GatewayHealth:
    """Asks the folder, the engine and the sessions of a gateway. Use it in the event loop of the gateway."""

    def __init__(
        self,
        run_dir: Path,
        store: SessionStore,
        engine: EngineSource | None,
        metrics: GatewayMetrics,
        max_context_tokens: int | None = None,
    ) -> None:
        """`engine`: None for sessions whose engine cannot be asked. `max_context_tokens`: limit of the gateway."""
        self._run_dir, self._store, self._engine, self._metrics = run_dir, store, engine, metrics
        self._max_context_tokens = max_context_tokens
        self._probe = CallThatMayHang("writing the probe", _write_probe, uses_late_results=False)
        """In a thread of its own: long prompts can take all worker threads."""

    async def reasons(self) -> list[str]:
        """Why the gateway is not ready. Empty: ready. The texts have no addresses: anybody may read them."""
        return [*await self._own_reasons(), *(await self._report()).problems]

    async def examine(self) -> Json:
        """The state of the gateway and of its engine, and the result of one generated token. For the admin."""
        report, ping = await self._report(), await self._ping()
        reasons = [*await self._own_reasons(), *report.problems]
        if ping.get("error"):
            reasons.append(f"the engine did not generate a token: {ping['error']}")
        return {
            "status": "unhealthy" if reasons else "healthy",
            "reasons": reasons,
            "engine": report.details,
            "ping": ping,
            "tokenizer": self._tokenizer(),
            "max_context_tokens": self._max_context_tokens,
            "open_sessions": self._store.num_open,
        }

    async def _report(self) -> EngineReport:
        return EngineReport([], {}) if self._engine is None else await self._engine.report()

    async def _own_reasons(self) -> list[str]:
        if self._store.closed_reason is not None:
            return [self._store.closed_reason]
        if not self._store.has_free_files:
            return [TOO_MANY_FILES]
        try:
            await self._probe.result(FOLDER_TIMEOUT_S, self._run_dir)
        except TimeoutError:
            return [f"the folder of the records took no file for {FOLDER_TIMEOUT_S:g} s"]
        except OSError as error:
            if error.errno in OPEN_FILE_ERRORS:
                return [TOO_MANY_FILES]
            return [f"the folder of the records takes no files: {error.strerror}"]
        return []

    async def _ping(self) -> Mapping[str, Any]:
        """Generate one token. It belongs to no session and is recorded nowhere.

        A busy engine is healthy: the ping waits behind turns. Tokens of turns have come a short time ago, or turns run
        whose tokens come at their end.
        """
        if self._engine is None:
            return {"error": "the engine cannot be asked"}
        started_at = time.monotonic()
        try:
            parts = self._engine.parts()
            reply = parts.generate(
                rid=f"gateway-ping-{uuid.uuid4().hex}",
                session_id="gateway-ping",
                input_ids=parts.renderer.encode("a")[:1],
                sampling_params={"max_new_tokens": 1, "temperature": 0.0},
                return_logprob=True,
            )
            await call_within(reply, PING_TIMEOUT_S, "the ping of the gateway")  # ends also without its cancellation
        except (DeadlineError, TimeoutError):
            age_s = self._metrics.seconds_without_tokens()
            if age_s < (SILENT_TURNS_S if self._metrics.has_silent_turns else RECENT_TOKENS_S):
                return {"seconds_without_tokens": round(age_s, 3)}
            return {"error": f"no token within {PING_TIMEOUT_S:g} s"}
        except GatewayError as error:
            return {"error": error.message}
        except Exception as error:  # noqa: BLE001 - any failure is the result of the ping
            return {"error": f"{type(error).__name__}: {error}"}
        return {"seconds": round(time.monotonic() - started_at, 3)}

    def _tokenizer(self) -> str | None:
        """Name or folder of the tokenizer of the gateway. None while it is not known."""
        if self._engine is None:
            return None
        with contextlib.suppress(GatewayError):
            return str(getattr(self._engine.parts().renderer.tokenizer, "name_or_path", "")) or None
        return None


def _write_probe(folder: Path) -> None:
    """Write and remove a small file. Raises OSError: the folder is gone, the disk is full, or it is read-only."""
    path = folder / PROBE_FILE
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"probe")
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
