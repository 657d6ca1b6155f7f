"""`GatewayHealth`: whether a gateway can serve turns now, and why not."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

from verl_server.agent.user_code import call_within
from verl_server.errors import DeadlineError
from verl_server.gateway.engines.engine_source import EngineReport, EngineSource
from verl_server.gateway.errors import OPEN_FILE_ERRORS, GatewayError
from verl_server.gateway.hanging_calls import CallThatMayHang
from verl_server.gateway.metrics import GatewayMetrics
from verl_server.gateway.records.record_files import TOO_MANY_FILES
from verl_server.gateway.sessions.session_store import SessionStore
from verl_server.types import Json

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

    async def _ping(self) -> Json:
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
