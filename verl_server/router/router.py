"""`RolloutRouter`: the router as callers see it, from any thread and any event loop."""

from __future__ import annotations

import asyncio
from typing import Any

from verl_server.adapter.event_loop_thread import EventLoopThread
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.policy import VersionRequirement

Json = dict[str, Any]


class RolloutRouter:
    """Requests in, whole samples out, whatever becomes of the replicas meanwhile."""

    def __init__(self, core: Dispatcher, loop: EventLoopThread) -> None:
        self._core, self._loop = core, loop

    async def generate(
        self,
        *,
        request_id: str | None = None,
        session_id: str | None = None,
        weight_version: int | None = None,
        min_weight_version: int | None = None,
        timeout_s: float | None = None,
        **request: Any,
    ) -> Json:
        """One sample for one prompt; `request` is what `HttpServerEngineAdapter.generate` takes.

        `request_id`: asked again with it, the call attaches to the running sample, returns its result, or takes up
        one that was aborted. `session_id`: turns of one conversation stay on one replica while that is not far
        fuller than the others. `weight_version`, `min_weight_version`: with which weights it must be made, exactly
        or at least. The reply's `meta_info` has `weight_versions` (spans of tokens) and `attempts`. Cancelling ends
        it in the engine.

        Raises BadInputError, NotReadyError (retryable: no such weights, or not any more; or no replica),
        ServerBusyError (retryable: too many wait), DeadlineError, or what the last replica died of.
        """
        coroutine = self._core.generate(
            request,
            request_id=request_id,
            session_id=session_id,
            need=VersionRequirement(weight_version, min_weight_version),
            timeout_s=timeout_s,
        )
        return await asyncio.wrap_future(self._loop.submit(coroutine))
