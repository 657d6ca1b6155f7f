"""`LocalLauncher`: starts the servers of a fleet on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.adapter.engine import get_engine
from verl_server.config import AdapterConfig
from verl_server.errors import BadInputError
from verl_server.rollout.modes import ParallelConfig, require_devices
from verl_server.server.environment import VISIBLE_DEVICES, may_have_accelerator, parse_devices
from verl_server.server.process import AbortCheck

# -- Base -------------------------------------------------------------------------------------------
# `Launcher`: the interface that starts the servers of a fleet.


@runtime_checkable
class Launcher(Protocol):
    """Starts the servers of one fleet, on this machine or others."""

    def reserve(self, parallel_config: ParallelConfig, replicas: int, env: Mapping[str, str]) -> None:
        """Prepare for that many replicas of that size. Raises BadInputError when there are not enough devices.

        `env`: what `start_server` gets.
        """

    def start_server(
        self,
        name: str,
        server_args: Mapping[str, Any],
        config: AdapterConfig,
        env: Mapping[str, str],
        check_abort: AbortCheck,
    ) -> HttpServerEngineAdapter:
        """Start a server for the replica `name` and wait until it is ready.

        `env`: environment variables to add to the server's environment. Raises StartupError and the error that
        `check_abort` returns.
        """

    def forget_replica(self, name: str) -> None:
        """Free the devices of the replica `name`, which starts no more servers."""

    def pin_to_local_machine(self) -> bool:
        """Start later servers on this machine only, where they can read this process's memory.

        Returns False, and changes nothing, when a server runs on another machine.
        """

    @property
    def trainer_host(self) -> str:
        """Address of this machine as the servers reach it."""

    def close(self) -> None:
        """End the use of the launcher. The fleet calls it when all servers have ended."""


# -- Local ------------------------------------------------------------------------------------------


class LocalLauncher:
    """Starts each server as a process tree on this machine. With accelerators, each replica has its own of them.

    Without accelerators, the servers are forked by this process's forkserver (`cpu/`), so that a
    replica starts and restarts in about 2 s.
    """

    trainer_host = "127.0.0.1"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, int] = {}
        """Share of the devices of each replica: slot n has the devices from n * devices."""
        self._devices = 1

    def reserve(self, parallel_config: ParallelConfig, replicas: int, env: Mapping[str, str]) -> None:
        if parallel_config.nnodes > 1:
            raise BadInputError(
                f"nnodes={parallel_config.nnodes}, but LocalLauncher starts servers on this machine only; "
                "use launcher=RayLauncher(), or leave nnodes out"
            )
        self._devices = parallel_config.devices
        visible = env.get(VISIBLE_DEVICES, os.environ.get(VISIBLE_DEVICES))
        hidden = f", because {VISIBLE_DEVICES}={visible}: pass env= with GPUs for the servers" if visible else ""
        require_devices(parallel_config, replicas, count_accelerators(env), hidden)

    def start_server(
        self,
        name: str,
        server_args: Mapping[str, Any],
        config: AdapterConfig,
        env: Mapping[str, str],
        check_abort: AbortCheck,
    ) -> HttpServerEngineAdapter:
        args = dict(server_args)
        if count_accelerators(env) is not None:
            engine = get_engine(config.engine_kind)
            args, env = engine.place_on_devices(args, env, self._slot(name) * self._devices, self._devices)
        return HttpServerEngineAdapter(config=config, env=env, check_abort=check_abort, **args)

    def _slot(self, name: str) -> int:
        """The replica's slot; the first free slot for a new replica."""
        with self._lock:
            taken = set(self._slots.values())
            return self._slots.setdefault(name, next(n for n in range(len(taken) + 1) if n not in taken))

    def forget_replica(self, name: str) -> None:
        with self._lock:
            self._slots.pop(name, None)

    def pin_to_local_machine(self) -> bool:
        """True: all servers run on this machine."""
        return True

    def close(self) -> None:
        """Does nothing: the servers belong to their replicas."""


def count_accelerators(env: Mapping[str, str]) -> int | None:
    """Number of accelerators that a server with the additional environment variables `env` sees.

    None without accelerators; servers then run on the CPU.
    """
    if not may_have_accelerator({**os.environ, **env}):
        return None
    if VISIBLE_DEVICES in env:
        return len(parse_devices(env[VISIBLE_DEVICES])) or None
    import torch

    return torch.cuda.device_count() or None
