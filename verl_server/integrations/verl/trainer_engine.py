"""`TrainerEngine`: the `VerlEngine` of all trainer ranks for one fleet, made at the first use. It imports no verl.

verl makes the ranks before the servers, so the fleet does not exist when a rank starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from verl_server.engine.verl_engine import VerlEngine
from verl_server.errors import ServerDiedError
from verl_server.integrations.verl.ray_fleet import RayFleet
from verl_server.integrations.verl.settings import LORA_NAME, FleetSpec
from verl_server.types import Json
from verl_server.weights.device import accelerator, as_current

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]


class TrainerEngine:
    """Pushes weights of the trainer into the servers of the fleet `actor_name`.

    Must be used by all ranks of the default process group, with the same calls in the same order. The methods do not
    block the event loop: verl's workers are asynchronous actors.
    """

    def __init__(self, actor_name: str, spec: FleetSpec) -> None:
        self._actor_name, self._spec = actor_name, spec
        self._engine: VerlEngine | None = None
        self._fleet: RayFleet | None = None

    async def resume(self, tags: Sequence[str]) -> None:
        """Resume memory of the servers. Does nothing if `sleep` releases nothing."""
        if self._spec.frees_memory:
            await self._run(lambda engine: engine.resume_memory_occupation(list(tags)))

    async def update_weights(self, weights: NamedTensors, global_steps: int | None) -> None:
        """Push `weights` as the weights of the training step `global_steps`. Consumes all of them on every rank."""

        def update(engine: VerlEngine) -> None:
            if self._fleet is not None:
                self._fleet.step_of_update = None if global_steps is None else int(global_steps)
            engine.update_weights_from_tensor(weights)

        await self._run(update)

    async def load_adapter(self, weights: NamedTensors, config: Mapping[str, Any], global_steps: int | None) -> None:
        """Push the policy's LoRA adapter."""

        def load(engine: VerlEngine) -> None:
            engine.load_lora_adapter(LORA_NAME, weights, plain_lora_config(config))
            if self._fleet is not None and global_steps is not None:
                self._fleet.name_version(engine.weight_version, int(global_steps))

        await self._run(load)

    @property
    def _timeout_s(self) -> float:
        return 5 * self._spec.own.adapter_config.timeouts.weights_s

    async def _run(self, call: Callable[[VerlEngine], T]) -> T:
        """Run a call in a thread that has the device of this thread as its current device."""
        device = accelerator()

        def run() -> T:
            with as_current(device):
                if self._engine is None:
                    self._engine = self._make_engine()
                return call(self._engine)

        return await asyncio.to_thread(run)

    def _make_engine(self) -> VerlEngine:
        """The engine of this rank. Collective over all ranks. Raises ServerDiedError if there is no fleet."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        own = self._spec.own
        if dist.get_rank() == 0:
            self._fleet = RayFleet(find_fleet(self._actor_name), self._timeout_s)
        config = own.adapter_config
        return VerlEngine(
            mesh,
            fleet=self._fleet,
            weights=own.weights_config,
            timeouts=config.timeouts,
            engine_kind=config.engine_kind,
            server_python=config.server_python,
            **self._spec.server_args,
        )

    def shutdown(self) -> None:
        """End the use of the fleet."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def find_fleet(actor_name: str) -> Any:
    """The actor of a fleet. Raises ServerDiedError if there is none."""
    try:
        return ray.get_actor(actor_name)
    except ValueError as error:
        raise ServerDiedError(
            f"the fleet {actor_name} does not run: its actor has ended or was never started; the log of the actor has "
            "the reason (ray logs actor)"
        ) from error


def plain_lora_config(config: Mapping[str, Any]) -> Json:
    """verl's configuration of an adapter with JSON values only, as in PEFT's `adapter_config.json`."""
    plain: Json = {}
    for key, value in config.items():
        value = getattr(value, "value", value)
        if isinstance(value, (set, tuple)):
            value = sorted(value)
        if value is None or isinstance(value, (str, int, float, bool, list, dict)):
            plain[key] = value
    return plain
