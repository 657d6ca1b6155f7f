"""The servers of a TRL trainer: a fleet on rank 0, and the engine on every rank that pushes the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_server.config import AdapterConfig, RecoveryConfig, RouterConfig, WeightsConfig
from verl_server.engine.verl_engine import VerlEngine
from verl_server.integrations.trl.mesh import trainer_mesh
from verl_server.integrations.trl.version import require_trl
from verl_server.rollout.manager import RolloutManager

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class RolloutServers:
    """What generates for a trainer. `start_servers` makes it; make it yourself for an engine that you have."""

    engine: VerlEngine
    """Engine that pushes the weights, on every trainer rank."""
    fleet: RolloutManager | None
    """Fleet of the engine, on rank 0. None on the other ranks."""
    mesh: DeviceMesh
    """Mesh of the engine: all trainer ranks, with a group that can send objects between CPUs."""


@contextlib.contextmanager
def start_servers(
    model_path: str | Path,
    replicas: int = 1,
    *,
    config: AdapterConfig | None = None,
    weights: WeightsConfig | None = None,
    recovery: RecoveryConfig | None = None,
    router: RouterConfig | None = None,
    **server_args: Any,
) -> Iterator[RolloutServers]:
    """Start servers for a TRL trainer, and end them at the end of the context. Call it on all trainer ranks.

    Args:
        model_path: Checkpoint that the trainer starts from.
        replicas: Number of servers. A server that ends is started again with the current weights.
        config: Settings of each server, for example `AdapterConfig(server_python=...)` for servers in another
            environment than the trainer, and `engine_kind="vllm"`.
        weights: How weights travel to the servers.
        recovery: When a server counts as stalled, and how often it is started again.
        router: How requests are distributed over the servers.
        server_args: Arguments of the engine's server, for example `dtype="bfloat16"` and `context_length=8192`.

    Raises UnsupportedError for another version of TRL, BadInputError, StartupError, DeadlineError.
    """
    require_trl()
    config = config or AdapterConfig()
    server_args = {"model_path": str(model_path), **server_args}
    with trainer_mesh() as mesh, contextlib.ExitStack() as stack:
        fleet = None
        if mesh.get_local_rank() == 0:
            manager = RolloutManager(replicas, config=config, recovery=recovery, router=router, **server_args)
            fleet = stack.enter_context(manager)
        engine = VerlEngine(
            mesh, fleet=fleet, weights=weights, timeouts=config.timeouts, engine_kind=config.engine_kind, **server_args
        )
        yield RolloutServers(stack.enter_context(engine), fleet, mesh)
