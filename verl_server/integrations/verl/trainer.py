"""verl's side of the trainer ranks: its checkpoint engine, shards of its models, and its rollout."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

from verl.workers.rollout.base import BaseRollout

from verl_server.config import RolloutMode
from verl_server.errors import UnsupportedError
from verl_server.integrations.verl.replica import fleet_name
from verl_server.integrations.verl.settings import make_fleet_spec, require_supported_version
from verl_server.integrations.verl.trainer_engine import TrainerEngine, find_fleet

# -- Checkpoint engine ------------------------------------------------------------------------------
# verl's checkpoint engine `verl_server`: weights for replicas with devices of their own.
#
# `rollout.checkpoint_engine.backend=verl_server` chooses it. The trainer ranks push to the servers themselves, so the
# workers of the replicas receive nothing.

BACKEND = "verl_server"


def register() -> None:
    """Register the engine with verl. May be called again."""
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

    @CheckpointEngineRegistry.register(BACKEND)
    class ServerCheckpointEngine(CheckpointEngine):  # type: ignore[misc] # verl has no types
        """One on each trainer rank, and one on each worker of a replica."""

        def __init__(self, bucket_size: int, is_master: bool = False, **_: Any) -> None:
            self._engine: Any = None

        def prepare(self) -> dict[str, Any]:
            return {}

        @classmethod
        def build_topology(
            cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
        ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
            return {}, {}

        def init_process_group(self) -> None:
            """Do nothing: `VerlEngine` connects the ranks."""

        def finalize(self) -> None:
            """Do nothing: the staging memory is kept for the next update."""

        async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
            if self._engine is None:
                self._engine = await make_engine()
            await self._engine.update_weights(weights, global_steps)

        def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, Any]]:
            return iter(())


async def make_engine() -> Any:
    """The engine of this trainer rank for the standalone fleet."""
    name = fleet_name(RolloutMode.STANDALONE)
    return TrainerEngine(name, await find_fleet(name).get_spec.remote())


# -- Shards -----------------------------------------------------------------------------------------
# Weights as shards instead of verl's gathered tensors.
#
# verl's `FSDPEngine.get_per_tensor_param` gathers every tensor on every rank. `VerlEngine` needs no gathered tensors:
# each rank copies its shard to its place in the staging memory. So this module replaces the method, only in the
# processes of a run with the rollout `verl_server`. verl's own method is used for what is not a plain FSDP2 model:
# FSDP1, LoRA, quantization-aware training, and models whose experts verl stores as one tensor.


def install() -> None:
    """Replace the method of verl's FSDP engine. May be called again."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    original = FSDPEngine.get_per_tensor_param
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def get_per_tensor_param(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_plain(self):
            return _shards(self), None
        return original(self, *args, **kwargs)

    FSDPEngine.get_per_tensor_param = get_per_tensor_param


def _is_plain(engine: Any) -> bool:
    """Whether the state dict of the engine's module has the tensors that the servers load, as shards of FSDP2."""
    from verl.utils.fsdp_utils import fsdp_version

    module = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
    return (
        fsdp_version(engine.module) == 2
        and not hasattr(module, "peft_config")
        and not getattr(engine, "_qat_enabled", False)
        and not _fuses_experts(engine)
    )


def _fuses_experts(engine: Any) -> bool:
    """Whether verl splits fused experts of this model into tensors of single experts (`unfuse_moe_params`)."""
    config = engine.model_config.hf_config
    parts = (config, getattr(config, "text_config", None))
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(getattr(part, name, None) for part in parts for name in names)


def _shards(engine: Any) -> Iterator[tuple[str, Any]]:
    """Names and shards. Each shard is moved to the device when it is asked for, if it was offloaded."""
    from torch.distributed.tensor import DTensor
    from verl.utils.device import get_device_id
    from verl.utils.model import convert_weight_keys

    module = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
    for name, param in convert_weight_keys(engine.module.state_dict(), module).items():
        yield name, param.to(get_device_id(), non_blocking=True) if isinstance(param, DTensor) else param


# -- Adapter ----------------------------------------------------------------------------------------
# `ServerAdapter`: verl's rollout on each trainer rank. It pushes the weights of the trainer into the fleet.


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
            install()
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
