"""Routers when machines are lost, files are missing, callers leave or requests end servers. Servers are small stubs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import psutil
import pytest
from aiohttp import web
from aiohttp.client_reqrep import ConnectionKey
from stub_servers import serving

from verl_server import AsyncHttpServerEngineAdapter, RouterClient, RouterConfig
from verl_server.config import AdapterConfig, RemoteServer, Timeouts
from verl_server.errors import BadInputError, ServerDiedError, ServerError
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http import RouterHttpServer
from verl_server.router.process.static_replicas import ProbedServers, StaticReplicas
from verl_server.router.process.supervisor import RouterSupervisor
from verl_server.router.replica_status import ReplicaStatus

KEY = "callers-key"
REQUEST: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}
CHAT: dict[str, Any] = {"messages": []}
PATHS = {"/generate": REQUEST, "/v1/chat/completions": CHAT}


class Machine:
    """A machine with one server. After `is_lost` is set, nothing answers, and no connection is closed."""

    def __init__(self) -> None:
        self.is_lost = False
        self.arrived: list[str] = []
        """Paths of the requests for generations."""
        self.info_s = 0.0
        """Seconds until `/server_info` is answered."""
        self.ends = False
        """Whether a request for a generation ends the server."""
        self.answers = False
        """Whether requests for generations are answered."""

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if self.is_lost:
            await asyncio.sleep(3600.0)
        if request.path == "/server_info":
            await asyncio.sleep(self.info_s)
            return web.json_response({"model_path": "none", "incremental_streaming_output": True})
        if request.path == "/model_info":
            return web.json_response({"weight_version": "0"})
        self.arrived.append(request.path)
        if self.ends:
            assert request.transport is not None
            request.transport.abort()
        if not self.answers:
            await asyncio.sleep(3600.0)
        meta = {"weight_version": "0", "completion_tokens": 4, "finish_reason": {"type": "length", "length": 4}}
        return web.json_response({"output_ids": [0, 1, 2, 3], "meta_info": meta})


@contextlib.asynccontextmanager
async def http_router(dispatcher: Dispatcher) -> AsyncIterator[str]:
    """URL of an HTTP server over the dispatcher."""
    http_server = RouterHttpServer(dispatcher, KEY)
    async with serving(await http_server.create_server()) as url:
        try:
            yield url
        finally:
            await http_server.close()
            await dispatcher.close()


async def post(url: str, path: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, json=PATHS[path], headers={"x-api-key": KEY}) as answer,
    ):
        return answer.status, orjson.loads(await answer.read())


def status_of(adapter: AsyncHttpServerEngineAdapter | None) -> ReplicaStatus:
    return ReplicaStatus("a", adapter, 0, admitted=adapter is not None, suspect=False, will_serve=False, removed=False)


@pytest.mark.parametrize("path", PATHS)
def test_requests_do_not_wait_for_a_machine_that_the_fleet_has_lost(path: str) -> None:
    async def run() -> None:
        machine, dispatcher = Machine(), Dispatcher()
        async with serving(web.Server(machine.handle)) as server_url, http_router(dispatcher) as url:
            adapter = AsyncHttpServerEngineAdapter.attach(server_url, config=AdapterConfig(max_retries=0))
            dispatcher.pool.apply_statuses([status_of(adapter)])
            call = asyncio.create_task(post(url, path))
            while not machine.arrived:
                await asyncio.sleep(0.01)
            machine.is_lost = True
            adapter.fail(ServerDiedError("the fleet has lost the server"))  # as the router process does
            await adapter.close_connections()
            dispatcher.pool.apply_statuses([status_of(None)])
            status, _ = await asyncio.wait_for(call, 10.0)
            assert status == 503

    asyncio.run(run())


def test_a_router_process_gives_up_the_requests_of_removed_replicas() -> None:
    """Their machines are lost, so nothing closes the connections. The removals were not caused by the request."""

    async def run() -> None:
        *lost, well = machines = [Machine() for _ in range(4)]
        well.answers = True
        supervisor = await asyncio.to_thread(RouterSupervisor, RouterConfig(), None, lambda: "")
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, supervisor.close)
            client = await stack.enter_async_context(RouterClient(supervisor.url, supervisor.api_key))
            statuses = []
            for number, machine in enumerate(machines):
                url = await stack.enter_async_context(serving(web.Server(machine.handle)))
                adapter = AsyncHttpServerEngineAdapter.attach(url)
                statuses.append(replace(status_of(adapter), name=f"r{number}"))
            supervisor.update_statuses(statuses)
            await asyncio.to_thread(supervisor.wait_until_applied)
            call = asyncio.create_task(client.generate(**REQUEST))
            for machine, status in zip(lost, statuses, strict=False):
                while not machine.arrived:
                    await asyncio.sleep(0.01)
                machine.is_lost = True
                supervisor.update_statuses([replace(status, admitted=False, removed=True)])
            assert (await call)["meta_info"]["attempts"] == 4

    asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.mark.parametrize("path", PATHS)
def test_the_servers_of_removed_replicas_were_not_ended_by_their_requests(path: str) -> None:
    """A removal ends the server when the time is over that its requests had to finish."""

    async def run() -> None:
        *ended, well = machines = [Machine() for _ in range(5)]
        well.answers, dispatcher = True, Dispatcher()
        async with contextlib.AsyncExitStack() as stack:
            url = await stack.enter_async_context(http_router(dispatcher))
            adapters = []
            for number, machine in enumerate(machines):
                server_url = await stack.enter_async_context(serving(web.Server(machine.handle)))
                adapters.append(AsyncHttpServerEngineAdapter.attach(server_url, config=AdapterConfig(max_retries=0)))
                dispatcher.pool.apply_statuses([replace(status_of(adapters[-1]), name=f"r{number}")])
            call = asyncio.create_task(post(url, path))
            for number, machine in enumerate(ended):
                while not machine.arrived:
                    await asyncio.sleep(0.01)
                removed = replace(status_of(adapters[number]), name=f"r{number}", admitted=False, removed=True)
                dispatcher.pool.apply_statuses([removed])
                adapters[number].fail(ServerDiedError("the server was stopped"))
                await adapters[number].close_connections()
            assert (await call)[0] == 200

    asyncio.run(asyncio.wait_for(run(), 30.0))


def test_half_a_character_in_a_body_becomes_the_replacement_character() -> None:
    """In a request, which the server would refuse or which would end it, and in the server's list of models."""
    text = rb"a\ud83d \ude00 \ud83d\ude00 \\\\ud83d"
    bodies = {
        "/generate": rb'{"text": "%b", "rid": "\udc00"}' % text,
        "/v1/chat/completions": rb'{"messages": [{"role": "user", "content": "%b"}]}' % text,
        "/v1/completions": rb'{"model": "b\ufffd", "prompt": "%b"}' % text,
    }

    async def run() -> None:
        arrived, dispatcher = dict[str, Any](), Dispatcher()
        machine = Machine()
        machine.answers = True

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            if request.path == "/v1/models":
                model = rb'{"data": [{"id": "b\udfff", "owned_by": "sglang", "max_model_len": 99}]}'
                return web.Response(body=model, content_type="application/json")
            if request.path in bodies:
                arrived[request.path] = orjson.loads(await request.read())
            return await machine.handle(request)

        async with (
            serving(web.Server(handle)) as server_url,
            http_router(dispatcher) as url,
            AsyncHttpServerEngineAdapter.attach(server_url) as adapter,
            aiohttp.ClientSession() as session,
        ):
            dispatcher.pool.apply_statuses([status_of(adapter)])
            for path, body in bodies.items():
                async with session.post(url + path, data=body, headers={"x-api-key": KEY}) as answer:
                    assert answer.status == 200, (path, await answer.text())
        shown = "a\ufffd \ufffd \U0001f600 \\\\ud83d"
        assert arrived["/generate"]["text"] == arrived["/v1/completions"]["prompt"] == shown
        assert arrived["/v1/chat/completions"]["messages"][0]["content"] == shown

    asyncio.run(asyncio.wait_for(run(), 30.0))


def connections_to(url: str) -> list[socket.socket]:
    """Copies of the sockets of this process that are connected to the port of the URL."""
    port = urlsplit(url).port
    found = [one for one in psutil.Process().net_connections("tcp") if one.raddr and one.raddr.port == port]
    return [socket.socket(fileno=os.dup(one.fd)) for one in found]


@pytest.mark.parametrize("caller", ["client", "adapter", "router"])
def test_a_request_does_not_wait_for_ever_for_a_machine_that_is_gone(caller: str) -> None:
    """A machine that has vanished closes no connection. The kernel asks for it, and gives up."""

    async def run() -> None:
        machine, dispatcher = Machine(), Dispatcher()
        async with contextlib.AsyncExitStack() as stack:
            server_url = await stack.enter_async_context(serving(web.Server(machine.handle)))
            adapter = await stack.enter_async_context(AsyncHttpServerEngineAdapter.attach(server_url))
            client = await stack.enter_async_context(RouterClient(server_url, None))
            dispatcher.pool.add_replica("a", adapter, 0)
            router_url = await stack.enter_async_context(http_router(dispatcher))
            calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
                "client": lambda: client.generate(**REQUEST),
                "adapter": lambda: adapter.generate(**REQUEST),
                "router": lambda: post(router_url, "/v1/chat/completions"),
            }
            call = asyncio.create_task(calls[caller]())
            while not machine.arrived:
                await asyncio.sleep(0.01)
            connections = connections_to(server_url)
            assert connections
            for connection in connections:
                with connection:
                    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
                    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
            call.cancel()
            await asyncio.wait([call])

    asyncio.run(asyncio.wait_for(run(), 30.0))


@pytest.mark.parametrize("path", PATHS)
def test_requests_do_not_wait_for_a_server_that_stopped_to_answer(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("PROBE_TIMEOUT_S", 0.2), ("RETURN_TIMEOUT_S", 0.5), ("PROBE_INTERVAL_S", 0.05)):
        monkeypatch.setattr(f"verl_server.router.process.static_replicas.{name}", seconds)

    async def run() -> None:
        lost, well, dispatcher = Machine(), Machine(), Dispatcher()
        well.answers = True
        async with (
            serving(web.Server(lost.handle)) as lost_url,
            serving(web.Server(well.handle)) as well_url,
            http_router(dispatcher) as url,
        ):
            replicas = StaticReplicas([RemoteServer(lost_url), RemoteServer(well_url)])
            await replicas.start(dispatcher)
            calls = [asyncio.create_task(post(url, path)) for _ in range(4)]
            while not lost.arrived:
                await asyncio.sleep(0.01)
            lost.is_lost = True
            assert {status for status, _ in await asyncio.wait_for(asyncio.gather(*calls), 10.0)} == {200}
            lost.is_lost, lost.answers = False, True
            while not all(replica.admitted for replica in dispatcher.snapshot().replicas):
                await asyncio.sleep(0.01)
            await replicas.close()

    asyncio.run(asyncio.wait_for(run(), 30.0))


def test_a_router_that_starts_while_schedulers_are_busy_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/server_info` is answered by the scheduler, which loads weights. A probe waits for it for a shorter time."""
    for name, seconds in (("PROBE_TIMEOUT_S", 0.2), ("PROBE_INTERVAL_S", 0.05)):
        monkeypatch.setattr(f"verl_server.router.process.static_replicas.{name}", seconds)

    async def run() -> None:
        machine, dispatcher = Machine(), Dispatcher()
        machine.info_s, machine.answers = 2.5, True
        async with serving(web.Server(machine.handle)) as server_url:
            replicas = StaticReplicas([RemoteServer(server_url)])
            await replicas.start(dispatcher)
            replies = await asyncio.gather(*(dispatcher.generate(REQUEST) for _ in range(4)))
            assert [reply["output_ids"] for reply in replies] == 4 * [[0, 1, 2, 3]]
            await replicas.close()
            await dispatcher.close()

    asyncio.run(asyncio.wait_for(run(), 30.0))


@pytest.mark.parametrize("path", PATHS)
def test_a_request_that_ends_servers_ends_two(path: str) -> None:
    async def run() -> None:
        machines, dispatcher = [Machine() for _ in range(8)], Dispatcher()
        async with contextlib.AsyncExitStack() as stack:
            url = await stack.enter_async_context(http_router(dispatcher))
            for number, machine in enumerate(machines):
                machine.ends = True
                server_url = await stack.enter_async_context(serving(web.Server(machine.handle)))
                adapter = AsyncHttpServerEngineAdapter.attach(server_url, config=AdapterConfig(max_retries=0))
                dispatcher.pool.add_replica(f"r{number}", adapter, 0)
            status, answer = await post(url, path)
            assert (status, answer["error"]["type"]) == (502, "ServerDiedError")
            assert sum(len(machine.arrived) for machine in machines) == 2

    asyncio.run(asyncio.wait_for(run(), 30.0))


@pytest.mark.parametrize("path", PATHS)
def test_machines_that_accept_no_connection_are_not_ended_by_the_request(path: str) -> None:
    """The backlog of a listening socket is full, as if the packets of a lost machine got no answer."""
    config = AdapterConfig(Timeouts(connect_s=0.3), max_retries=0)

    async def run() -> None:
        well, dispatcher = Machine(), Dispatcher()
        well.answers = True
        async with contextlib.AsyncExitStack() as stack:
            url = await stack.enter_async_context(http_router(dispatcher))
            for number in range(3):
                listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
                for _ in range(4):
                    waiting = stack.enter_context(socket.socket())
                    waiting.setblocking(False)
                    waiting.connect_ex(listening.getsockname())
                lost_url = f"http://127.0.0.1:{listening.getsockname()[1]}"
                lost = AsyncHttpServerEngineAdapter.attach(lost_url, config=config)
                dispatcher.pool.add_replica(f"a{number}", lost, 0)
            well_url = await stack.enter_async_context(serving(web.Server(well.handle)))
            dispatcher.pool.add_replica("z", AsyncHttpServerEngineAdapter.attach(well_url, config=config), 0)
            status, _ = await post(url, path)
            assert status == 200

    asyncio.run(asyncio.wait_for(run(), 60.0))


def lack_of_files() -> ServerError:
    key = ConnectionKey("h", 1, False, True, None, None, None)
    error = ServerError("nothing answers")
    error.__cause__ = aiohttp.ClientConnectorError(key, OSError(errno.ENFILE, "file table overflow"))
    return error


def test_requests_wait_while_another_program_has_all_files() -> None:
    """No request runs whose end would close a connection, so each request tries again."""
    attempts = 0
    has_files = asyncio.Event()

    async def generate(**_: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if not has_files.is_set():
            raise lack_of_files()
        meta = {"weight_version": 0, "completion_tokens": 4, "finish_reason": {"type": "length", "length": 4}}
        return {"output_ids": [0, 1, 2, 3], "meta_info": meta}

    async def run() -> None:
        dispatcher = Dispatcher()
        server: Any = SimpleNamespace(base_url="http://server", api_key=None, generate=generate)
        dispatcher.pool.add_replica("a", server, 0)
        calls = [asyncio.create_task(dispatcher.generate(REQUEST)) for _ in range(20)]
        await asyncio.sleep(0.5)
        has_files.set()
        assert [reply["output_ids"] for reply in await asyncio.gather(*calls)] == 20 * [[0, 1, 2, 3]]
        assert attempts < 100, "attempts without files follow each other without a pause"

    asyncio.run(asyncio.wait_for(run(), 30.0))


def test_a_router_with_few_open_files_loses_no_request(tiny: Callable[..., Path]) -> None:
    """Many first requests come at the same time, to a router process that may open 100 files.

    It looks the name of the server up, which takes a file, and waits repeatedly for files.
    """
    folder = str(tiny("qwen3"))  # making a model in the event loop of the server would make the server silent

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        if request.path != "/generate":
            return web.json_response({"model_path": folder, "weight_version": "0"})
        await asyncio.sleep(0.2)
        meta = {"weight_version": "0", "completion_tokens": 1, "finish_reason": {"type": "length", "length": 1}}
        return web.json_response({"output_ids": [5], "text": "", "meta_info": meta})

    async def run() -> None:
        async with serving(web.Server(answer)) as url:
            server = url.replace("127.0.0.1", "localhost")
            command = ["--nofile=100:100", sys.executable, "-m", "verl_server.cli", "router", f"--replica={server}"]
            env = {**os.environ, "VERL_SERVER_API_KEY": KEY}
            process = await asyncio.create_subprocess_exec("prlimit", *command, stdout=asyncio.subprocess.PIPE, env=env)
            try:
                assert process.stdout is not None
                router = (await process.stdout.readline()).decode().split()[1]
                async with RouterClient(router, KEY) as client:
                    request: Any = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
                    calls = [client.generate(**request) for _ in range(400)]
                    replies = await asyncio.gather(*calls, return_exceptions=True)
                lost = [reply for reply in replies if isinstance(reply, BaseException)]
                assert not lost, (len(lost), lost[0])
            finally:
                process.terminate()
                await process.wait()

    asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.mark.parametrize("drain_timeout_s", [0.1, 60.0])
def test_a_router_that_is_told_to_end_waits_for_its_requests_as_long_as_it_may(drain_timeout_s: float) -> None:
    """Takes 13 s with 60 s: a router without the option cancels its requests after 10 s."""
    arrived = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/generate":
            return web.json_response({"weight_version": "0"})
        await request.read()
        arrived.set()
        await asyncio.sleep(12.0)
        meta = {"weight_version": "0", "completion_tokens": 1, "finish_reason": {"type": "length", "length": 1}}
        return web.json_response({"output_ids": [5], "text": "", "meta_info": meta})

    async def run() -> None:
        async with serving(web.Server(answer)) as server:
            command = [sys.executable, "-m", "verl_server.cli", "router", f"--replica={server}"]
            command.append(f"--drain-timeout={drain_timeout_s}")
            env = {**os.environ, "VERL_SERVER_API_KEY": KEY}
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=env)
            assert process.stdout is not None
            router = (await process.stdout.readline()).decode().split()[1]
            async with RouterClient(router, KEY, reconnect_timeout_s=0) as client:
                call = asyncio.ensure_future(client.generate(input_ids=[1], sampling_params={"max_new_tokens": 1}))
                await asyncio.wait({call, asyncio.ensure_future(arrived.wait())}, return_when="FIRST_COMPLETED")
                process.terminate()
                ended_at = time.monotonic()
                if drain_timeout_s > 1.0:
                    assert (await call)["output_ids"] == [5]
                else:
                    with pytest.raises(ServerError):
                        await call
                await process.wait()
                assert time.monotonic() - ended_at < 5.0 or drain_timeout_s > 1.0

    asyncio.run(asyncio.wait_for(run(), 60.0))


@pytest.mark.parametrize("rid", [None, "sample-1"])
def test_only_a_generation_with_a_rid_goes_on_without_its_caller(rid: str | None) -> None:
    async def run() -> None:
        machine, dispatcher = Machine(), Dispatcher()
        async with serving(web.Server(machine.handle)) as server_url:
            dispatcher.pool.add_replica("a", AsyncHttpServerEngineAdapter.attach(server_url), 0)
            call = asyncio.create_task(dispatcher.generate(REQUEST, rid=rid, is_remote=True))
            while not machine.arrived:
                await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.wait([call])
            await asyncio.sleep(0.2)
            (replica,) = dispatcher.snapshot().replicas
            assert replica.running_requests == (0 if rid is None else 1)
            await dispatcher.close()

    asyncio.run(asyncio.wait_for(run(), 30.0))


def test_prompts_with_log_probabilities_are_repeated_in_few_events() -> None:
    """SGLang sends the log probabilities of the prompt in each event of a stream."""
    intervals: list[int] = []

    async def stream(**request: Any) -> AsyncIterator[Any]:
        intervals.append(request["sampling_params"]["stream_interval"])
        meta = {"weight_version": 0, "completion_tokens": 6400, "finish_reason": {"type": "length", "length": 6400}}
        yield {"output_ids": [7] * 6400, "meta_info": meta}

    async def run() -> None:
        dispatcher = Dispatcher()
        server: Any = SimpleNamespace(base_url="http://server", api_key=None, generate_stream=stream)
        dispatcher.pool.add_replica("a", server, 0)
        request = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 6400}, "return_logprob": True}
        for start in (None, -1, 0):
            await dispatcher.generate({**request, "logprob_start_len": start})
        assert intervals == [6400 // 64, 6400 // 64, 1600]
        await dispatcher.close()

    asyncio.run(run())


def test_servers_may_come_in_any_mapping() -> None:
    """The function of a user that finds servers may return one that is read-only."""
    server = RemoteServer("http://127.0.0.1:1")

    async def scenario() -> None:
        probed = ProbedServers(Dispatcher())
        try:
            await probed.set_servers(MappingProxyType({"a": server}))
            for wrong in ([server], {"b": server.base_url}, server, None):
                with pytest.raises(BadInputError, match=r"pass .*RemoteServer"):
                    await probed.set_servers(wrong)  # type: ignore[arg-type]
            assert probed.adapters.keys() == probed.problems.keys() == {"a"}
            await probed.set_servers({"b": server})
            assert probed.adapters.keys() == probed.problems.keys() == {"b"}
        finally:
            await probed.close()

    asyncio.run(scenario())
