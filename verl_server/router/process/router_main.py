"""The router process: one HTTP server over one dispatcher, whose replicas come from a source.

`verl-server router` calls `serve_static` with a fixed list of servers. A fleet starts this module as a program (see
`supervisor.py`) and sends the statuses of its replicas through standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol, Self

import orjson
import uvloop
from aiohttp import web

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.config import AdapterConfig, RemoteServer, RouterConfig
from verl_server.errors import BadInputError, ServerDiedError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http import RouterHttpServer
from verl_server.router.process.static_replicas import StaticReplicas
from verl_server.router.replica_status import ReplicaStatus
from verl_server.router.vllm_wire.control import ReplicaControl
from verl_server.server.launch import join_host_port
from verl_server.tracing import collect_garbage_rarely
from verl_server.types import Json

logger = logging.getLogger(__name__)


# -- Pipe replicas ----------------------------------------------------------------------------------
# Replicas of a fleet, which sends their statuses through the standard input of the router process.
#
# The wire is one JSON object per line. The parent (`supervisor.py`) sends the settings first: `{"host", "port",
# "api_key", "config", "parent_pid"}`. Then it sends changes: `{"sequence", "statuses", "metrics"}`, where each status
# is an `encode_status` object and `metrics` is the text of the fleet's own metrics. The router process writes up to
# ten reports per second to its standard output: `{"sequence", "replicas"}`, where `sequence` is the last applied
# change and `replicas` maps each name to `{"running_requests", "no_progress_s", "admitted"}`. It writes the next
# report only when the parent has read the last one.

REPORT_INTERVAL_S = 0.1
MAX_LINE_BYTES = 1 << 28
"""Maximum size of a line from the parent. A line may have the statuses of all replicas, about 3 KB for a failed one."""
MAX_LOG_TAIL_CHARACTERS = 2000
"""Maximum length of the end of a server's log in a status."""


class PipeReplicas:
    """The replica source of a fleet's router process. The process ends when its standard input ends."""

    def __init__(self, stdin: asyncio.StreamReader, settings: Json) -> None:
        self._stdin = stdin
        self.settings = settings
        """The first line from the parent, see the module's docstring."""
        self._adapters: dict[str, AsyncHttpServerEngineAdapter] = {}
        self._fleet_metrics = ""
        self._applied_sequence = 0

    @classmethod
    async def open(cls) -> Self:
        """Read the settings from standard input. Ignore signals of a terminal: the parent decides about the end."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        stdin = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
        return cls(stdin, orjson.loads(await stdin.readline()))

    control: None = None
    """The fleet pauses its replicas and updates their weights."""

    def metrics(self) -> str:
        """The fleet's own metrics, in the text format of Prometheus."""
        return self._fleet_metrics

    async def start(self, dispatcher: Dispatcher) -> None:
        """Does nothing: the parent sends the replicas to `run`."""

    async def run(self, dispatcher: Dispatcher) -> None:
        """Apply statuses until standard input ends, then end the process.

        The process ends without closing connections: callers send their requests again to the next router process.
        """
        reports = asyncio.create_task(self._report(dispatcher))
        exit_code = 1
        try:
            while (line := await self._stdin.readline()).endswith(
                b"\n"
            ):  # a parent that is killed may write half a line
                message = orjson.loads(line)
                before = dict(self._adapters)
                adapters = [
                    self._adapter(status["name"], status.pop("url"), status.pop("api_key"))
                    for status in message["statuses"]
                ]
                dispatcher.pool.apply_statuses(
                    [
                        ReplicaStatus(adapter=adapter, **status)
                        for adapter, status in zip(adapters, message["statuses"], strict=True)
                    ]
                )
                # The pool knows by now which replicas were removed: their requests have ended no server.
                await self._give_up([one for name, one in before.items() if self._adapters.get(name) is not one])
                self._applied_sequence, self._fleet_metrics = message["sequence"], message["metrics"]
            exit_code = 0
        except Exception:  # the process cannot continue; its parent starts another one
            logger.exception("the router process cannot apply a message of its parent")
        finally:
            reports.cancel()
            os._exit(exit_code)

    def _adapter(self, name: str, url: str | None, api_key: str | None) -> AsyncHttpServerEngineAdapter | None:
        """The adapter of a replica's server. None when the replica has no server."""
        known = self._adapters.get(name)
        if known is not None and (known.base_url != url or known.api_key != api_key):
            del self._adapters[name]
        if url is None:
            return None
        if name not in self._adapters:
            self._adapters[name] = AsyncHttpServerEngineAdapter.attach(
                url, api_key=api_key, config=AdapterConfig(max_retries=0)
            )
        return self._adapters[name]

    async def _give_up(self, adapters: Sequence[AsyncHttpServerEngineAdapter]) -> None:
        """Let the requests on these servers, which no replica has any more, fail immediately.

        If the machine of such a server was lost, its connections might never be closed.
        """
        for adapter in adapters:
            adapter.fail(ServerDiedError(f"the fleet has lost the server at {adapter.base_url}", url=adapter.base_url))
        for adapter in adapters:
            await adapter.close_connections()

    async def _report(self, dispatcher: Dispatcher) -> None:
        """Report observations to the parent until it ends.

        The parent's end must be noticed even if another of its children still holds the write end of standard input.
        Nothing blocks when the parent does not read, for example because it is busy or stopped.
        """
        stdout, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.Protocol, sys.stdout)
        while os.getppid() == self.settings["parent_pid"]:
            if not stdout.get_write_buffer_size():
                stdout.write(self._encode_report(dispatcher))
            await asyncio.sleep(REPORT_INTERVAL_S)
        os._exit(0)

    def _encode_report(self, dispatcher: Dispatcher) -> bytes:
        now = time.monotonic()
        replicas = {
            replica.name: {
                "running_requests": stats.running_requests,
                "no_progress_s": max(now - stats.last_progress_at, 0.0),
                "admitted": stats.admitted,
            }
            for replica in dispatcher.pool.replicas.values()
            for stats in (replica.stats(),)
        }
        return orjson.dumps({"sequence": self._applied_sequence, "replicas": replicas}) + b"\n"

    async def close(self) -> None:
        """Nothing to close: `run` ends the process."""


def encode_status(status: ReplicaStatus) -> Json:
    """A status as JSON, with the server's URL and API key instead of its adapter. A removed replica has no server."""
    fields = {name: value for name, value in vars(status).items() if name != "adapter"}
    adapter = None if status.removed else status.adapter
    return {
        **fields,
        "url": None if adapter is None else adapter.base_url,
        "api_key": None if adapter is None else adapter.api_key,
        "failure": None if status.failure is None else _shorten_log_tail(status.failure),
    }


def _shorten_log_tail(failure: Json) -> Json:
    """An error (`to_wire`) with the last MAX_LOG_TAIL_CHARACTERS of its `log_tail`."""
    details = failure["details"]
    if "log_tail" not in details:
        return failure
    return {**failure, "details": {**details, "log_tail": details["log_tail"][-MAX_LOG_TAIL_CHARACTERS:]}}


# -- Router main ------------------------------------------------------------------------------------

DRAIN_TIMEOUT_S = 5.0
"""Seconds that running requests may continue after the source has ended, by default."""
LISTEN_BACKLOG = 4096


class ReplicaSource(Protocol):
    """Where a router process gets its replicas from."""

    async def start(self, dispatcher: Dispatcher) -> None:
        """Add the replicas that are known at the start."""

    async def run(self, dispatcher: Dispatcher) -> None:
        """Keep the dispatcher's replicas up to date. Returns when the router must end."""

    def metrics(self) -> str:
        """Additional metrics, in the text format of Prometheus."""

    @property
    def control(self) -> ReplicaControl | None:
        """Pauses and weights of the replicas, after `start`. None: whoever sends the replicas controls them."""

    async def close(self) -> None:
        """Close the source's connections."""


async def serve(
    source: ReplicaSource,
    config: RouterConfig,
    *,
    host: str,
    port: int,
    api_key: str,
    admin_api_key: str | None = None,
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve requests until the source ends. `on_ready` receives the router's URL when it listens.

    `drain_timeout_s`: seconds that running requests may continue after that.
    `port` 0 takes any free port. Raises OSError when the address cannot be used.
    """
    dispatcher = Dispatcher(config)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(source.close)
        stack.push_async_callback(dispatcher.close)
        await source.start(dispatcher)
        http_server = RouterHttpServer(
            dispatcher, api_key, source.metrics, control=source.control, admin_api_key=admin_api_key
        )
        runner = web.ServerRunner(await http_server.create_server(), shutdown_timeout=drain_timeout_s)
        stack.push_async_callback(http_server.close)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, host, port, backlog=LISTEN_BACKLOG).start()
        address = runner.addresses[0]
        on_ready(f"http://{join_host_port(address[0], address[1])}")
        await source.run(dispatcher)


def serve_static(
    servers: Sequence[RemoteServer],
    *,
    host: str,
    port: int,
    api_key: str,
    admin_api_key: str | None,
    drain_timeout_s: float,
    on_ready: Callable[[str], None],
) -> None:
    """Run the router of `verl-server router` until SIGTERM, SIGINT or SIGHUP.

    `admin_api_key`: key of the routes that change weights. None: these routes are not offered. `drain_timeout_s`: see
    `serve`. Raises BadInputError for an unusable list of servers and for equal keys, OSError when the address cannot be
    used.
    """
    if admin_api_key is not None and hmac.compare_digest(admin_api_key.encode(), api_key.encode()):
        raise BadInputError("the admin key of a router must differ from its API key, which agents have")
    source = StaticReplicas(servers, has_control=admin_api_key is not None)
    collect_garbage_rarely()
    uvloop.run(
        serve(
            source,
            RouterConfig(),
            host=host,
            port=port,
            api_key=api_key,
            admin_api_key=admin_api_key,
            drain_timeout_s=drain_timeout_s,
            on_ready=on_ready,
        )
    )


async def _serve_pipe() -> None:
    source = await PipeReplicas.open()
    settings = source.settings
    await serve(
        source,
        RouterConfig(**settings["config"]),
        host=settings["host"],
        port=settings["port"],
        api_key=settings["api_key"],
    )


def main() -> None:
    """Run the router process of a fleet."""
    collect_garbage_rarely()
    with contextlib.suppress(BrokenPipeError):
        uvloop.run(_serve_pipe())


if __name__ == "__main__":
    main()
