"""`ServerPauses`: pauses a router and its servers, and continues them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

from verl_server.adapter.client import AsyncHttpServerEngineAdapter
from verl_server.config import PauseMode
from verl_server.errors import DeadlineError, NotReadyError, VerlServerError
from verl_server.router.replica_pool import ReplicaPool
from verl_server.router.rl_wire.server_calls import Servers, call_all, is_lost_or_silent

WAIT_TIMEOUT_S = 240.0
"""Maximum number of seconds that a pause with mode `wait` waits for running requests. prime-rl waits for 300."""
IDLE_POLL_INTERVAL_S = 0.02
CONTINUE_TIMEOUT_S = 30.0
"""Seconds within which a server must continue generation. A server that does not is continued by its probe."""


class ServerPauses:
    """Which servers of a router are paused. While the pool is held, all requests wait in the router."""

    def __init__(self, pool: ReplicaPool, servers: Servers) -> None:
        """`servers`: the servers as they are at each time."""
        self._pool, self._servers = pool, servers
        self.paused: set[str] = set()
        """Names of the servers that were paused and have not confirmed that they continue."""

    async def pause(self, mode: PauseMode) -> None:
        """Hold the pool and pause all servers that answer.

        Raises NotReadyError at once for mode `wait` if running requests cannot end, because the servers are paused.
        """
        was_held, paused_before = self._pool.is_held, set(self.paused)
        if mode is PauseMode.WAIT and was_held and self.paused and self._pool.running_requests:
            raise NotReadyError(
                f"the servers are paused already, and {self._pool.running_requests} running requests cannot end before "
                "/resume: call /resume before a pause with mode wait, or use mode keep or abort"
            )
        self._pool.hold(True)

        async def pause_one(name: str, server: AsyncHttpServerEngineAdapter) -> None:
            self.paused.add(name)  # also if the answer is lost
            try:
                await server.pause_generation(mode)
            except VerlServerError as error:
                if "status" in error.details and name not in paused_before:
                    self.paused.discard(name)  # the server has refused
                raise

        try:
            if mode is PauseMode.WAIT:
                await self._until_idle()
                mode = PauseMode.RETRACT
            await call_all(self._servers, pause_one)
        except VerlServerError:
            if not was_held:
                with contextlib.suppress(VerlServerError):
                    await self._continue_servers(self.paused)
                leave_out(self._pool, self.paused)
                self._pool.hold(False)
            raise

    async def _until_idle(self) -> None:
        deadline = time.monotonic() + WAIT_TIMEOUT_S
        while self._pool.running_requests:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self._pool.running_requests} requests still run {WAIT_TIMEOUT_S:g} s after the pause: use mode "
                    "keep or abort",
                    operation="pause",
                    seconds=WAIT_TIMEOUT_S,
                )
            await asyncio.sleep(IDLE_POLL_INTERVAL_S)

    async def continue_all(self) -> None:
        """Continue generation on all servers, and then in the router. If it fails, requests still wait.

        A server that does not answer receives no requests until its probe has continued it.
        """
        await self._continue_servers(self._servers)
        leave_out(self._pool, self.paused)
        self._pool.hold(False)

    async def continue_missed(self, name: str) -> None:
        """Continue a server that has missed `/resume`. Does nothing for another one."""
        if name in self.paused:
            await self._servers[name].continue_generation()
            self.paused.discard(name)

    async def _continue_servers(self, names: Iterable[str]) -> None:
        """Continue generation on these servers. Those that do not answer stay in `paused`."""
        servers = {name: self._servers[name] for name in names if name in self._servers}
        missed = set(servers)

        async def continue_one(name: str, server: AsyncHttpServerEngineAdapter) -> None:
            try:
                async with asyncio.timeout(CONTINUE_TIMEOUT_S):
                    await server.continue_generation()
            except TimeoutError as error:
                raise DeadlineError(
                    f"{name} did not continue", operation="continue_generation", seconds=CONTINUE_TIMEOUT_S
                ) from error
            except VerlServerError as error:
                if "status" in error.details and name not in self.paused:
                    missed.discard(name)  # the server has refused, and this router has not paused it
                raise
            missed.discard(name)
            self.paused.discard(name)

        try:
            if servers:
                await call_all(servers, continue_one, is_lost_or_silent)
        finally:
            self.paused |= missed


def leave_out(pool: ReplicaPool, names: Iterable[str]) -> None:
    """Send no requests to these servers until their probes admit them."""
    for name in list(names):
        if name in pool.replicas:
            pool.update_replica(name, admitted=False)
