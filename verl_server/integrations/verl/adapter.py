"""`ServerAdapter`: verl's rollout on each trainer rank. It pushes the weights of the trainer into the fleet."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.base import BaseRollout

from verl_server.config import RolloutMode
from verl_server.errors import UnsupportedError
from verl_server.integrations.verl import shards
from verl_server.integrations.verl.fleet_spec import make_fleet_spec
from verl_server.integrations.verl.replica import fleet_name
from verl_server.integrations.verl.trainer_engine import TrainerEngine
from verl_server.integrations.verl.versions import require_supported_version


class ServerAdapter(BaseRollout):  # type: ignore[misc] # verl has no types
    """verl makes one on each rank of the trainer, and one on each worker of a standalone or colocated replica.

    Those on workers only occupy the devices: the servers belong to the actor of the fleet.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        require_supported_version()
        super().__init__(config, model_config, device_mesh)
        spec = make_fleet_spec(self.config, self.model_config, RolloutMode.HYBRID)
        rank, world_size = int(os.environ["RANK"]), self._replica_world_size()
        self.replica_rank = rank // world_size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % world_size == 0
        self.sleep_level = 1 if spec.uses_lora else 2
        """verl reads and sets it: 1 if the base weights stay in memory."""
        self._engine: TrainerEngine | None = None
        if device_mesh is not None:
            shards.install()
            self._engine = TrainerEngine(fleet_name(RolloutMode.HYBRID), spec)

    def _replica_world_size(self) -> int:
        sizes = (
            self.config.tensor_model_parallel_size,
            self.config.data_parallel_size,
            self.config.pipeline_model_parallel_size,
        )
        tp, dp, pp = (int(size) for size in sizes)
        return tp * dp * pp

    async def resume(self, tags: list[str]) -> None:
        """Resume the memory of `tags` in all servers."""
        if self._engine is not None:
            await self._engine.resume(tags)

    async def update_weights(
        self,
        weights: Any,
        peft_config: Mapping[str, Any] | None = None,
        base_sync_done: bool = True,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **_: Any,
    ) -> None:
        """Push the weights, or the adapter of `peft_config`, into all servers of the fleet."""
        if wire_format != "named_tensors":
            raise UnsupportedError(f"the rollout verl_server does not take weights as {wire_format!r}")
        if self._engine is None:
            await _drain(weights)
        elif peft_config is None:
            await self._engine.update_weights(weights, global_steps)
        elif base_sync_done:
            await self._engine.load_adapter(weights, peft_config, global_steps)
        else:  # verl names the base weights as vLLM's layers with adapters do
            base = ((name.replace(".base_layer.", "."), tensor) for name, tensor in weights)
            await self._engine.update_weights(base, global_steps)

    async def release(self) -> None:
        """Do nothing: verl releases memory through the replicas."""


async def _drain(weights: Any) -> None:
    """Consume what a checkpoint engine yields on a worker of a replica: nothing, but verl waits for the end."""
    if inspect.isawaitable(weights):
        weights = await weights
    if hasattr(weights, "__aiter__"):
        async for _ in weights:
            pass
    else:
        for _ in weights:
            pass
