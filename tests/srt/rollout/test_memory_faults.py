"""Releases and resumes of memory whose answers are lost, late or errors: no memory is released under a request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest
from aiohttp import web
from stub_servers import MemoryServer, serving

from verl_server import AdapterConfig, AsyncHttpServerEngineAdapter, HttpServerEngineAdapter
from verl_server.config import RolloutMode
from verl_server.engine.servers import HttpServers
from verl_server.errors import BadInputError, ServerBusyError, ServerError
from verl_server.rollout.fleet import Fleet, Replica
from verl_server.rollout.updates import FleetMemory
from verl_server.router.replica_status import ReplicaStats, ReplicaStatus
from verl_server.router.targets import RoutingTargets

LOADS, PAUSE, CONTINUE, FLUSH = "/v1/loads", "/pause_generation", "/continue_generation", "/flush_cache"
RELEASE = "/release_memory_occupation"
CONFIG = AdapterConfig(max_retries=0)


def with_adapter(server: MemoryServer, work: Callable[[AsyncHttpServerEngineAdapter], Awaitable[None]]) -> None:
    """Call `work` with an adapter of the running server."""

    async def run() -> None:
        async with (
            serving(web.Server(server.answer)) as url,
            AsyncHttpServerEngineAdapter.attach(url, config=CONFIG) as adapter,
        ):
            await work(adapter)

    asyncio.run(run())


def test_a_release_whose_answer_was_lost_does_not_spare_the_next_release_its_pause() -> None:
    """Memory is released only when no request runs and generation is paused."""
    server = MemoryServer()
    server.lost = [RELEASE]

    async def work(adapter: AsyncHttpServerEngineAdapter) -> None:
        with pytest.raises(ServerError):
            await adapter.release_memory_occupation()
        await adapter.resume_memory_occupation()
        server.paths.clear()
        await adapter.release_memory_occupation()
        assert server.paths == [LOADS, PAUSE, RELEASE]

    with_adapter(server, work)


def test_another_client_may_have_continued_after_a_release_whose_answer_was_lost() -> None:
    """A request runs again when the first client releases for the second time."""
    server = MemoryServer()
    server.lost = [RELEASE]

    async def work(one: AsyncHttpServerEngineAdapter) -> None:
        with pytest.raises(ServerError):
            await one.release_memory_occupation()
        async with AsyncHttpServerEngineAdapter.attach(one.base_url, config=CONFIG) as other:
            await other.resume_memory_occupation()
        server.num_requests = [1]
        with pytest.raises(ServerBusyError):
            await one.release_memory_occupation()
        assert server.paths.count(RELEASE) == 1, "the memory of a running request was released"

    with_adapter(server, work)


@pytest.mark.parametrize("path", [FLUSH, CONTINUE])
def test_a_resume_that_failed_before_generation_continued_can_be_repeated(path: str) -> None:
    server = MemoryServer()

    async def work(adapter: AsyncHttpServerEngineAdapter) -> None:
        await adapter.release_memory_occupation()
        server.refused = [path]
        with pytest.raises(ServerError):
            await adapter.resume_memory_occupation()
        await adapter.resume_memory_occupation()
        assert server.paths[-1] == CONTINUE
        with pytest.raises(BadInputError, match="nothing is released"):
            await adapter.resume_memory_occupation()

    with_adapter(server, work)


def test_a_release_that_could_not_be_undone_is_undone_by_the_next_call() -> None:
    """A fleet repeats the call of a server that has failed. Success would mean that the server generates."""
    server = MemoryServer()

    async def work(adapter: AsyncHttpServerEngineAdapter) -> None:
        await adapter.prepare_release()
        server.refused = [CONTINUE]
        with pytest.raises(ServerError):
            await adapter.cancel_release()
        server.paths.clear()
        await adapter.cancel_release()
        assert server.paths == [CONTINUE]
        await adapter.cancel_release()
        assert server.paths == [CONTINUE]

    with_adapter(server, work)


def test_an_engine_repeats_a_resume_that_failed_before_generation_continued() -> None:
    server = MemoryServer()

    async def work(adapter: AsyncHttpServerEngineAdapter) -> None:
        backend = HttpServers([HttpServerEngineAdapter.attach(adapter.base_url, config=CONFIG)], [])

        def resume_twice() -> None:
            backend.release_memory_occupation(None)
            server.refused = [CONTINUE]
            with pytest.raises(ServerError):
                backend.resume_memory_occupation(None)
            backend.resume_memory_occupation(None)
            assert server.paths[-1] == CONTINUE
            with pytest.raises(BadInputError, match="nothing is released"):
                backend.resume_memory_occupation(None)

        await asyncio.to_thread(resume_twice)

    with_adapter(server, work)


def test_a_release_after_a_short_failure_of_the_network_pauses_first() -> None:
    """The answers to the pause and to the call that undoes it were lost. Requests may run."""
    server = MemoryServer()
    server.lost = [PAUSE, CONTINUE]

    async def work(adapter: AsyncHttpServerEngineAdapter) -> None:
        with pytest.raises(ServerError):
            await adapter.release_memory_occupation()
        assert server.paths == [LOADS, PAUSE, CONTINUE]
        server.paths.clear()
        await adapter.release_memory_occupation()
        assert server.paths == [LOADS, PAUSE, RELEASE]

    with_adapter(server, work)


@pytest.mark.parametrize("step", [PAUSE, RELEASE])
def test_a_caller_that_leaves_a_release_leaves_no_paused_server(step: str) -> None:
    """The server has not paused, or released, when the caller leaves."""
    server = MemoryServer()
    server.slow_path = step

    async def work(adapter: AsyncHttpServerEngineAdapter) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await adapter.release_memory_occupation()
        if step == RELEASE:
            await adapter.resume_memory_occupation()
        assert server.paths[-1] == CONTINUE

    with_adapter(server, work)


def test_an_interrupted_release_holds_no_requests() -> None:
    """Ctrl-C while the routers are told to hold new requests."""

    class InterruptedTarget:
        """A router without requests. The next report to it is interrupted if `interrupts` is set."""

        interrupts = False

        def update_statuses(self, statuses: Sequence[ReplicaStatus]) -> None:
            if self.interrupts:
                self.interrupts = False
                raise KeyboardInterrupt

        def replica_stats(self, name: str) -> ReplicaStats | None:
            return None

        def wait_until_applied(self) -> None: ...

        def close(self) -> None: ...

    target, unused = InterruptedTarget(), cast(Any, None)
    targets = RoutingTargets([target])
    fleet = Fleet(lambda name: Replica(name, unused, {}, AdapterConfig(), {}), 0, targets, lambda event: None)
    fleet.create_replica()
    memory = FleetMemory(fleet, unused, targets, RolloutMode.HYBRID, "model", threading.Lock())
    target.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        memory.release(None)
    assert (fleet.is_open, fleet.released_memory) == (True, frozenset())
    fleet.close()


@pytest.mark.parametrize("ends", [True, False])
def test_a_request_that_the_load_still_counts_may_have_ended(ends: bool) -> None:
    server = MemoryServer()
    server.num_requests = [1, 1, 0] if ends else [1]

    async def work(adapter: AsyncHttpServerEngineAdapter) -> None:
        if ends:
            await adapter.release_memory_occupation()
        else:
            with pytest.raises(ServerBusyError, match="1 requests run"):
                await adapter.release_memory_occupation()

    with_adapter(server, work)
