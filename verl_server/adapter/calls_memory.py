"""Memory release and resume over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_server.adapter import sglang as api
from verl_server.adapter.calls_generation import GenerationCalls
from verl_server.config import PauseMode
from verl_server.errors import BadInputError, ServerBusyError, ServerError

Json = dict[str, Any]


class MemoryCalls(GenerationCalls):
    """Give a sleeping server's memory to somebody else."""

    async def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Give memory back (`weights`, `kv_cache`, `cuda_graph`; None: all) until it is resumed.

        Raises ServerBusyError while requests run: SGLang itself would die. New requests that other clients
        send meanwhile wait in the server until it is resumed. Weights come back undefined: push them.
        """
        wanted = api.memory_tags(tags)
        again = self._asleep.intersection(wanted)
        if again:
            raise BadInputError(f"{sorted(again)} is released already")
        if not self._asleep:
            running = self._in_flight or api.requests_in(await self.get_loads())
            if running:
                raise ServerBusyError(
                    f"{running} requests run on {self.base_url}: wait for them or abort them, then release",
                    url=self.base_url,
                )
            await self._http.call(api.PAUSE, api.pause_payload(PauseMode.RETRACT))
        before = frozenset(self._asleep)
        self._asleep.update(wanted)
        try:
            await self._http.call(api.RELEASE_MEMORY, {"tags": wanted})
        except (ServerError, BadInputError) as error:
            if "status" in error.details:  # an answer, so a refusal: nothing was released, go on as before
                self._asleep = set(before)
                if not before and not self._paused:
                    await self._http.call(api.CONTINUE, {})
            raise

    @property
    def asleep(self) -> frozenset[str]:
        """Memory tags that are released."""
        return frozenset(self._asleep)

    async def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back. None: all that is released. Generation goes on when nothing is missing."""
        wanted = api.memory_tags(tags) if tags is not None else sorted(self._asleep)
        missing = set(wanted) - self._asleep
        if missing or not wanted:
            raise BadInputError(f"{sorted(missing) or 'nothing'} is released; released: {sorted(self._asleep)}")
        await self._http.call(api.RESUME_MEMORY, {"tags": wanted})
        self._asleep.difference_update(wanted)
        if not self._asleep:
            await self._http.call(api.FLUSH, {})
            if not self._paused:
                await self._http.call(api.CONTINUE, {})
