"""One server of a fleet: its process, what is seen of it, and what became of it before."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import AdapterConfig, PauseMode
from verl_server.engine.backend import load_over
from verl_server.errors import NotReadyError, ServerDiedError, ShutDownError, VerlServerError
from verl_server.rollout.health import Observation, ReplicaState
from verl_server.rollout.launcher import Launcher
from verl_server.types import Member

logger = logging.getLogger(__name__)

Json = dict[str, Any]


class StartPreempted(NotReadyError):
    """A start was ended because the memory was lent."""


class Replica:
    """Its server is started again as often as it takes; the replica and its name stay.

    State is written under the manager's lock only.
    """

    def __init__(self, name: str, launcher: Launcher, server_args: Mapping[str, Any], config: AdapterConfig) -> None:
        self.name, self._launcher, self._server_args, self._config = name, launcher, dict(server_args), config
        self.state = ReplicaState.STARTING
        self.version = 0
        self.adapter: HttpServerEngineAdapter | None = None
        self.deaths: list[float] = []
        """When its servers ended (`time.monotonic`)."""
        self.error: VerlServerError | None = None
        """Why it is dead or was given up."""
        self.needs_update = False
        """What is staged cannot bring it up to date: it waits for the next update."""
        self._stop = threading.Event()
        self._way = threading.Event()
        self._starting = threading.Lock()
        self._busy = (0.0, time.monotonic())
        """Processor seconds of its schedulers, and when they last grew."""
        self._rested_at = 0.0
        """When it last had nothing to do, or was not to do it."""

    @property
    def member(self) -> Member:
        """Its server, as one that takes part in weight updates."""
        return Member(f"{self.name}/{len(self.deaths)}", int(self._server_args.get("tp_size") or 1))

    def start(self, serve: Callable[[Replica, HttpServerEngineAdapter], None]) -> None:
        """A new server, which `serve` takes into use; it is ended when that fails.

        Raises StartupError, ShutDownError when the replica was stopped meanwhile, StartPreempted.
        """

        def check_abort() -> VerlServerError | None:
            if self._stop.is_set():
                return ShutDownError(f"replica {self.name} was stopped while it started")
            return (
                StartPreempted(f"the memory of {self.name} was lent while it started") if self._way.is_set() else None
            )

        with self._starting:
            if (reason := check_abort()) is not None:
                raise reason
            adapter = self._launcher.start(self.name, self._server_args, self._config, check_abort)
            self._busy = (0.0, time.monotonic())
            try:
                serve(self, adapter)
            except BaseException:
                adapter.shutdown()
                raise

    def give_way(self, way: bool) -> None:
        """Whether a start is to end at once: the memory is somebody else's. Returns when none is under way."""
        if way:
            self._way.set()
            with self._starting:
                return
        self._way.clear()

    def observe(self, requests: int, progress_at: float) -> Observation:
        """What is seen of it now; `requests` and `progress_at` are the router's."""
        now = time.monotonic()
        adapter = self.adapter
        process = None if adapter is None else adapter.asynchronous.process
        if process is None or process.wait_exit(0.0) is not None:
            return Observation(alive=False, requests=requests, quiet_s=0.0, idle_s=0.0)
        used = process.scheduler_seconds()
        if used != self._busy[0]:
            self._busy = (used, now)
        assert adapter is not None
        paused = adapter.asynchronous.paused or bool(adapter.asynchronous.asleep)
        if paused or not requests:
            self._rested_at = now
        return Observation(
            alive=True,
            requests=requests,
            quiet_s=now - max(progress_at, self._rested_at),
            idle_s=now - max(self._busy[1], self._rested_at),
            paused=paused,
        )

    def died(self, why: str) -> VerlServerError:
        """How its server ended."""
        process = None if self.adapter is None else self.adapter.asynchronous.process
        if process is not None and self.adapter is not None and process.wait_exit(0.0) is not None:
            return process.died(self.adapter.base_url)
        return ServerDiedError(f"replica {self.name} {why}", replica=self.name)

    def end(self) -> None:
        """End its server's whole tree, if it has one."""
        adapter, self.adapter = self.adapter, None
        if adapter is not None:
            try:
                adapter.shutdown()
            except Exception:  # whatever it is, the replica goes on without this server
                logger.exception("the server of %s did not end in order", self.name)

    def stop(self) -> None:
        """For good; also a start that is under way."""
        self._stop.set()
        self.end()
        self._launcher.leave(self.name)


class OneReplica:
    """The server of one replica as a backend of its own, for catching up; `may` says whether it still is to."""

    def __init__(self, member: Member, adapter: HttpServerEngineAdapter, may: Callable[[], bool]) -> None:
        self._member, self._adapter, self._may = member, adapter, may

    @property
    def members(self) -> Sequence[Member]:
        if not self._may():
            raise VerlServerError(f"{self._member.name} need not or cannot catch up any more")
        return [self._member]

    def pause(self, mode: PauseMode) -> None:
        """It has no requests yet, whatever becomes of those of others."""
        self._adapter.pause_generation(PauseMode.RETRACT)

    def resume(self) -> None:
        self._adapter.continue_generation()

    def begin_weight_update(self) -> None:
        self._adapter.begin_weight_update()

    def load(self, wires: Sequence[Json], weight_version: str, flush_cache: bool) -> None:
        (wire,) = wires
        load_over(self._adapter, self._member.tp_size, wire, weight_version, flush_cache)

    def end_weight_update(self) -> None:
        self._adapter.end_weight_update()
