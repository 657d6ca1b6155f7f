"""`Launcher`: the interface that starts the servers of a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from verl_server.adapter import HttpServerEngineAdapter
from verl_server.config import AdapterConfig
from verl_server.rollout.parallel_config import ParallelConfig
from verl_server.server.supervisor import AbortCheck


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
