"""The classes that verl makes: its replicas, the rollout of its trainer ranks, and its checkpoint engine."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.workers.config import HFModelConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode as VerlMode
from verl.workers.rollout.replica import RolloutReplica

from verl_server.config import RolloutMode
from verl_server.errors import UnsupportedError
from verl_server.integrations.verl.fleet_actor import FleetActor
from verl_server.integrations.verl.ray_fleet import TrainerEngine, find_fleet, watch
from verl_server.integrations.verl.settings import FleetSpec, make_fleet_spec, require_supported_version
from verl_server.rollout.launchers.ray_launcher import NodePlace
from verl_server.server.environment import VISIBLE_DEVICES

# -- Replica ----------------------------------------------------------------------------------------
# `Replica`: verl's view of one server. It asks the actor of the fleet to start the server.

MAX_CONCURRENCY = 1 << 20
"""Maximum number of calls that run in the actor of a fleet at the same time. Above the number of requests of any run:
requests that are held must not keep the call out that releases them."""


def fleet_name(mode: RolloutMode, suffix: str = "") -> str:
    """Name of the actor of a fleet of this job. The suffix names a reward model or a teacher.

    Several jobs can share a Ray namespace, so the name has the id of the job.
    """
    return f"verl_server_{mode.value}{suffix}_{ray.get_runtime_context().get_job_id()}"


class ReplicaHandle:
    """What verl calls as the handle of a server: the actor of the fleet, and the name of the replica for requests."""

    def __init__(self, actor: Any, replica: str) -> None:
        self._actor, self._replica = actor, replica

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplicaHandle, (self._actor, self._replica)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._actor, name)
        if name != "generate":
            return method
        return SimpleNamespace(remote=functools.partial(method.remote, replica=self._replica))


class Replica(RolloutReplica):  # type: ignore[misc] # verl has no types
    """One server. The servers of the policy are one fleet; a reward model and each teacher have fleets of their own."""

    async def launch_servers(self) -> None:
        """Start the server next to the workers of this replica."""
        mode = self._mode()
        role = "_reward" * self.is_reward_model + "_teacher" * self.is_teacher_model
        places = await _find_places(self.workers, self.gpus_per_replica_node)
        # verl asks a reward model over HTTP, and all others through the actor.
        model_config = omega_conf_to_dataclass(self.model_config, dataclass_type=HFModelConfig)
        spec = make_fleet_spec(self.config, model_config, mode, serves_http=self.is_reward_model)
        fleet = fleet_name(mode, role + self.name_suffix)
        actor = get_or_create_fleet(fleet, spec, places[0].node_id)
        name = f"replica_{self.replica_rank}"
        self._server_address = await actor.add_replica.remote(name, places)
        watch(actor, fleet)
        self._server_handle = ReplicaHandle(actor, name)
        self.servers = [self._server_handle]

    def _mode(self) -> RolloutMode:
        """The mode of the fleet. Reward models and teachers keep the weights of their checkpoints."""
        if self.is_reward_model or self.is_teacher_model:
            return RolloutMode.COLOCATED
        if self.rollout_mode is VerlMode.STANDALONE:
            return RolloutMode.STANDALONE
        return RolloutMode.HYBRID


def get_or_create_fleet(name: str, spec: FleetSpec, node_id: str) -> Any:
    """The actor `name`, on the node `node_id` if it does not run yet."""
    return (
        ray.remote(FleetActor)
        .options(
            name=name,
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=MAX_CONCURRENCY,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(spec)
    )


async def _find_places(workers: Sequence[Any], per_node: int) -> list[NodePlace]:
    """The node and the GPUs of the workers of one server. Raises UnsupportedError if they are not grouped by nodes."""
    found = await asyncio.gather(*[worker.__ray_call__.remote(_describe_worker) for worker in workers])
    return group_places(found, per_node)


def group_places(found: Sequence[tuple[str, list[str]]], per_node: int) -> list[NodePlace]:
    """Places of a server whose workers have these nodes and devices, `per_node` workers on each node."""
    places = []
    for start in range(0, len(found), per_node):
        part = found[start : start + per_node]
        if len({node for node, _ in part}) > 1:
            raise UnsupportedError(
                f"one server has {per_node} workers on each node, but Ray has placed these on several nodes: choose "
                "trainer.n_gpus_per_node so that tensor_model_parallel_size * data_parallel_size divides it, or is a "
                "multiple of it"
            )
        devices = dict.fromkeys(device for _, devices in part for device in devices)
        places.append(NodePlace(node_id=part[0][0], devices=tuple(devices)))
    return places


def _describe_worker(_: Any) -> tuple[str, list[str]]:
    """The node of a worker and its GPUs. Runs in the worker. Raises UnsupportedError for other accelerators."""
    node_id = ray.get_runtime_context().get_node_id()
    if get_device_name() == "cpu":
        return node_id, []
    lent = ray.get_runtime_context().get_accelerator_ids()
    visible = [device for device in os.environ.get(VISIBLE_DEVICES, "").split(",") if device]
    devices = [str(device) for device in (lent.get("GPU") or visible)]
    if not devices:
        raise UnsupportedError(
            f"a worker on a device of the kind {get_device_name()!r} has no GPU: Ray has lent it {lent}; the rollout "
            "verl_server supports GPUs and CPUs"
        )
    return node_id, devices


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
                name = fleet_name(RolloutMode.STANDALONE)
                self._engine = TrainerEngine(name, await find_fleet(name).get_spec.remote())
            await self._engine.update_weights(weights, global_steps)

        def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, Any]]:
            return iter(())


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
