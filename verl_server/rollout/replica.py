"""One server of a fleet: its process, what is seen of it, and what became of it before."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any

import psutil

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import AdapterConfig
from verl_server.errors import ServerDiedError, ShutDownError, VerlServerError
from verl_server.rollout.health import Observation, ReplicaState

Json = dict[str, Any]


class Replica:
    """Its server is started again as often as it takes; the replica and its name stay.

    State is written under the manager's lock only.
    """

    def __init__(self, name: str, server_args: Mapping[str, Any], config: AdapterConfig) -> None:
        self.name, self._server_args, self._config = name, dict(server_args), config
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
        self._busy = (0.0, time.monotonic())
        """Processor seconds of its schedulers, and when they last grew."""

    @property
    def tp_size(self) -> int:
        return int(self._server_args.get("tp_size") or 1)

    def start(self) -> HttpServerEngineAdapter:
        """A new server. Raises StartupError; ShutDownError when the replica was stopped meanwhile."""

        def give_up() -> VerlServerError | None:
            return ShutDownError(f"replica {self.name} was stopped while it started") if self._stop.is_set() else None

        adapter = HttpServerEngineAdapter(config=self._config, give_up=give_up, **self._server_args)
        self._busy = (0.0, time.monotonic())
        return adapter

    def observe(self, requests: int, progress_at: float) -> Observation:
        """What is seen of it now; `requests` and `progress_at` are the router's."""
        now = time.monotonic()
        adapter = self.adapter
        process = None if adapter is None else adapter.asynchronous.process
        if process is None or process.wait_exit(0.0) is not None:
            return Observation(alive=False, requests=requests, quiet_s=0.0, idle_s=0.0)
        used = scheduler_seconds(process.pid or 0)
        if used != self._busy[0]:
            self._busy = (used, now)
        assert adapter is not None
        return Observation(
            alive=True,
            requests=requests,
            quiet_s=now - progress_at if requests else 0.0,
            idle_s=now - self._busy[1],
            paused=adapter.asynchronous.paused or bool(adapter.asynchronous.asleep),
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
            adapter.shutdown()

    def stop(self) -> None:
        """For good; also a start that is under way."""
        self._stop.set()
        self.end()


def scheduler_seconds(pid: int) -> float:
    """Processor time that the schedulers below a server have used, children included."""
    seconds = 0.0
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any("scheduler" in part for part in child.cmdline()):
                    times = child.cpu_times()
                    seconds += times.user + times.system
    return seconds
