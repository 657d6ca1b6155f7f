"""What a server says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_server.adapter import sglang as api
from verl_server.adapter.http_client import HttpClient
from verl_server.adapter.sglang.capabilities import Capabilities, probe
from verl_server.errors import NotReadyError

Json = dict[str, Any]


class InformationCalls:
    """Questions that change nothing, and the state that all calls of one adapter share."""

    def _start_calls(self, http: HttpClient) -> None:
        self._http = http
        self.base_url = http.base_url
        self.server_args: Mapping[str, Any] = {}
        """What the server was started with; empty for a server that somebody else started."""
        self._limits: api.Limits | None = None
        self._capabilities: Capabilities | None = None
        self._asleep: set[str] = set()
        self._paused = False
        self._in_flight = 0

    @property
    def paused(self) -> bool:
        """Whether this adapter has paused generation."""
        return self._paused

    async def get_model_info(self) -> Json:
        """SGLang's `/model_info`: path, architecture, weight version."""
        return dict(await self._http.call(api.MODEL_INFO))

    async def get_server_info(self) -> Json:
        """SGLang's `/server_info`: all resolved arguments and live scheduler state, without the keys."""
        return api.without_keys(await self._http.call(api.SERVER_INFO))

    async def get_loads(self) -> Json:
        """SGLang's `/v1/loads`: running and waiting requests and token usage, per DP rank."""
        return dict(await self._http.call(api.LOADS))

    async def is_ready(self) -> bool:
        """Whether new requests are served now (false while paused)."""
        return await self._is_ok(api.READY)

    async def ping(self) -> bool:
        """Whether the HTTP loop answers; true also while paused."""
        return await self._is_ok(api.PING)

    async def health(self) -> bool:
        """Whether one token can be generated. Takes a second; not meaningful while paused."""
        return await self._is_ok(api.HEALTH)

    async def _is_ok(self, endpoint: api.Endpoint) -> bool:
        try:
            await self._http.call(endpoint)
        except NotReadyError:
            return False
        return True

    async def capabilities(self) -> Capabilities:
        """What this version of SGLang can do, found by asking it; asked once."""
        if self._capabilities is None:
            self._capabilities = await probe(self._http)
        return self._capabilities
