"""Where the servers of replicas run: one seam, two places. This one is this machine; the other is `ray_place`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Protocol

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import AdapterConfig
from verl_server.rollout.parallel_config import ParallelConfig, require_room
from verl_server.server.process import AbortCheck

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

    Without accelerators, the servers are forked by this process's forkserver (`server/shared_forkserver.py`), so that a
    replica starts and restarts in about 2 s.
    """

    is_near, trainer_host = True, "127.0.0.1"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, int] = {}
        self._devices = 1

    def admit(self, shape: ParallelConfig, replicas: int) -> None:
        self._devices = shape.devices
        require_room(shape, replicas, accelerators())

    def start(
        self, name: str, server_args: Mapping[str, Any], config: AdapterConfig, check_abort: AbortCheck
    ) -> HttpServerEngineAdapter:
        args = dict(server_args)
        if accelerators() is not None:
            args["base_gpu_id"] = int(args.get("base_gpu_id") or 0) + self._slot(name) * self._devices
        return HttpServerEngineAdapter(config=config, check_abort=check_abort, **args)

    def _slot(self, name: str) -> int:
        """The first free share of the devices."""
        with self._lock:
            taken = set(self._slots.values())
            return self._slots.setdefault(name, next(n for n in range(len(taken) + 1) if n not in taken))

    def leave(self, name: str) -> None:
        with self._lock:
            self._slots.pop(name, None)

    def close(self) -> None:
        """Does nothing: the servers belong to their replicas."""


def accelerators() -> int | None:
    """How many this machine has; None: it has none, and servers run on the processor."""
    import torch

    return torch.cuda.device_count() or None
