"""`ServerState`: what the routes of this folder know about the server. One object for each server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_server.errors import BadInputError, NotReadyError


class Disconnected(Exception):
    """The client has closed its connection."""


@dataclass(frozen=True)
class ServerFacts:
    """Settings of the server that do not change."""

    server_args: dict[str, Any]
    """Arguments of the server by the names of vLLM's command line, without keys."""
    weight_version: int
    """Version of the weights at the start."""

    @property
    def base_names(self) -> list[str]:
        """Names with which a request asks for the model without a LoRA adapter."""
        served = self.server_args.get("served_model_name") or []
        return [self.server_args["model"], *([served] if isinstance(served, str) else served)]


@dataclass
class RunningRequest:
    """A generation that was requested and has not ended."""

    rid: str
    lora: str | None = None
    """Name of the LoRA adapter of the request."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by an abort. A request that waits for the end of a pause then ends at once."""
    is_held: bool = False
    """Whether the request waits for the end of a pause, and vLLM does not know it yet."""


class ServerState:
    """Pause, running requests and released memory of one server."""

    def __init__(self, facts: ServerFacts) -> None:
        self.facts = facts
        self._may_run = asyncio.Event()
        self._may_run.set()
        self.is_paused_by_update = False
        """Whether generation is paused because an update has failed that had paused it by itself."""
        self._control = asyncio.Lock()
        """Held by calls that change the server: pauses, weights, memory."""
        self.resolved: dict[str, Any] | None = None
        """Values of server arguments that vLLM has chosen. None until they were asked for."""
        self.weight_version = facts.weight_version
        """Version of the weights."""
        self.is_version_set = False
        """Whether vLLM knows the version of the start."""
        self.released: frozenset[str] = frozenset()
        """Memory tags that are released."""
        self.undefined_weights: str | None = None
        """Reason why the weights are torn or empty, so that nothing is generated. None: the weights are whole."""
        self.fault: str | None = None
        """Why the server cannot be used any more, and must be replaced."""
        self.lora_folders: dict[str, Path] = {}
        """Folder of each loaded LoRA adapter."""
        self._running: dict[str, RunningRequest] = {}

    @property
    def is_paused(self) -> bool:
        """Whether generation is paused by a route of this folder. New requests then wait."""
        return not self._may_run.is_set()

    @asynccontextmanager
    async def exclusive(self, gone: asyncio.Event) -> AsyncIterator[None]:
        """Change the server alone. Raises Disconnected for a client that has gone while other calls changed the server.

        `gone`: set when the client of the call has closed its connection.
        """
        acquiring, leaving = asyncio.ensure_future(self._control.acquire()), asyncio.ensure_future(gone.wait())
        try:
            await asyncio.wait((acquiring, leaving), return_when=asyncio.FIRST_COMPLETED)
            if gone.is_set():
                raise Disconnected
            yield
        finally:
            leaving.cancel()
            if not acquiring.cancel() and not acquiring.cancelled():
                self._control.release()

    def set_paused(self, is_paused: bool) -> None:
        if is_paused:
            self._may_run.clear()
        else:
            self._may_run.set()
            self.is_paused_by_update = False

    def may_generate(self) -> bool:
        """Whether new requests are generated now: not during a pause, and not with undefined weights."""
        return not self.is_paused and self.undefined_weights is None

    def require_weights(self) -> None:
        """Raise NotReadyError while the weights are undefined: vLLM's workers would end at the next token."""
        if self.undefined_weights is not None:
            raise NotReadyError(f"the weights are undefined, because {self.undefined_weights}: push all weights")

    @contextmanager
    def running(self, rid: str, lora: str | None = None) -> Iterator[RunningRequest]:
        """Record a generation while it runs. Raises BadInputError for the id of a generation that runs."""
        if rid in self._running:
            raise BadInputError(f"a request with the rid {rid!r} is running: every request needs an id of its own")
        request = self._running[rid] = RunningRequest(rid, lora)
        try:
            yield request
        finally:
            del self._running[rid]

    async def wait_until_running(self, request: RunningRequest, gone: asyncio.Event) -> bool:
        """Wait while generation is paused. False when the request was aborted or its client has gone meanwhile."""
        while self.is_paused and not request.aborted.is_set() and not gone.is_set():
            request.is_held = True
            waits = [asyncio.ensure_future(event.wait()) for event in (self._may_run, request.aborted, gone)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
                request.is_held = False
        return not request.aborted.is_set() and not gone.is_set()

    def requests(self, prefix: str = "") -> list[RunningRequest]:
        """The generations whose id starts with `prefix`."""
        return [request for rid, request in self._running.items() if rid.startswith(prefix)]

    @property
    def num_in_vllm(self) -> int:
        """Number of generations that vLLM computes or holds."""
        return sum(not request.is_held for request in self._running.values())

    @property
    def num_held(self) -> int:
        """Number of requests that wait for the end of a pause."""
        return sum(request.is_held for request in self._running.values())
