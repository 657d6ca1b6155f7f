"""A router in front of servers that others look after: it asks each again and again whether it answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.config import AdapterConfig, RemoteServer, RouterConfig, Timeouts
from verl_server.errors import BadInputError
from verl_server.router.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

PROBE_S = 0.5
#: A probe is answered by the server's HTTP loop, which is never busy for so long.
PROBE_LIMIT_S = 5.0
#: So long requests wait for a server that has gone, when there is no other; then they are refused.
EXPECTED_S = 60.0


class AttachedFleet:
    """Made and closed in one event loop. A server that does not answer gets no requests until it does."""

    def __init__(self, servers: Sequence[RemoteServer], config: RouterConfig | None = None) -> None:
        if not servers:
            raise BadInputError("a router needs at least one replica")
        self.core = Dispatcher(config)
        timeouts = Timeouts(control_s=PROBE_LIMIT_S, connect_s=2.0)
        self._adapters = {
            one.base_url.rstrip("/"): AsyncHttpServerEngineAdapter.attach(
                one.base_url,
                api_key=one.api_key,
                admin_api_key=one.admin_api_key,
                config=AdapterConfig(timeouts=timeouts, repeats=0),
            )
            for one in servers
        }
        if len(self._adapters) != len(servers):
            raise BadInputError("a replica is named twice")
        self._probes: list[asyncio.Task[None]] = []
        self._answered: dict[str, float] = {}
        """When each answered last (`time.monotonic`)."""

    async def start(self) -> None:
        """Ask all once, then keep asking."""
        for name, adapter in self._adapters.items():
            self.core.put(name, adapter, 0, admitted=False)
        await asyncio.gather(*(self._probe(name) for name in self._adapters))
        self._probes = [asyncio.create_task(self._keep_probing(name)) for name in self._adapters]

    async def _keep_probing(self, name: str) -> None:
        while True:
            await asyncio.sleep(PROBE_S)
            await self._probe(name)

    async def _probe(self, name: str) -> None:
        known = self.core.replica(name)
        try:
            info = await self._adapters[name].get_model_info()
            version = str(info.get("weight_version", "0"))
            served = int(version) if version.isdecimal() else 0
            self.core.update(name, admitted=True, expected=True, version=served)
            self._answered[name] = time.monotonic()
        except Exception as error:  # noqa: BLE001 - whatever answers there, it is no server that can be used
            if known.load.admitted:
                logger.warning("replica %s does not answer: %s", name, error)
            silent_s = time.monotonic() - self._answered.get(name, 0.0)
            self.core.update(name, admitted=False, expected=silent_s < EXPECTED_S)

    async def close(self) -> None:
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        await self.core.close()
        for adapter in self._adapters.values():
            await adapter.close_connections()
