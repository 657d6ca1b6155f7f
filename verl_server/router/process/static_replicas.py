"""Servers that somebody else starts and stops. A router probes each of them repeatedly."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.adapter.sglang.replies import num_data_parallel_ranks
from verl_server.config import AdapterConfig, RemoteServer, Timeouts
from verl_server.errors import BadInputError, NotReadyError, VerlServerError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.replica_status import ReplicaStatus
from verl_server.router.request_checks import is_out_of_files
from verl_server.router.vllm_wire.calls import AwaitedError
from verl_server.router.vllm_wire.control import ReplicaControl, WeightRecord
from verl_server.types import Json, parse_weight_version
from verl_server.validation import checked_value

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
requests are refused, and its connections are closed. The connections of a server that answers stay open. Requests wait
as long for a server that answers and must receive no requests, unless the router itself lets it serve again."""
ServerCheck = Callable[[str, Json, float], Awaitable[None]]
"""Gets the name of a server, SGLang's `/model_info` of it, and the time since which the server has answered each probe
(`time.monotonic`). A server that was started again has another time."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class _Probed:
    """What is known of one server. Times are those of `time.monotonic`."""

    server: RemoteServer
    adapter: AsyncHttpServerEngineAdapter
    probe: asyncio.Task[None]
    answering_since: float | None = None
    """Time since which it has answered each probe. None: it has not answered the last one."""
    answered_at: float = 0.0
    """Time of its last answer."""
    awaited_at: float = 0.0
    """Time of the last probe that has admitted it, or has raised AwaitedError."""
    odd_info: str = ""
    """Why its `/server_info` cannot be used. It is logged once."""


class ProbedServers:
    """Servers as replicas of a dispatcher. A server that does not answer receives no requests until it does.

    Use it in the event loop of the dispatcher.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        check: ServerCheck | None = None,
        describe: Callable[[Exception], str] = str,
        *,
        weights: WeightRecord | None = None,
    ) -> None:
        """`describe`: returns the message for the error of a probe. `weights`: `check` compares the weight versions of
        the servers with it. Without it, requests go to those with the highest version: a server that was started again
        has the weights of its checkpoint.

        `check`: is called at each probe that a server answers. It raises an exception for a server that must receive
        no requests: AwaitedError for one that requests wait for. It needs a deadline of its own: `set_servers` waits
        for it.
        """
        self._dispatcher, self._check, self._describe = dispatcher, check, describe
        self._weights, self._checks_weights = weights or WeightRecord(), weights is None
        self._probed: dict[str, _Probed] = {}
        self.adapters: dict[str, AsyncHttpServerEngineAdapter] = {}
        """The adapters of the servers, by name."""
        self._addresses: dict[str, str] = {}
        """For each server process, by its id: the name of the server that receives its requests."""
        self.infos: dict[str, Json] = {}
        """SGLang's `/server_info` of the servers that have answered it, by name."""
        self.problems: dict[str, str] = {}
        """Why a server receives no requests, by name. The first reason is logged, and further ones if it answers."""

    async def set_servers(self, servers: Mapping[str, RemoteServer]) -> None:
        """Bring the replicas to `servers`, by name. New servers are probed once, and then repeatedly.

        Raises BadInputError, and changes nothing, for a value that is no `RemoteServer`.
        """
        servers = dict(servers) if isinstance(servers, Mapping) else servers  # pydantic takes no other mapping
        for name, server in checked_value("the servers by name", servers, dict[str, RemoteServer]).items():
            if name in self._probed and self._probed[name].server != server:
                await self._remove(name)
        for name in self._probed.keys() - servers.keys():
            await self._remove(name)
        config = AdapterConfig(Timeouts(connect_s=CONNECT_TIMEOUT_S), max_retries=0)
        first_probes = list[asyncio.Event]()
        for name in [name for name in servers if name not in self._probed]:
            server = servers[name]
            adapter = AsyncHttpServerEngineAdapter.attach(
                server.base_url, api_key=server.api_key, admin_api_key=server.admin_api_key, config=config
            )
            adapter.connection.http.on_restart = functools.partial(self._note_restart, adapter)
            self._dispatcher.pool.add_replica(name, adapter, 0, admitted=False)
            first_probes.append(asyncio.Event())
            probe = asyncio.create_task(self._keep_probing(name, first_probes[-1]))
            self._probed[name], self.adapters[name] = _Probed(server, adapter, probe), adapter
        await asyncio.gather(*(probe.wait() for probe in first_probes))

    async def probe_all(self) -> None:
        """Probe all servers now."""
        await asyncio.gather(*(self._probe(name) for name in self._probed))

    async def _remove(self, name: str) -> None:
        """Remove a server. Its running requests continue on other servers."""
        probed = self._probed[name]
        await _cancel([probed.probe])
        del self._probed[name], self.adapters[name]
        self.problems.pop(name, None)
        self.infos.pop(name, None)
        self._weights.forget_version(name)
        self._dispatcher.pool.apply_statuses([ReplicaStatus(name, None, 0, False, False, False, removed=True)])
        await probed.adapter.close_connections()

    async def _keep_probing(self, name: str, first_probe: asyncio.Event) -> None:
        """Probe a server again and again. `first_probe` is set after the first probe."""
        try:
            await self._probe(name)
        finally:
            first_probe.set()
        while True:
            await asyncio.sleep(max(PROBE_INTERVAL_S, len(self._probed) / MAX_PROBES_PER_S))
            await self._probe(name)

    async def _probe(self, name: str) -> None:
        """Ask a server for its weight version. Admit it if it answers."""
        pool, probed = self._dispatcher.pool, self._probed[name]
        try:
            info = await self._ask(probed)
            probed.answered_at = time.monotonic()
            probed.answering_since = probed.answering_since or probed.answered_at
            _require_no_preferred_params(info)
            self._require_other_process(name)
            version = parse_weight_version(info.get("weight_version"))
            if self._checks_weights:
                self._weights.note_version(pool, name, version)
            if self._check is not None:  # first: an update does not end what it finds, for example another tokenizer
                await self._check(name, info, probed.answering_since)
            if self._checks_weights:
                self._weights.require_current(name, version)
            pool.update_replica(name, admitted=True, will_serve=True, weight_version=version)
            probed.awaited_at = time.monotonic()
            self.problems.pop(name, None)
        except Exception as error:  # noqa: BLE001 - any failure means that no usable server answers at this address
            if is_out_of_files(error):  # this process cannot ask: that says nothing about the server
                return
            problem = self._describe(error) or f"no answer within {PROBE_TIMEOUT_S:g} s"
            is_new = isinstance(error, NotReadyError) and problem != self.problems.get(name)
            if is_new or name not in self.problems:
                logger.warning("replica %s receives no requests until it answers: %s", name, problem)
            self.problems[name] = problem
            self.infos.pop(name, None)  # another server may answer at this address later
            probed.adapter.connection.forget_server()
            now = time.monotonic()
            if now - probed.answered_at < RETURN_TIMEOUT_S:
                if isinstance(error, AwaitedError):
                    probed.awaited_at = now
                will_serve = now - probed.awaited_at < RETURN_TIMEOUT_S
                pool.update_replica(name, admitted=False, will_serve=will_serve)
            else:  # its connections might never be closed: the requests that run there continue elsewhere
                self._weights.forget_version(name)
                await probed.adapter.close_connections()
                pool.add_replica(name, probed.adapter, 0, admitted=False, will_serve=False)
            pool.replicas[name].problem = problem
            return
        if name not in self.infos:
            await self._ask_info(name, probed)

    def _require_other_process(self, name: str) -> None:
        """Raise BadInputError if requests go already to the server of this address, at another address."""
        url, process = self._probed[name].adapter.base_url, self._probed[name].adapter.connection.http.process
        if process is None:
            return
        first = self._addresses.setdefault(process, name)
        other = self._probed.get(first)
        if other is None or first in self.problems or other.adapter.connection.http.process != process:
            self._addresses[process] = name
        elif first != name:
            raise BadInputError(f"one server answers at {other.adapter.base_url} and at {url}: list it once")

    @staticmethod
    def _note_restart(adapter: AsyncHttpServerEngineAdapter) -> bool:
        """Another process answers at the address of a server: the next probe finds out what it serves."""
        adapter.connection.note_restart()
        return True

    async def _ask_info(self, name: str, probed: _Probed) -> None:
        """Ask a server for its `/server_info`, and read its model's files before many requests need all open files.

        A scheduler that is busy answers after a later probe.
        """
        with contextlib.suppress(VerlServerError, TimeoutError):
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                server_info = await probed.adapter.get_server_info()
            try:
                self._dispatcher.pool.update_replica(name, dp_size=num_data_parallel_ranks(server_info))
            except Exception as error:  # noqa: BLE001 - any value may come; the probes of the server must not end
                problem = f"{type(error).__name__}: {error}"
                if probed.odd_info != problem:
                    logger.warning("the /server_info of replica %s cannot be used: %s", name, problem)
                probed.odd_info = problem
            else:
                self.infos[name] = server_info
                with contextlib.suppress(Exception):  # a request reads them again, and reports the error
                    async with asyncio.timeout(PROBE_TIMEOUT_S):
                        await probed.adapter.connection.get_limits()

    async def _ask(self, probed: _Probed) -> Json:
        """SGLang's `/model_info` of a server. Raises the errors of the request."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await probed.adapter.get_model_info()
        except BaseException:
            probed.answering_since = None
            raise

    async def close(self) -> None:
        """Stop probing and close the connections to the servers. The servers keep running."""
        await _cancel([probed.probe for probed in self._probed.values()])
        for probed in self._probed.values():
            await probed.adapter.close_connections()


class StaticReplicas:
    """The replica source of `verl-server router`: a fixed list of servers.

    Raises BadInputError for an empty list or a server that is listed twice.
    """

    def __init__(self, servers: Sequence[RemoteServer], *, has_control: bool = False) -> None:
        """`has_control`: whether the router pauses the servers and updates their weights."""
        self._servers = servers_by_url(servers)
        self._has_control = has_control
        self._probed: ProbedServers | None = None
        self.control: ReplicaControl | None = None
        self._stop = asyncio.Event()

    def metrics(self) -> str:
        """No metrics besides the router's own."""
        return ""

    async def start(self, dispatcher: Dispatcher) -> None:
        """Probe all servers once, then repeatedly."""
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:  # as by nohup: the router outlives its terminal
                continue
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        weights = WeightRecord() if self._has_control else None
        self._probed = ProbedServers(dispatcher, self._check, _describe, weights=weights)
        if weights is not None:
            self.control = ReplicaControl(dispatcher.pool, self._probed.adapters, weights)
        await self._probed.set_servers(self._servers)

    async def _check(self, name: str, model_info: Json, answering_since: float) -> None:
        if self.control is not None:
            await self.control.check(name, model_info, answering_since)

    async def run(self, dispatcher: Dispatcher) -> None:
        """Wait for SIGTERM, SIGINT or SIGHUP."""
        await self._stop.wait()

    async def close(self) -> None:
        """Stop probing and close the connections to the servers. The servers keep running."""
        if self._probed is not None:
            await self._probed.close()


def servers_by_url(servers: Sequence[RemoteServer]) -> dict[str, RemoteServer]:
    """The servers by their URL. Raises BadInputError for an empty list or a server that is listed twice."""
    if not servers:
        raise BadInputError("a router needs at least one replica, got none")
    by_url = {server.base_url.rstrip("/"): server for server in servers}
    if len(by_url) != len(servers):
        raise BadInputError(f"a replica is listed twice: {', '.join(server.base_url for server in servers)}")
    return by_url


def _describe(error: Exception) -> str:
    """The message of a probe's error. The operator of `verl-server router` knows the keys by their variables."""
    key = error.details.get("key") if isinstance(error, VerlServerError) else None
    if key is None:
        return f"{error}"
    return (
        f"the server refused the {key} that the router sends (401). Start the router with the {key} of the server in "
        f"the environment variable VERL_SERVER_REPLICA_{key.upper()}. Requests do not succeed before"
    )


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _require_no_preferred_params(info: Json) -> None:
    """Raise BadInputError for a server that changes sampling parameters: a router cannot know the changes."""
    if info.get("preferred_sampling_params"):
        raise BadInputError("start the server without preferred_sampling_params, and send them with each request")
