"""A fixed list of servers that somebody else starts and stops. The router probes each of them repeatedly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Sequence

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.adapter.sglang.capabilities import num_data_parallel_ranks
from verl_server.config import AdapterConfig, RemoteServer, Timeouts
from verl_server.errors import BadInputError, VerlServerError
from verl_server.router.dispatcher import Dispatcher
from verl_server.types import Json, parse_weight_version

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 0.5
"""Minimum number of seconds between two probes of one server."""
MAX_PROBES_PER_S = 400
"""Maximum number of probes of all servers per second. A probe costs about half a millisecond of CPU time."""
PROBE_TIMEOUT_S = 5.0
"""The HTTP loop of a server answers the probe. It is never busy for so long."""
CONNECT_TIMEOUT_S = 2.0
RETURN_TIMEOUT_S = 60.0
"""Seconds after its last answer during which requests wait for a server when no other server answers. After that
requests are refused."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StaticReplicas:
    """The replica source of `verl-server router`. A server that does not answer receives no requests until it does.

    Raises BadInputError for an empty list or a server that is listed twice.
    """

    def __init__(self, servers: Sequence[RemoteServer]) -> None:
        if not servers:
            raise BadInputError("a router needs at least one replica, got none")
        config = AdapterConfig(Timeouts(connect_s=CONNECT_TIMEOUT_S), max_retries=0)
        self._adapters = {
            server.base_url.rstrip("/"): AsyncHttpServerEngineAdapter.attach(
                server.base_url, api_key=server.api_key, admin_api_key=server.admin_api_key, config=config
            )
            for server in servers
        }
        if len(self._adapters) != len(servers):
            urls = [server.base_url for server in servers]
            raise BadInputError(f"a replica is listed twice: {', '.join(urls)}")
        self._probes: list[asyncio.Task[None]] = []
        self._answered_at: dict[str, float] = {}
        """Time of each server's last answer (`time.monotonic`)."""
        self._sized: set[str] = set()
        """Servers whose number of data parallel ranks is known."""
        self._unusable: set[str] = set()
        """Servers whose last probe failed. The reason is logged once."""
        self._stop = asyncio.Event()

    def metrics(self) -> str:
        """No metrics besides the router's own."""
        return ""

    async def start(self, dispatcher: Dispatcher) -> None:
        """Probe all servers once, then repeatedly."""
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        for name, adapter in self._adapters.items():
            dispatcher.pool.add_replica(name, adapter, 0, admitted=False)
        await asyncio.gather(*(self._probe(dispatcher, name) for name in self._adapters))
        self._probes = [asyncio.create_task(self._keep_probing(dispatcher, name)) for name in self._adapters]

    async def run(self, dispatcher: Dispatcher) -> None:
        """Wait for SIGTERM, SIGINT or SIGHUP."""
        await self._stop.wait()

    async def _keep_probing(self, dispatcher: Dispatcher, name: str) -> None:
        interval_s = max(PROBE_INTERVAL_S, len(self._adapters) / MAX_PROBES_PER_S)
        while True:
            await asyncio.sleep(interval_s)
            await self._probe(dispatcher, name)

    async def _probe(self, dispatcher: Dispatcher, name: str) -> None:
        """Ask a server for its weight version. Admit it if it answers."""
        pool = dispatcher.pool
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                info = await self._adapters[name].get_model_info()
            _require_no_preferred_params(info)
            version = parse_weight_version(info.get("weight_version"))
            pool.update_replica(name, admitted=True, will_serve=True, weight_version=version)
            self._answered_at[name] = time.monotonic()
            self._unusable.discard(name)
        except Exception as error:  # noqa: BLE001 - any failure means that no usable server answers at this address
            if name not in self._unusable:
                logger.warning("replica %s receives no requests until it answers: %s", name, error)
            self._unusable.add(name)
            self._sized.discard(name)  # another server may answer at this address later
            self._adapters[name].connection.forget_server()
            silent_s = time.monotonic() - self._answered_at.get(name, 0.0)
            if silent_s < RETURN_TIMEOUT_S:
                pool.update_replica(name, admitted=False, will_serve=True)
            else:  # its connections might never be closed: the requests that run there continue elsewhere
                await self._adapters[name].close_connections()
                pool.add_replica(name, self._adapters[name], 0, admitted=False, will_serve=False)
            return
        if name not in self._sized:
            # A scheduler that is busy answers a later probe.
            with contextlib.suppress(VerlServerError, TimeoutError):
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    server_info = await self._adapters[name].get_server_info()
                pool.update_replica(name, dp_size=num_data_parallel_ranks(server_info))
                self._sized.add(name)

    async def close(self) -> None:
        """Stop probing and close the connections to the servers. The servers keep running."""
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for adapter in self._adapters.values():
            await adapter.close_connections()


def _require_no_preferred_params(info: Json) -> None:
    """Raise BadInputError for a server that changes sampling parameters: a router cannot know the changes."""
    if info.get("preferred_sampling_params"):
        raise BadInputError("start the server without preferred_sampling_params, and send them with each request")
