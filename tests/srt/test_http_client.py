"""The HTTP client of the adapters and the thread of the blocking adapter, with small HTTP servers instead of SGLang."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from helpers import free_port

from verl_server import AdapterConfig, AsyncHttpServerEngineAdapter
from verl_server.adapter.event_loop_thread import EventLoopThread
from verl_server.errors import BadInputError, ServerDiedError
from verl_server.server.cpu_time import SchedulerCpu
from verl_server.server.exit_status import ExitNotifier, ExitStatus
from verl_server.server.supervisor import ServerPids


class IdleSupervisor(ExitNotifier):
    """A `Supervisor` of a server that the test ends with `note_exit`."""

    pids = ServerPids(main=1, warden=None, workers=())
    log_path: Path | None = None

    def died(self, url: str) -> ServerDiedError:
        return ServerDiedError(f"the server at {url} ended", url=url)

    def keep_log(self) -> None:
        """The server has no log."""

    def stop(self, deadline_s: float = 10.0) -> None:
        """The server is none of this test's processes."""

    def scheduler_cpu(self) -> SchedulerCpu:
        return SchedulerCpu(0.0, 0.0)


def test_broken_calls_learn_the_end_of_the_server_without_threads() -> None:
    """The default executor of the event loop may be busy: with 32 broken calls, they waited for its threads in turn."""

    async def run() -> None:
        broken = 0

        def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal broken
            broken += 1
            writer.close()

        supervisor, may_end = IdleSupervisor(), threading.Event()
        server = await asyncio.start_server(close, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        config = AdapterConfig(max_retries=0)
        adapter = AsyncHttpServerEngineAdapter.attach(url, config=config, process=supervisor)
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, may_end.wait)
        try:
            calls = [asyncio.create_task(adapter.get_model_info()) for _ in range(32)]
            while broken < len(calls):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # the calls have noticed it, and wait for the end of the server
            supervisor.note_exit(ExitStatus("exit", 1, ""))
            for error in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10.0):
                assert isinstance(error, ServerDiedError), error
        finally:
            may_end.set()
            await busy
            server.close()
            await adapter.close_connections()

    asyncio.run(run())


def test_closed_event_loops_are_not_kept() -> None:
    """An adapter that several calls of `asyncio.run` use keeps the event loop of the last call at most."""
    loops: list[weakref.ref[Any]] = []

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"weight_version": "3"})

    async def run() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        assert (await adapter.get_model_info())["weight_version"] == 3
        await runner.cleanup()

    port = free_port()
    adapter = AsyncHttpServerEngineAdapter.attach(f"http://127.0.0.1:{port}")
    for _ in range(5):
        asyncio.run(run())
    gc.collect()
    assert sum(loop() is not None for loop in loops) <= 1


@pytest.mark.parametrize("call", [EventLoopThread.run, EventLoopThread.submit])
def test_the_thread_of_an_event_loop_is_not_used_in_a_forked_child(call: Any) -> None:
    """The child has no such thread, so a call would wait for ever."""
    thread = EventLoopThread()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call(thread, asyncio.sleep(0))
        except BadInputError as error:
            code = 0 if "forked child process" in error.message else 2
        finally:
            thread.close()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    thread.submit(asyncio.sleep(0)).result(10.0)
    thread.close()
