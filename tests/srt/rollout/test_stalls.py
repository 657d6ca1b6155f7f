"""Which replicas count as stalled: signs of life of busy, hung and compiling schedulers; callers that read slowly."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from helpers import wait_until

from verl_server.config import RecoveryConfig
from verl_server.rollout.fleet import Replica, ReplicaState, SignsOfLife, classify_health, look_interval_s
from verl_server.router.dispatcher import Dispatcher
from verl_server.router.http import RouterHttpServer
from verl_server.server.process import SchedulerCpu, SchedulerCpuReader
from verl_server.server.warden import processes
from verl_server.server.warden.processes import list_descendants, read_tree

RECOVERY = RecoveryConfig(stall_timeout_s=0.8, hard_stall_timeout_s=100.0)


class ObservedServer:
    """A server with requests that produces no token. `answers`: whether its schedulers answer questions."""

    def __init__(self, device: str) -> None:
        self.device, self.answers = device, True
        self.cpu = SchedulerCpu(0.0, 0.0)
        self.process: Any = self
        self.paused, self.released_memory = False, frozenset[str]()
        self.questions = 0

    def ask_schedulers(self) -> Future[Any]:
        self.questions += 1
        answer: Future[Any] = Future()
        if self.answers:
            answer.set_result({"device": self.device})
        return answer

    def scheduler_cpu(self) -> SchedulerCpu:
        return self.cpu

    def wait_exit(self, timeout_s: float) -> None:
        return None


def states_of(server: ObservedServer, own_s: float = 0.0, helpers_s: float = 0.0, seconds: float = 1.5) -> set[str]:
    """The states of a replica that has requests and produces no token. The CPU times grow by that much in each look."""
    unused: Any = None
    replica = Replica("replica", unused, {}, unused, {})
    adapter: Any = server
    replica.adapter, replica._signs = adapter, SignsOfLife(adapter)
    started, states = time.monotonic(), set()
    while time.monotonic() < started + seconds:
        observation = replica.observe(3, started, look_interval_s(RECOVERY))
        states.add(classify_health(observation, RECOVERY).value)
        server.cpu = SchedulerCpu(server.cpu.own_s + own_s, server.cpu.helpers_s + helpers_s)
        time.sleep(0.05)
    return states


def hung(device: str) -> ObservedServer:
    """A server whose schedulers answered when it was ready, and do not any more."""
    server = ObservedServer(device)

    def ask_schedulers() -> Future[Any]:
        answer = ObservedServer.ask_schedulers(server)
        server.answers = False
        return answer

    server.ask_schedulers = ask_schedulers  # type: ignore[method-assign]
    return server


def test_a_scheduler_that_answers_is_not_stalled() -> None:
    assert states_of(ObservedServer("cuda")) == {"healthy"}


def test_a_hung_scheduler_on_an_accelerator_is_stalled_although_it_uses_a_core() -> None:
    assert states_of(hung("cuda"), own_s=0.05) == {"healthy", "suspect", "dead"}


def test_a_scheduler_that_compiles_kernels_is_not_stalled() -> None:
    """It does not answer meanwhile. The compiler runs as a program of its own."""
    assert states_of(hung("cuda"), helpers_s=0.05) == {"healthy"}


def test_a_long_step_without_an_accelerator_is_no_stall() -> None:
    assert states_of(hung("cpu"), own_s=0.05) == {"healthy"}
    assert states_of(hung("cpu")) == {"healthy", "suspect", "dead"}


def test_a_time_in_which_nobody_looked_is_no_stall() -> None:
    """The process that observes was suspended. A server that has hung meanwhile is found later."""
    unused: Any = None
    replica = Replica("replica", unused, {}, unused, {})
    server: Any = hung("cuda")
    replica.adapter, replica._signs = server, SignsOfLife(server)
    started, interval_s = time.monotonic(), look_interval_s(RECOVERY)
    replica.observe(3, started, interval_s)
    time.sleep(RECOVERY.stall_timeout_s + 0.2)
    for _ in range(3):
        assert classify_health(replica.observe(3, started, interval_s), RECOVERY) is ReplicaState.HEALTHY
    seen = set()
    while time.monotonic() < started + 3 * RECOVERY.stall_timeout_s:
        seen.add(classify_health(replica.observe(3, started, interval_s), RECOVERY))
        time.sleep(interval_s / 2)
    assert ReplicaState.DEAD in seen


def test_a_server_that_produces_tokens_is_not_asked() -> None:
    """No look for signs of life costs anything while tokens arrive or no request runs."""
    server = ObservedServer("cuda")
    unused: Any = None
    replica = Replica("replica", unused, {}, unused, {})
    adapter: Any = server
    replica.adapter, replica._signs = adapter, SignsOfLife(adapter)
    assert server.questions == 1, "when it is ready, for its device"
    for _ in range(100):
        observation = replica.observe(3, time.monotonic() - 0.01, look_interval_s(RECOVERY))
        assert classify_health(observation, RECOVERY) is ReplicaState.HEALTHY
        replica.observe(0, 0.0, look_interval_s(RECOVERY))
    assert server.questions == 1


# -- CPU time ----------------------------------------------------------------------------------------

#: A server main with a scheduler, which starts a compiler when it gets SIGUSR1.
SERVER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], "sglang::scheduler"])
subprocess.Popen(["sleep", "600", ])
time.sleep(600)
"""
SCHEDULER = """
import signal, subprocess, sys, time
BUSY = "import time; end = time.monotonic() + 600\\nwhile time.monotonic() < end: pass"
signal.signal(signal.SIGUSR1, lambda *_: subprocess.Popen([sys.executable, "-c", BUSY]))
print("ready", flush=True)
while True:
    time.sleep(600)
"""


def test_cpu_time_of_schedulers_and_of_their_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, SCHEDULER], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        (scheduler,) = (
            pid for pid in read_tree(server.pid) if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        assert set(read_tree(server.pid)) == set(list_descendants(server.pid))
        reader = SchedulerCpuReader(server.pid)
        first = reader.read()
        assert first.own_s >= 0.0
        monkeypatch.setattr(processes, "list_descendants", None)  # it reads all of `/proc`
        assert reader.read().helpers_s == 0.0
        os.kill(scheduler, signal.SIGUSR1)
        wait_until(lambda: reader.read().helpers_s > 0.1, 20.0, "the program of the scheduler is not found")
        own_s = reader.read().own_s
        wait_until(lambda: reader.read().helpers_s > 0.3, 20.0, "its time does not grow")
        assert reader.read().own_s - own_s < 0.1
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        assert server.stdout is not None
        server.stdout.close()


# -- callers that read slowly ------------------------------------------------------------------------


async def serve(handler: Any) -> tuple[web.ServerRunner, str]:
    """A real HTTP server with one handler; its runner and its URL."""
    server = handler if isinstance(handler, web.Server) else web.Server(handler)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"


async def answer_with_much(request: web.BaseRequest) -> web.StreamResponse:
    """A replica that sends more than all buffers on the way hold."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(64):
        await response.write(bytes(1 << 20))
    return response


async def answer_nothing(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: begin\n\n")
    await asyncio.sleep(600.0)
    return response


@pytest.mark.parametrize("handler", [answer_with_much, answer_nothing])
def test_a_caller_that_reads_slowly_is_no_stall_of_the_replica(handler: Any) -> None:
    """The replica makes no progress because its answer is not read. A replica that sends nothing makes no progress."""

    class Server:
        api_key = None

        def __init__(self, base_url: str) -> None:
            self.base_url = base_url

    async def run() -> None:
        replica_runner, replica_url = await serve(handler)
        dispatcher = Dispatcher()
        server: Any = Server(replica_url)
        dispatcher.pool.add_replica("replica", server, 0)
        router = RouterHttpServer(dispatcher, None)
        router_runner, router_url = await serve(await router.create_server())
        replica = dispatcher.pool.replicas["replica"]
        async with (
            aiohttp.ClientSession(read_bufsize=1 << 16) as session,
            session.post(f"{router_url}/v1/chat/completions", json={}) as answer,
        ):
            await answer.content.readany()
            await asyncio.sleep(1.0)
            stats = replica.stats()
            assert stats.running_requests == 1
            no_progress_s = time.monotonic() - stats.last_progress_at
            if handler is answer_nothing:
                assert no_progress_s > 0.5
            else:
                assert no_progress_s < 0.4
                received = 0
                while chunk := await answer.content.readany():
                    received += len(chunk)
                assert received > 60 << 20
        for _ in range(100):
            await asyncio.sleep(0.02)
            if not replica.running_requests:
                break
        assert (replica.running_requests, replica.waiting_callers) == (0, 0)
        await router.close()
        await dispatcher.close()
        await router_runner.cleanup()
        await replica_runner.cleanup()

    asyncio.run(run())
