"""`RolloutRouter`: the router in this process, callable from any thread and any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from verl_server.adapter.blocking import EventLoopThread
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.placement import VersionRequirement
from verl_server.router.resumable_generation import OnTokens, in_running_loop
from verl_server.types import Json


class RolloutRouter:
    """The router of a fleet in this process. Each call returns one whole generation, even when replicas are lost."""

    def __init__(self, dispatcher: Dispatcher, loop: EventLoopThread) -> None:
        self._dispatcher, self._loop = dispatcher, loop

    async def generate(
        self,
        *,
        rid: str | None = None,
        session_id: str | None = None,
        weight_version: int | None = None,
        min_weight_version: int | None = None,
        timeout_s: float | None = None,
        on_tokens: OnTokens | None = None,
        **request: Any,
    ) -> Json:
        """One generation for one prompt; `request` holds the arguments of `HttpServerEngineAdapter.generate`.

        Args:
            rid: Request id, 1 to 512 characters. A repeated call with the same rid and the same request waits for the
                running generation, returns its stored result, or continues it after an abort. Results of calls
                without a rid are not stored.
            session_id: Id of a conversation. Its requests stay on one replica, whose prefix cache has the earlier
                turns, unless that replica has far more load than the others.
            weight_version: Exact version of the weights for all tokens.
            min_weight_version: Minimum version of the weights.
            timeout_s: Seconds until DeadlineError is raised and the generation is aborted.
            on_tokens: Function that gets the tokens while they are generated, in the event loop of the call. See
                `OnTokens`. A call that joins a running generation gets its tokens from the start.

        Returns SGLang's reply. `meta_info` also has `weight_versions` (spans of tokens with `version`, `start`, `end`)
        and `attempts` (number of attempts on replicas). Cancelling the call aborts the generation in the server.

        Raises BadInputError; NotReadyError (retryable) when no replica serves the required weights, the weights changed
        during the generation, or the result of the same rid has other weights; DeadlineError; or the error of the last
        replica.
        """
        coroutine = self._dispatcher.generate(
            request,
            rid=rid,
            session_id=session_id,
            requirement=VersionRequirement(weight_version, min_weight_version),
            timeout_s=timeout_s,
            on_tokens=None if on_tokens is None else in_running_loop(on_tokens),
        )
        return await asyncio.wrap_future(self._loop.submit(coroutine))

    async def abort(self, rids: Sequence[str]) -> dict[str, Json | None]:
        """Internal. See `Dispatcher.abort`."""

        async def abort() -> dict[str, Json | None]:
            return self._dispatcher.abort(rids)

        return await asyncio.wrap_future(self._loop.submit(abort()))
