"""verl's checkpoint engine `verl_server`: weights for replicas with devices of their own.

`rollout.checkpoint_engine.backend=verl_server` chooses it. The trainer ranks push to the servers themselves, so the
workers of the replicas receive nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
    from verl_server.config import RolloutMode
    from verl_server.integrations.verl.replica import fleet_name
    from verl_server.integrations.verl.trainer_engine import TrainerEngine, find_fleet

    name = fleet_name(RolloutMode.STANDALONE)
    return TrainerEngine(name, await find_fleet(name).get_spec.remote())
