"""`Replica`: verl's view of one server. It asks the actor of the fleet to start the server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutMode as VerlMode
from verl.workers.rollout.replica import RolloutReplica

from verl_server.config import RolloutMode
from verl_server.errors import UnsupportedError
from verl_server.integrations.verl.fleet_actor import FleetActor
from verl_server.integrations.verl.ray_fleet import watch
from verl_server.integrations.verl.settings import FleetSpec, make_fleet_spec
from verl_server.rollout.launchers.ray_launcher import NodePlace
from verl_server.server.environment import VISIBLE_DEVICES

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
        return _BoundGenerate(method, self._replica) if name == "generate" else method


class _BoundGenerate:
    """The method `generate` of the actor, with the name of the replica."""

    def __init__(self, method: Any, replica: str) -> None:
        self._method, self._replica = method, replica

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self._method.remote(*args, replica=self._replica, **kwargs)


class Replica(RolloutReplica):  # type: ignore[misc] # verl has no types
    """One server. The servers of the policy are one fleet; a reward model and each teacher have fleets of their own."""

    async def launch_servers(self) -> None:
        """Start the server next to the workers of this replica."""
        mode = self._mode()
        role = "_reward" * self.is_reward_model + "_teacher" * self.is_teacher_model
        places = await _find_places(self.workers, self.gpus_per_replica_node)
        # verl asks a reward model over HTTP, and all others through the actor.
        spec = make_fleet_spec(self.config, self._full_model_config(), mode, serves_http=self.is_reward_model)
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

    def _full_model_config(self) -> Any:
        return omega_conf_to_dataclass(self.model_config, dataclass_type=HFModelConfig)


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
