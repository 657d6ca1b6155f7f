"""Where the servers of replicas run: one seam, two places. This one is this machine; the other is `ray_place`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import AdapterConfig
from verl_server.errors import DeadlineError
from verl_server.rollout.parallel_config import ParallelConfig, require_room
from verl_server.server.forkserver import Forkserver
from verl_server.server.process import AbortCheck, WardenFactory, spawn_warden

logger = logging.getLogger(__name__)

Json = dict[str, Any]


class Launcher(Protocol):
    def admit(self, shape: ParallelConfig, replicas: int) -> None:
        """Raises BadInputError when it has no room for that many replicas of that shape."""

    def start(
        self, name: str, server_args: Mapping[str, Any], config: AdapterConfig, check_abort: AbortCheck
    ) -> HttpServerEngineAdapter:
        """A server for the replica `name`, when it is ready. Raises StartupError and what `check_abort` returns."""

    def leave(self, name: str) -> None:
        """The replica `name` will start no more servers."""

    @property
    def is_near(self) -> bool:
        """Whether all servers run on this machine, where they can read this process's memory."""

    @property
    def trainer_host(self) -> str:
        """This machine's address as the servers reach it."""

    def close(self) -> None: ...


class LocalLauncher:
    """Each server is a process tree of this machine. With accelerators, each replica has its own of them.

    Without, servers are forked by a forkserver, which takes ten seconds of imports out of each start and restart.
    """

    is_near, trainer_host = True, "127.0.0.1"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, int] = {}
        self._devices = 1
        self._forkserver: Forkserver | None = None
        self._forkservers_work = True

    def admit(self, shape: ParallelConfig, replicas: int) -> None:
        self._devices = shape.devices
        require_room(shape, replicas, accelerators())

    def start(
        self, name: str, server_args: Mapping[str, Any], config: AdapterConfig, check_abort: AbortCheck
    ) -> HttpServerEngineAdapter:
        args = dict(server_args)
        if accelerators() is not None:  # whose driver does not survive a fork
            args["base_gpu_id"] = int(args.get("base_gpu_id") or 0) + self._slot(name) * self._devices
            return HttpServerEngineAdapter(config=config, check_abort=check_abort, **args)
        warden = self._wardens(config, check_abort)
        return HttpServerEngineAdapter(config=config, check_abort=check_abort, warden_factory=warden, **args)

    def _wardens(self, config: AdapterConfig, check_abort: AbortCheck) -> WardenFactory:
        """The forkserver's, when it is ready; a killed one is replaced."""
        with self._lock:
            if self._forkserver is not None and self._forkserver.ended:
                self._forkservers_work = self._forkservers_work and not self._forkserver.is_unfit
                self._forkserver.close()
                self._forkserver = None
            if self._forkserver is None and self._forkservers_work:
                self._forkserver = Forkserver()
            forkserver = self._forkserver
        if forkserver is None:
            return spawn_warden
        try:
            return (
                forkserver.warden if forkserver.wait_ready(config.timeouts.start_s / 2, check_abort) else spawn_warden
            )
        except DeadlineError as error:
            logger.warning("%s; servers are started without it", error.message)
            forkserver.close()  # it hangs: the next start makes another
            return spawn_warden

    def _slot(self, name: str) -> int:
        """The first free share of the devices."""
        with self._lock:
            taken = set(self._slots.values())
            return self._slots.setdefault(name, next(n for n in range(len(taken) + 1) if n not in taken))

    def leave(self, name: str) -> None:
        with self._lock:
            self._slots.pop(name, None)

    def close(self) -> None:
        """Its servers belong to their replicas."""
        with self._lock:
            forkserver, self._forkserver = self._forkserver, None
        if forkserver is not None:
            forkserver.close()


def accelerators() -> int | None:
    """How many this machine has; None: it has none, and servers run on the processor."""
    import torch

    return torch.cuda.device_count() or None
